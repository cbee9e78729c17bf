"""`twin::amax`: note the largest magnitude of a tensor in the amax history, and nothing else (calibration).

    amax_history[0, column] = max(amax_history[0, column], max |x| over the x that are not NaN)

`x` is read as fp32 (exactly) and not scaled. Infinity counts, NaN does not, an empty `x` changes nothing.
"""

import torch

from reference import formats
from reference.ops.checks import check_history, check_input
from reference.ops.library import define


def record_amax(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """Max x's amax into the staging row of the history, in place.

    The comparison is one of fp32 words as integers, as the kernel's atomic is: for the non-negative numbers
    that a history holds, the same as one of fp32.
    """
    slot = amax_history[0, column].view(torch.int32)
    slot.copy_(torch.maximum(slot, formats.amax(x).view(torch.int32)))


def outputs(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    check_input("twin::amax", "x", x)
    check_history("twin::amax", x, amax_history, column)


@define(outputs, mutates=("amax_history",))
def amax(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """`x` `[rows, cols]`; `amax_history` fp32 `[length, columns]`, `[0, column]` of it updated in place."""
    outputs(x, amax_history, column)
    record_amax(x, amax_history, column)
