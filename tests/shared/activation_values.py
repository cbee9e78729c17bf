"""Inputs of activations: every word of 16 bits, and special values."""

import torch

NAN, INF = float("nan"), float("inf")


def numbers(rows: int, cols: int, dtype: torch.dtype, seed: int, spread: float = 2.0) -> torch.Tensor:
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def every_word(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 words of a 16-bit type: `[256, 256]`."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
