"""`twin::cast_mxfp8`: the cast to MXFP8, FP8 codes with an E8M0 scale for each 32 of them along a row.

    amax[r, b]   = max |x| over x[r, 32·b .. 32·b + 31] that are not NaN; 0 where there is none
    scales[r, b] = e8m0_above(amax[r, b] / fp8_max)         one fp32 division; `reference.numbers.block_formats`
    q[r, c]      = satfinite_rne(fp32(x[r, c]) · 2^(127 − scales[r, c // 32]))        as in `twin::cast`

fp8_max is 448 (E4M3) or 57,344 (E5M2). A product is exact unless it is subnormal, and at most fp8_max. With `square`
a block is 32 rows high, too: amax is that of x[32·(r // 32) .. + 31, 32·b .. + 31], and all its rows have one scale.
Then the cast of xᵀ has the same codes and scales, transposed.

K = cols is padded with zeros to whole blocks, in codes and scales; the last rows of square blocks are not padded, and
what is outside of x counts for no amax. A block of zeros has the scale 2^-127 (code 0), one with an infinity 2^127. NaN
and infinities become the code 0x7F, so that none ends as an ordinary number. (Transformer Engine's kernels write
±fp8_max for an infinity.)

Codes and scales of finite numbers are those of Transformer Engine 2.20's reference of square blocks in E4M3
(`tests/pytorch/test_mxfp8_2d_quantize.py`), and of its formulas along rows. Its kernels multiply by fp32(1 / fp8_max)
instead: for every amax that gives the same power of two.
"""

import torch

from reference.numbers import block_formats, formats
from reference.ops.checks import check_fp8, check_input
from reference.ops.library import define

BLOCK = 32

Two = tuple[torch.Tensor, torch.Tensor]


def outputs(x: torch.Tensor, dtype: torch.dtype, square: bool) -> Two:
    check_input("twin::cast_mxfp8", "x", x)
    check_fp8("twin::cast_mxfp8", "dtype", dtype)
    count = block_formats.blocks(x.shape[1], BLOCK)
    return x.new_empty((x.shape[0], BLOCK * count), dtype=dtype), x.new_empty((x.shape[0], count), dtype=torch.uint8)


@define(outputs, cpu_only=block_formats.CPU_ONLY)
def cast_mxfp8(x: torch.Tensor, dtype: torch.dtype, square: bool) -> Two:
    """x `[rows, K]` -> (codes `[rows, ceil32(K)]` of `dtype`, scales uint8 `[rows, ceil32(K) / 32]`)."""
    codes, scales = outputs(x, dtype, square)
    one = torch.ones((), dtype=torch.float32, device="cpu")
    largest = formats.format_of(dtype).largest * one
    amax = block_formats.block_amax(x.masked_fill(x.isnan(), 0), BLOCK, square)
    scales.copy_(block_formats.e8m0_above(amax / largest))
    inverse = block_formats.decode_e8m0((0xFE - scales.int()).to(torch.uint8))
    wide = block_formats.whole(x, BLOCK).float().view(*scales.shape, BLOCK)
    scaled = torch.where(wide.isinf(), torch.nan, wide * inverse[..., None])
    formats.cast_into(codes, scaled.view(codes.shape), one)
    return codes, scales
