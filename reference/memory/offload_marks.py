"""Marks on tensors that stay where they are while `get_cpu_offload_context` moves others."""

from typing import Any

import torch

__all__ = ["is_marked", "mark_not_offload"]


def mark_not_offload(*tensors: Any) -> None:
    """Let tensors stay on the GPU where `get_cpu_offload_context` would move them.

    Args:
        tensors: each a tensor of any dtype, also in FP8, or None, which is ignored.
    """
    for x in tensors:
        if not (x is None or isinstance(x, torch.Tensor)):
            raise TypeError(f"mark_not_offload: {x!r}; tensors and None are accepted.")
    for x in tensors:
        kept = getattr(x, "_kept", None)  # of a quantized tensor: it is these that layers save
        for one in (x,) if kept is None else (x, kept.codes, kept.transposed, kept.scale_inv_t):
            if one is not None:
                one._TE_do_not_offload = True  # Transformer Engine's name


def is_marked(x: torch.Tensor) -> bool:
    """Whether it stays."""
    return getattr(x, "_TE_do_not_offload", False) is True
