"""`twin::current_scale`: the scale of a tensor's own amax, by which current scaling casts it.

    amax  = max(max |x| over the x that are not NaN, epsilon)       fp32, x not scaled; 0 where there are none
    scale = 448 or 57,344 / amax                                    one IEEE division, the largest number of `dtype`

The scale is 1 where that amax is 0 or infinite, and at most the largest fp32 number. With `power_of_two` its mantissa
is cleared at last: it becomes the power of two at or below it.

Source: Transformer Engine 2.20, `common/recipe/recipe_common.cuh` (`compute_scale_from_amax`).
"""

import torch

from reference.numbers import formats
from reference.ops.casts.cast_blocks import scales_of
from reference.ops.checks import check_fp8, check_input
from reference.ops.library import define

OP = "twin::current_scale"
Scale = tuple[torch.dtype, bool, float]
"""The last arguments of every op that makes such a scale: dtype, power_of_two, epsilon."""


def check_scale(op: str, dtype: torch.dtype, power_of_two: bool, epsilon: float) -> None:
    """Refuse a dtype of codes or an epsilon that is not accepted; `op` names the caller in the error."""
    check_fp8(op, "dtype", dtype)
    if not 0 <= epsilon <= torch.finfo(torch.float32).max:
        raise ValueError(f"{op}: epsilon={epsilon!r}; a finite number of fp32, from 0 on, is accepted.")


def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float) -> torch.Tensor:
    """The scale of an fp32 amax, of any shape."""
    return scales_of(amax, torch.float32, dtype, "power_of_two" if power_of_two else "fp32", epsilon)[0]


def outputs(x: torch.Tensor, *scale: *Scale) -> torch.Tensor:
    check_input(OP, "x", x)
    check_scale(OP, *scale)
    return x.new_empty(1, dtype=torch.float32)


@define(outputs)
def current_scale(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float) -> torch.Tensor:
    """x `[rows, cols]`, fp32, bf16 or fp16 -> the scale for a cast to `dtype`, fp32 `[1]`."""
    out = outputs(x, dtype, power_of_two, epsilon)
    return out.copy_(scale_of(formats.amax(x), dtype, power_of_two, epsilon))
