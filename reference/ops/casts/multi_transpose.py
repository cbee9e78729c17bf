"""`twin::multi_transpose`: matrices of FP8 codes, transposed; in one launch on a GPU.

    q_t[i][c, r] = q[i][r, c]

Weights that ranks gather in FP8 (`reference.float8.float8_shard`) come without transposed codes, which a GEMM of the
backward reads.
"""

from collections.abc import Sequence

import torch

from reference.ops.checks import check_each, check_fp8, check_lengths
from reference.ops.library import define

OP = "twin::multi_transpose"


def outputs(q: Sequence[torch.Tensor], q_t: Sequence[torch.Tensor]) -> None:
    check_lengths(OP, "q", len(q), {"q_t": q_t})
    for i, x in enumerate(q):
        check_fp8(OP, f"q[{i}]", x.dtype)
        if x.dim() != 2 or x.shape[0] % 16 or x.shape[1] % 16 or not x.is_contiguous():
            raise ValueError(
                f"{OP}: q[{i}] has shape {tuple(x.shape)}, strides {x.stride()}; contiguous [rows, cols], both "
                f"multiples of 16, is accepted."
            )
    if len(q):
        dtype, device, sizes = q[0].dtype, q[0].device, [x.shape for x in q]
        check_each(OP, "q", q, dtype, sizes, device)
        check_each(OP, "q_t", q_t, dtype, [(cols, rows) for rows, cols in sizes], device)


@define(outputs, mutates=("q_t",))
def multi_transpose(q: list[torch.Tensor], q_t: list[torch.Tensor]) -> None:
    """Transpose every matrix of `q` into the caller's outputs.

    Args:
        q: FP8 of one dtype, `[rows, cols]` each, contiguous; both multiples of 16.
        q_t: `[cols, rows]`.
    """
    outputs(q, q_t)
    for x, x_t in zip(q, q_t, strict=True):
        x_t.view(torch.uint8).copy_(x.view(torch.uint8).t())
