"""Inputs of casts, and outputs that are poisoned before."""

import numpy as np
import torch

import optimized  # noqa: F401  (registers the CUDA kernels)


def numbers(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of very different sizes; some saturate, some underflow, some are special."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, cols)) * np.exp2(draw.integers(-20, 14, size=(rows, cols)))
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 2.0**-9, 2.0**-10, 464.0, 61440.0]
    where = draw.random(x.shape) < 0.02
    x[where] = draw.choice(special, size=int(where.sum()))
    return torch.from_numpy(x.astype(np.float32)).to(dtype)


def poison(size: int) -> None:
    """Leave 0xAB where the next allocations of up to `size` bytes will be, so that an unwritten byte shows."""
    blocks = [torch.full((max(1, size),), 0xAB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    del blocks
