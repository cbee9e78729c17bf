"""Inputs of `cast_stats`."""

import math

import numpy as np
import torch

import reference as te  # noqa: F401  (registers the CPU definitions)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 448.0, 464.0, 465.0, -480.0, 61440.0, 61472.0, 2.0**-9, 2.0**-10]


def numbers(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of all magnitudes, some of them special."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, cols)) * np.exp2(draw.integers(-24, 15, size=(rows, cols)))
    where = draw.random(x.shape) < 0.1
    x[where] = draw.choice(SPECIAL, size=int(where.sum()))
    return torch.from_numpy(x.astype(np.float32)).to(dtype)
