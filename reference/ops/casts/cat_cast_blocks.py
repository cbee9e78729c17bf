"""`twin::cat_cast_blocks_transpose_dbias`: a gradient cast in blocks, of several matrices side by side.

xs[i] is `[rows, groups·w_i]`; x `[rows, cols]` has w_i columns of every matrix in each group, in order, as in
`twin::cat_cast_transpose_dbias`.

    q, q_t, scale_inv, scale_inv_t      of x, bit for bit `twin::cast_blocks_transpose` with blocks of a row
    dbias                               of x, bit for bit `twin::dbias`

It makes the gradient of a linear map, and from those of q, k and v that of the QKV projection, from one read.
"""

from collections.abc import Sequence

import torch

from reference.ops.casts.cast_blocks import Five, cast_blocks_transpose, check_cast_blocks, new_four
from reference.ops.casts.cat_cast_transpose import check_parts, side_by_side
from reference.ops.casts.dbias import sum_rows
from reference.ops.library import define

OP = "twin::cat_cast_blocks_transpose_dbias"


def outputs(xs: Sequence[torch.Tensor], groups: int, dtype: torch.dtype, dialect: str, epsilon: float) -> Five:
    cols = check_parts(OP, xs, groups)
    check_cast_blocks(OP, cols, dtype, dialect, epsilon)
    return *new_four(xs[0], cols, dtype, False), xs[0].new_empty(cols)


@define(outputs)
def cat_cast_blocks_transpose_dbias(
    xs: list[torch.Tensor], groups: int, dtype: torch.dtype, dialect: str, epsilon: float
) -> Five:
    """xs -> (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv, scale_inv_t, dbias `[cols]` of xs's dtype)."""
    *_, dbias = outputs(xs, groups, dtype, dialect, epsilon)
    x = side_by_side(xs, groups)
    return *cast_blocks_transpose(x, dtype, False, dialect, epsilon), dbias.copy_(sum_rows(x))
