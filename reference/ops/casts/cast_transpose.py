"""`twin::cast_transpose` and `twin::cast_transpose_dbias`: the FP8 cast with a transposed copy.

    q, scale_inv, amax   as in `twin::cast`
    q_t[c, r] = q[r, c]  for r < rows;  0x00 (= +0) for rows <= r < ceil16(rows)
    dbias                as in `twin::dbias`, of x itself: neither scaled nor cast

With lengths and starts, as in `twin::cast`, rows of x that are in no sequence have zero codes in q_t, too, and do not
count for the amax. `twin::cast_transpose_dbias` has no such rows.

FP8 tensor cores read both operands along K. So wgrad, whose K is the tokens, needs the transposed copies, padded to a
multiple of 16 tokens. The padding changes no bit: a zero adds nothing to a sum of products.
"""

import torch

from reference.ops.casts.cast import Scaling, alone, cast_rows, check_cast, check_sequences, new_codes
from reference.ops.casts.dbias import sum_rows
from reference.ops.library import define

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def ceil16(rows: int) -> int:
    """`rows` rounded up to a multiple of 16."""
    return (rows + 15) // 16 * 16


def transpose_codes(q: torch.Tensor, q_t: torch.Tensor) -> None:
    """Write the transpose of FP8 `q` `[rows, cols]`, padded with zero codes, to q_t `[cols, ceil16(rows)]`."""
    rows = q.shape[0]
    codes = q_t.view(torch.uint8)
    codes[:, :rows].copy_(q.view(torch.uint8).t())
    codes[:, rows:].zero_()


def cast_outputs(x: torch.Tensor, cols: int, dtype: torch.dtype, packed: bool = False) -> Three:
    """Allocate (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv `[1]`), with x's rows, on x's device."""
    rows = x.shape[0]
    return (
        new_codes(rows, cols, dtype, x.device, packed),
        torch.empty((cols, ceil16(rows)), dtype=dtype, device=x.device),
        torch.empty(1, dtype=torch.float32, device=x.device),
    )


def cast_transpose_outputs(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> Three:
    check_cast("twin::cast_transpose", x, scale, amax_history, column, dtype)
    packed = check_sequences("twin::cast_transpose", x, lengths, starts)
    return cast_outputs(x, x.shape[1], dtype, packed)


def cast_transpose_dbias_outputs(x: torch.Tensor, *scaling: *Scaling) -> Four:
    check_cast("twin::cast_transpose_dbias", x, *scaling)
    return *cast_outputs(x, x.shape[1], scaling[3]), x.new_empty(x.shape[1])


@define(cast_transpose_outputs, mutates=("amax_history",))
def cast_transpose(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> Three:
    """`x` `[rows, cols]` -> (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv fp32 `[1]`).

    lengths, starts: int32 `[b]` and `[b + 1]`, of the packed sequences whose tokens x's rows are.
    """
    q, q_t, scale_inv = cast_transpose_outputs(x, scale, amax_history, column, dtype, lengths, starts)
    cast_rows(x, scale, amax_history, column, q, scale_inv, alone("twin::cast_transpose", x, lengths, starts))
    transpose_codes(q, q_t)
    return q, q_t, scale_inv


@define(cast_transpose_dbias_outputs, mutates=("amax_history",))
def cast_transpose_dbias(
    x: torch.Tensor, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> Four:
    """`x` `[rows, cols]` -> (q, q_t, scale_inv as in `cast_transpose`, dbias `[cols]` of x's dtype)."""
    q, q_t, scale_inv, dbias = cast_transpose_dbias_outputs(x, scale, amax_history, column, dtype)
    cast_rows(x, scale, amax_history, column, q, scale_inv)
    transpose_codes(q, q_t)
    return q, q_t, scale_inv, dbias.copy_(sum_rows(x))
