"""`twin::cast_transpose` and `twin::cast_transpose_dbias`: the FP8 cast, with the transposed copy beside it.

    q, scale_inv, amax   as in `twin::cast`
    q_t[c, r] = q[r, c]  for r < rows;  0x00 (= +0) for rows <= r < ceil16(rows)
    dbias                as in `twin::dbias`, of x itself: neither scaled nor cast

FP8 tensor cores read both operands along K. So wgrad, whose K is the tokens, needs the transposed copies,
and their padding to a multiple of 16 tokens: a zero adds nothing to a sum of products, and changes no bit.
"""

import torch

from reference.ops.cast import cast_rows, check_cast
from reference.ops.dbias import sum_rows
from reference.ops.library import define, fake


def ceil16(rows: int) -> int:
    """`rows` rounded up to a multiple of 16."""
    return (rows + 15) // 16 * 16


def transposed(q: torch.Tensor) -> torch.Tensor:
    """The transposed copy of FP8 `q` `[rows, cols]`, padded with zero codes: `[cols, ceil16(rows)]`."""
    rows, cols = q.shape
    codes = torch.empty(cols, ceil16(rows), dtype=torch.uint8, device="cpu")
    codes[:, :rows].copy_(q.view(torch.uint8).t())
    codes[:, rows:].zero_()
    return codes.view(q.dtype)


def cast_outputs(x: torch.Tensor, cols: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv `[1]`), for the rows and on the device of x."""
    rows = x.shape[0]
    return (
        torch.empty((rows, cols), dtype=dtype, device=x.device),
        torch.empty((cols, ceil16(rows)), dtype=dtype, device=x.device),
        torch.empty(1, dtype=torch.float32, device=x.device),
    )


@define("cast_transpose")
def cast_transpose(
    x: torch.Tensor, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` `[rows, cols]` -> (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv fp32 `[1]`)."""
    check_cast("twin::cast_transpose", x, scale, amax_history, column, dtype)
    q, scale_inv = cast_rows(x, scale, amax_history, column, dtype)
    return q, transposed(q), scale_inv


@define("cast_transpose_dbias")
def cast_transpose_dbias(
    x: torch.Tensor, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` `[rows, cols]` -> (q, q_t, scale_inv as in `cast_transpose`, dbias `[cols]` of x's dtype)."""
    check_cast("twin::cast_transpose_dbias", x, scale, amax_history, column, dtype)
    q, scale_inv = cast_rows(x, scale, amax_history, column, dtype)
    return q, transposed(q), scale_inv, sum_rows(x)


@fake("cast_transpose")
def _(
    x: torch.Tensor, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_cast("twin::cast_transpose", x, scale, amax_history, column, dtype)
    return cast_outputs(x, x.shape[1], dtype)


@fake("cast_transpose_dbias")
def _(
    x: torch.Tensor, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_cast("twin::cast_transpose_dbias", x, scale, amax_history, column, dtype)
    return (*cast_outputs(x, x.shape[1], dtype), x.new_empty(x.shape[1]))
