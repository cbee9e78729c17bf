"""`twin::multi_cast_transpose`: `twin::cast_transpose` of several matrices, in one launch on a GPU.

For each i, q[i], q_t[i], scale_inv[i] and the amax in amax_histories[i] are those that `twin::cast_transpose` gives for
xs[i], scales[i] and columns[i]. The caller provides the outputs, so a layer can keep them from step to step. Scales
and histories may occur several times in the lists with different columns, as for weights of one module.
"""

from collections.abc import Sequence

import torch

from reference.ops.casts.cast import cast_rows, check_cast
from reference.ops.casts.cast_transpose import ceil16, transpose_codes
from reference.ops.checks import check_each, check_lengths
from reference.ops.library import define

OP = "twin::multi_cast_transpose"


def outputs(
    xs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_histories: Sequence[torch.Tensor],
    columns: Sequence[int],
    q: Sequence[torch.Tensor],
    q_t: Sequence[torch.Tensor],
    scale_inv: Sequence[torch.Tensor],
) -> None:
    lists: dict[str, Sequence[object]] = {"scales": scales, "columns": columns, "q": q, "q_t": q_t}
    noted = {"amax_histories": amax_histories} if len(amax_histories) else {}
    check_lengths(OP, "xs", len(xs), {**lists, "scale_inv": scale_inv, **noted})
    for i, x in enumerate(xs):
        check_cast(OP, x, scales[i], amax_histories[i] if len(amax_histories) else None, columns[i], q[i].dtype)
        if x.dtype != xs[0].dtype or q[i].dtype != q[0].dtype or x.device != xs[0].device:
            raise ValueError(
                f"{OP}: xs[{i}] is {x.dtype} on {x.device}, to {q[i].dtype}, and xs[0] {xs[0].dtype} on "
                f"{xs[0].device}, to {q[0].dtype}; they must agree."
            )
    if len(xs):
        dtype, device, sizes = q[0].dtype, xs[0].device, [x.shape for x in xs]
        check_each(OP, "q", q, dtype, sizes, device)
        check_each(OP, "q_t", q_t, dtype, [(cols, ceil16(rows)) for rows, cols in sizes], device)
        check_each(OP, "scale_inv", scale_inv, torch.float32, [(1,)] * len(xs), device)


@define(outputs, mutates=("amax_histories", "q", "q_t", "scale_inv"))
def multi_cast_transpose(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    amax_histories: list[torch.Tensor],
    columns: list[int],
    q: list[torch.Tensor],
    q_t: list[torch.Tensor],
    scale_inv: list[torch.Tensor],
) -> None:
    """Cast every matrix of `xs` into the caller's outputs.

    Args:
        xs: `[rows, cols]` each, contiguous, of one dtype (fp32, bf16 or fp16); cols a multiple of 16.
        scales: fp32 `[n]`; entry columns[i] applies.
        amax_histories: fp32 `[L, n]`, whose entry [0, columns[i]] takes the amax; an empty list records none.
        columns: one for each of xs.
        q: FP8 of one dtype, `[rows, cols]`.
        q_t: `[cols, ceil16(rows)]`.
        scale_inv: fp32 `[1]`.
    """
    outputs(xs, scales, amax_histories, columns, q, q_t, scale_inv)
    for i, x in enumerate(xs):
        history = amax_histories[i] if amax_histories else None
        cast_rows(x, scales[i], history, columns[i], q[i], scale_inv[i])
        transpose_codes(q[i], q_t[i])
