"""`twin::amax`: note the largest magnitude of a tensor in the amax history, and nothing else (calibration).

    amax_history[0, column] = max(amax_history[0, column], max |x| over the x that are not NaN)

`x` is read as fp32 (exactly) and not scaled. Infinity counts, NaN does not, an empty `x` changes nothing.
"""

import torch

from reference import formats
from reference.ops.library import define


def check_input(op: str, name: str, x: torch.Tensor) -> None:
    """Refuse an activation or gradient that is not `[rows, cols]`, row-major, in fp32, bf16 or fp16."""
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} must be 2-D, [rows, cols]; got shape {tuple(x.shape)}.")
    if x.dtype not in formats.WIDE_DTYPES:
        raise ValueError(f"{op}: {name} must be torch.float32, torch.bfloat16 or torch.float16; got {x.dtype}.")
    if not x.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous (row-major); got strides {tuple(x.stride())} for shape "
            f"{tuple(x.shape)}: call .contiguous() first."
        )


def check_history(op: str, x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """Refuse an amax history that is not fp32 `[length, columns]` on x's device, or lacks the column."""
    if amax_history.dim() != 2 or amax_history.shape[0] == 0:
        raise ValueError(
            f"{op}: amax_history must be 2-D, [length, columns], with at least one row; "
            f"got shape {tuple(amax_history.shape)}."
        )
    if amax_history.dtype != torch.float32:
        raise ValueError(f"{op}: amax_history must be torch.float32; got {amax_history.dtype}.")
    if amax_history.device != x.device:
        raise ValueError(f"{op}: amax_history is on {amax_history.device}, the data on {x.device}.")
    if not 0 <= column < amax_history.shape[1]:
        raise no_column(op, "amax_history", amax_history.shape[1], column)


def no_column(op: str, name: str, columns: int, column: int) -> ValueError:
    """What to raise for a column that `name` does not have."""
    return ValueError(f"{op}: column must be from 0 to {columns - 1}, the columns of {name}; got {column}.")


def record_amax(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """Max x's amax into the staging row of the history, in place.

    The comparison is one of fp32 words as integers, as the kernel's atomic is: for the non-negative numbers
    that a history holds, the same as one of fp32.
    """
    slot = amax_history[0, column].view(torch.int32)
    slot.copy_(torch.maximum(slot, formats.amax(x).view(torch.int32)))


def outputs(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """Refuse what `twin::amax` does not take. It returns nothing."""
    check_input("twin::amax", "x", x)
    check_history("twin::amax", x, amax_history, column)


@define(outputs, mutates=("amax_history",))
def amax(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """`x` `[rows, cols]`; `amax_history` fp32 `[length, columns]`, `[0, column]` of it updated in place."""
    outputs(x, amax_history, column)
    record_amax(x, amax_history, column)
