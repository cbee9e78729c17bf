"""`twin::clip_grads`: scale gradients so that their norm, which lies on their device, is at most `max_norm`.

    c = (1 / (norm + 1e-6)) · max_norm        fp32, each operation one rounding, IEEE division
    c = 1 where c > 1                         NaN stays
    g = round(fp32(g) · c)                    one rounding to fp32, and one to g's dtype; unchanged where c = 1

Source: `torch.nn.utils.clip_grads_with_norm_`, of which fp32 gradients have every bit for the same norm. PyTorch
rounds c to the dtype of 16-bit gradients first, this does not.
"""

from collections.abc import Sequence

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_like
from reference.ops.library import define
from reference.ops.optimizers.grad_norm import check_grads

OP = "twin::clip_grads"


def outputs(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Refuse what `twin::clip_grads` does not accept."""
    check_grads(OP, grads)
    check_like(OP, "norm", norm, torch.float32, (), grads[0].device if len(grads) else norm.device)
    if not max_norm >= 0:
        raise ValueError(f"{OP}: max_norm={max_norm!r}; a number >= 0 is accepted.")


@define(outputs, mutates=("grads",))
def clip_grads(grads: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale `grads` in place.

    Args:
        grads: contiguous fp32, bf16 or fp16 tensors of any shapes on one device; no memory twice.
        norm: fp32 `[]` on that device, as `twin::grad_norm` gives it.
        max_norm: a number >= 0, rounded to fp32.
    """
    outputs(grads, norm, max_norm)
    one = np.float32(1)
    with np.errstate(all="ignore"):
        c = (one / (np.float32(norm.item()) + np.float32(1e-6))) * np.float32(max_norm)
        if c >= one:
            return
        for grad in grads:
            grad.copy_(torch.from_numpy(np.asarray(formats.widen(grad.detach()).numpy() * c)))
