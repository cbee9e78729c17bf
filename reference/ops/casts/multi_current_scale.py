"""`twin::multi_current_scale`: `twin::current_scale` of several matrices, in one launch on a GPU.

    scale[i] = current_scale(xs[i])                     of each matrix by itself
    scale[0] = current_scale(all numbers of xs)         joined: of one matrix that consists of them, in any order

A layer's weights are cast by the former (`twin::multi_cast_transpose`), the gradients of q, k and v by the latter
(`twin::cat_cast_transpose_dbias`).
"""

from collections.abc import Sequence

import torch

from reference.numbers import formats
from reference.ops.casts.current_scale import Scale, check_scale, scale_of
from reference.ops.checks import check_input
from reference.ops.library import define

OP = "twin::multi_current_scale"


def outputs(xs: Sequence[torch.Tensor], joined: bool, *scale: *Scale) -> torch.Tensor:
    for i, x in enumerate(xs):
        check_input(OP, f"xs[{i}]", x)
        if x.dtype != xs[0].dtype or x.device != xs[0].device:
            raise ValueError(
                f"{OP}: xs[{i}] is {x.dtype} on {x.device}, xs[0] {xs[0].dtype} on {xs[0].device}; they must agree."
            )
    check_scale(OP, *scale)
    return xs[0].new_empty(1 if joined else len(xs), dtype=torch.float32)


@define(outputs)
def multi_current_scale(
    xs: list[torch.Tensor], joined: bool, dtype: torch.dtype, power_of_two: bool, epsilon: float
) -> torch.Tensor:
    """xs `[rows, cols]` each, of one dtype -> the scales for casts to `dtype`, fp32 `[len(xs)]`; joined: `[1]`."""
    out = outputs(xs, joined, dtype, power_of_two, epsilon)
    amaxes = torch.stack([formats.amax(x) for x in xs])
    return out.copy_(scale_of(amaxes.amax(0, keepdim=True) if joined else amaxes, dtype, power_of_two, epsilon))
