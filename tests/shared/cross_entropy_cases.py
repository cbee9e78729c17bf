"""Batches for cross-entropy."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORED = -100


def batch(rows: int, classes: int, dtype: torch.dtype, seed: int, scale: float = 3.0) -> tuple[torch.Tensor, ...]:
    """Logits, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, classes, generator=generator) * scale).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.2] = IGNORED
    return logits, target
