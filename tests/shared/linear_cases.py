"""Inputs and recipes of the tests of `Linear`."""

import numpy as np
import torch

import reference as te

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RECIPES = [
    te.DelayedScaling(amax_history_len=3),
    te.DelayedScaling(fp8_format=te.Format.E4M3, amax_history_len=2, amax_compute_algo="most_recent", margin=1),
]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """fp32 from NumPy, so that a failure can be replayed anywhere."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))
