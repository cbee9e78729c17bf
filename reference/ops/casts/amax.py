"""`twin::amax`: record the largest magnitude of a tensor in the amax history, and nothing else (calibration).

    amax_history[0, column] = max(amax_history[0, column], max |x| over the x that are not NaN)

`x` is widened to fp32 (exactly) and not scaled. Infinity counts, NaN does not, an empty `x` changes nothing.
"""

import torch

from reference.numbers import formats
from reference.ops.checks import check_history, check_input
from reference.ops.library import define


def record_amax(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """Write the maximum of x's amax and row 0 of the history to that row, in place.

    fp32 words are compared as integers, as by the kernel's atomic: the same for non-negative numbers, and a history
    holds no others.
    """
    slot = amax_history[0, column].view(torch.int32)
    slot.copy_(torch.maximum(slot, formats.amax(x).view(torch.int32)))


def outputs(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    check_input("twin::amax", "x", x)
    check_history("twin::amax", x, amax_history, column)


@define(outputs, mutates=("amax_history",))
def amax(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """`x` `[rows, cols]`; `amax_history` fp32 `[length, columns]`, whose entry `[0, column]` is updated in place."""
    outputs(x, amax_history, column)
    record_amax(x, amax_history, column)
