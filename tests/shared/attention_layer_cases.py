"""Masks of attention's layers, and their result in fp64."""

import numpy as np
import torch


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, scale: float) -> torch.Tensor:
    """softmax(q kᵀ · scale) v in float64 of `[s, b, h, d]`; rows that see nothing are 0."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * scale
    if hidden is not None:
        s = s.masked_fill(hidden, -torch.inf)
    out = torch.nan_to_num(s.softmax(-1)) @ v
    return out.permute(2, 0, 1, 3).flatten(2)


CAUSAL = torch.ones(20, 20, dtype=torch.bool).triu(1)
PADDING = (torch.arange(20) >= torch.tensor([[20], [13]])).view(2, 1, 1, 20)
ARBITRARY = torch.from_numpy(np.random.default_rng(5).random((2, 1, 20, 20)) < 0.4)
