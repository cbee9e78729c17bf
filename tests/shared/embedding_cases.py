"""Lookups for embeddings."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lookups(count: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients, and numbers of rows, a few of which come very often, as a text's words do."""
    generator = torch.Generator().manual_seed(seed)
    often = torch.rand(count, generator=generator) < 0.5
    ids = torch.randint(0, rows, (count,), generator=generator)
    ids = torch.where(often, ids % min(3, rows), ids)
    return torch.randn(count, width, generator=generator).to(dtype), ids
