"""`twin::cat_cast_transpose_dbias`: `twin::cast_transpose_dbias` of several matrices side by side.

xs[i] is `[rows, groups·w_i]`. Each group of x consists of w_i columns of every matrix, in order:

    x[r, g, :] = xs[0][r, g, :], xs[1][r, g, :], ...        x `[rows, groups, sum of w_i]`, then flattened
    q, q_t, scale_inv, dbias, amax                          of x, bit for bit `twin::cast_transpose_dbias`

It makes the gradient of the QKV projection from those of q, k and v without concatenating them in memory first.
`groups` is 1 where the projection's rows are `[part, head]`, the number of groups where they are `[group, part]`.
"""

from collections.abc import Sequence

import torch

from reference.ops.casts.cast import Scaling, check_scaling
from reference.ops.casts.cast_transpose import Four, cast_outputs, cast_transpose_dbias
from reference.ops.checks import check_input
from reference.ops.library import define

OP = "twin::cat_cast_transpose_dbias"
PARTS = 3


def side_by_side(xs: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """x `[rows, cols]`, copied eight bytes at a time: on a GPU, `cat`'s time depends on the number of elements.

    A matrix that starts elsewhere has no words of eight bytes, and all are copied by elements; so they are where a
    compiler, which chooses its own words, does not see where a matrix starts.
    """
    rows, size = xs[0].shape[0], xs[0].element_size()
    elsewhere = torch.compiler.is_compiling() or any(x.storage_offset() * size % 8 for x in xs)
    word = xs[0].dtype if elsewhere else torch.int64
    wide = [x.reshape(-1).view(word).view(rows, groups, x.shape[1] * size // (word.itemsize * groups)) for x in xs]
    return torch.cat(wide, dim=2).view(-1).view(xs[0].dtype).view(rows, sum(x.shape[1] for x in xs))


def check_parts(op: str, xs: Sequence[torch.Tensor], groups: int) -> int:
    """Refuse matrices that do not go side by side; `op` names the caller in the error. Their columns together."""
    if not 1 <= len(xs) <= PARTS:
        raise ValueError(f"{op}: xs must be 1 to {PARTS} matrices; got {len(xs)}.")
    first = xs[0]
    for i, x in enumerate(xs):
        check_input(op, f"xs[{i}]", x)
        # Vectors of 16 bytes must not reach from one part into the next.
        if x.shape[0] != first.shape[0] or groups < 1 or x.shape[1] % (8 * groups):
            raise ValueError(
                f"{op}: xs[{i}] must have {first.shape[0]} rows, as xs[0], and columns that are a multiple of "
                f"8 · groups, groups={groups} >= 1; got {list(x.shape)}."
            )
        if x.dtype != first.dtype or x.device != first.device:
            raise ValueError(f"{op}: xs[{i}] is {x.dtype} on {x.device}, xs[0] {first.dtype} on {first.device}.")
    cols = sum(x.shape[1] for x in xs)
    if cols % 16:
        raise ValueError(f"{op}: the columns of xs together must be a multiple of 16; got {cols}.")
    return cols


def outputs(xs: Sequence[torch.Tensor], groups: int, *scaling: *Scaling) -> Four:
    cols = check_parts(OP, xs, groups)
    check_scaling(OP, xs[0], *scaling)
    return *cast_outputs(xs[0], cols, scaling[3]), xs[0].new_empty(cols)


@define(outputs, mutates=("amax_history",))
def cat_cast_transpose_dbias(
    xs: list[torch.Tensor],
    groups: int,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> Four:
    """xs -> (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv fp32 `[1]`, dbias `[cols]` of xs's dtype)."""
    outputs(xs, groups, scale, amax_history, column, dtype)
    return cast_transpose_dbias(side_by_side(xs, groups), scale, amax_history, column, dtype)
