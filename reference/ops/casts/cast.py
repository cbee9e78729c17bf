"""`twin::cast`: the cast to FP8, which also records the amax.

    q[r, c]   = satfinite_rne(fp32(x[r, c]) · scale[column])    one fp32 rounding, then one to FP8; infinite x: NaN
    scale_inv = 1 / scale[column]                               IEEE division
    amax_history[0, column] = max(itself, max |x| over the x that are not NaN), x not scaled

With lengths and starts, int32 `[b]` and `[b + 1]`, the rows are tokens of packed sequences, as in
`reference.ops.attentions.attention_packed`. Then a row r that is in no sequence is not looked at:

    q[r, c]   = 0x00                                            whatever x[r] and the scale are
    amax_history has the maximum over the rows of sequences

so that codes and amax are those of the same sequences in a batch padded with zeros, wherever they lie. (The cast of
attention in FP8. After q's last row its memory has room for `ROOM` more, which mean nothing: the attention kernels read
keys four rows at a time.) On a GPU a start or a length outside of its range counts as the nearest number inside.

NaN and infinities become 0x7F, a product beyond the format ±largest (`reference.numbers.formats`). `scale_inv` turns
this q back into numbers; the cast computes it because `scale` has changed by the time of the backward pass.
"""

import torch

from reference.numbers import formats
from reference.ops.attentions.attention_lengths import check_one
from reference.ops.attentions.attention_packed import alone_rows, check_rows, check_starts
from reference.ops.casts.amax import record_amax
from reference.ops.checks import check_column, check_columns, check_fp8, check_history, check_input
from reference.ops.library import define

Scaling = tuple[torch.Tensor, torch.Tensor | None, int, torch.dtype]
"""The last arguments of every op that casts: scale, amax_history, column, dtype."""
ROOM = 3
"""Rows after the codes of packed sequences."""


def check_cast(op: str, x: torch.Tensor, *scaling: *Scaling) -> None:
    """Refuse what the FP8 casts do not accept; `op` names the caller in the error."""
    check_input(op, "x", x)
    check_columns(op, "x", x.shape[1], f" (shape {tuple(x.shape)})")
    check_scaling(op, x, *scaling)


def check_scaling(
    op: str, x: torch.Tensor, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> None:
    """`check_cast` of everything but x itself."""
    check_fp8(op, "dtype", dtype)
    if scale.dim() != 1:
        raise ValueError(f"{op}: scale must be 1-D, [columns]; got shape {tuple(scale.shape)}.")
    if scale.dtype != torch.float32:
        raise ValueError(f"{op}: scale must be torch.float32; got {scale.dtype}.")
    if scale.device != x.device:
        raise ValueError(f"{op}: scale is on {scale.device}, the data on {x.device}.")
    check_column(op, "scale", scale.shape[0], column)
    if amax_history is not None:
        check_history(op, x, amax_history, column)


def check_sequences(op: str, x: torch.Tensor, lengths: torch.Tensor | None, starts: torch.Tensor | None) -> bool:
    """Whether x's rows are tokens of packed sequences; refuses lengths and starts that do not belong together."""
    if lengths is None or starts is None:
        if lengths is not starts:
            raise ValueError(f"{op}: {'starts' if starts is None else 'lengths'}=None; both or none are accepted.")
        return False
    check_starts(op, "starts", starts, starts, x.device, "x")
    check_one(op, "lengths", lengths, starts.shape[0] - 1, x.device, "x")
    return True


def alone(op: str, x: torch.Tensor, lengths: torch.Tensor | None, starts: torch.Tensor | None) -> torch.Tensor | None:
    """Which of x's rows are in no sequence, bool `[rows]`, or None without sequences; refuses those that do not fit."""
    if lengths is None or starts is None:
        return None
    check_rows(op, "", starts, lengths, x.shape[0])
    return alone_rows(lengths, starts, x.shape[0])


def new_codes(rows: int, cols: int, dtype: torch.dtype, device: torch.device, packed: bool) -> torch.Tensor:
    """Memory for codes `[rows, cols]`, of packed sequences with `ROOM` behind them."""
    return torch.empty((rows + ROOM * packed, cols), dtype=dtype, device=device)[:rows]


def cast_rows(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    q: torch.Tensor,
    scale_inv: torch.Tensor,
    none: torch.Tensor | None = None,
) -> None:
    """The cast, without checks, into q `[rows, cols]` and scale_inv fp32 `[1]`; not of rows where `none` is True."""
    factor = scale[column]
    if none is not None:
        x = x.masked_fill(none[:, None], 0.0)
    formats.cast_into(q, x, factor)
    if none is not None:
        q.view(torch.uint8)[none] = 0  # 0 times an infinite scale is NaN
    if amax_history is not None:
        record_amax(x, amax_history, column)
    # A division: a reciprocal instruction is an approximation on some machines.
    scale_inv.fill_(1.0).div_(factor)


def outputs(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_cast("twin::cast", x, scale, amax_history, column, dtype)
    packed = check_sequences("twin::cast", x, lengths, starts)
    return new_codes(x.shape[0], x.shape[1], dtype, x.device, packed), x.new_empty(1, dtype=torch.float32)


@define(outputs, mutates=("amax_history",))
def cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[rows, cols]`, `scale` fp32 `[columns]` -> (q `[rows, cols]` of `dtype`, scale_inv fp32 `[1]`).

    lengths, starts: int32 `[b]` and `[b + 1]`, of the packed sequences whose tokens x's rows are.
    """
    q, scale_inv = outputs(x, scale, amax_history, column, dtype, lengths, starts)
    cast_rows(x, scale, amax_history, column, q, scale_inv, alone("twin::cast", x, lengths, starts))
    return q, scale_inv
