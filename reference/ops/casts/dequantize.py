"""`twin::dequantize`: what FP8 codes stand for.

    out[r, c] = round(fp32(q[r, c]) · scale_inv)        one fp32 rounding, then one to the dtype of out

scale_inv is one number, that of the element's row, or that of its block of 128, laid out as `twin::cast_blocks` writes
it.
"""

import torch

from reference.numbers import formats
from reference.ops.casts.cast_blocks import of_each, scale_shape
from reference.ops.checks import check_fp8, check_like, check_scale_inv, check_wide
from reference.ops.library import define

OP = "twin::dequantize"


def outputs(q: torch.Tensor, scale_inv: torch.Tensor, square: bool, dtype: torch.dtype) -> torch.Tensor:
    check_fp8(OP, "q", q.dtype)
    if q.dim() != 2 or q.shape[1] % 16 or not q.is_contiguous():
        raise ValueError(
            f"{OP}: q must be contiguous [rows, cols], cols a multiple of 16; got {list(q.shape)}, strides "
            f"{q.stride()}."
        )
    check_wide(OP, "dtype", dtype)
    if scale_inv.dim() == 1:
        check_scale_inv(OP, scale_inv, len(q), q.device)
    else:
        check_like(OP, "scale_inv", scale_inv, torch.float32, scale_shape(q.shape[0], q.shape[1], square), q.device)
    return q.new_empty(q.shape, dtype=dtype)


@define(outputs)
def dequantize(q: torch.Tensor, scale_inv: torch.Tensor, square: bool, dtype: torch.dtype) -> torch.Tensor:
    """q `[rows, cols]` of FP8, scale_inv fp32 `[1]`, `[rows]` or of blocks -> `[rows, cols]` of `dtype`: fp32, bf16 or
    fp16.

    `square`: blocks are 128 × 128, not 1 × 128; without blocks it means nothing.
    """
    out = outputs(q, scale_inv, square, dtype)
    each = scale_inv[:, None] if scale_inv.dim() == 1 else of_each(scale_inv, q.shape[0], q.shape[1], square)
    return out.copy_(formats.decode(q) * each)
