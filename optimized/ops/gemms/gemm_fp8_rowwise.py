"""`twin::gemm_fp8_rowwise` and `twin::gemm_fp8_rowwise_accumulate` on the GPU: kernels/gemms/gemm_fp8_rowwise.cu. Every
tile gives the same bits.

The definition, with its rounding points: `reference.ops.gemms.gemm_fp8_rowwise`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.ops.gemms import gemm_fp8
from optimized.ops.gemms.gemm_config import FP8, OUTPUTS
from optimized.ops.gemms.gemm_fp8 import ADDING_TILES, begin, chains, launch_tiles
from optimized.ops.gemms.gemm_operands import UNWRITABLE, check_devices, loadable, tell_once, writable
from optimized.ops.gemms.gemm_tile import TILES, Tile, multiprocessors, select_tile
from reference.ops.gemms.gemm_fp8_rowwise import accumulate_outputs, outputs
from reference.ops.library import on_cuda

config = functools.partial(gemm_fp8.config, kernel="gemm_fp8_rowwise")

# Adding to 16 bits, a tile of 256 columns spills.
ADDING = {out: tuple(one for one in ADDING_TILES if out == torch.float32 or one.block_n < 256) for out in OUTPUTS}

# What the CPU suite compiles: every tile with both accumulations, and every format and output with one tile.
_E4M3, _E5M2 = FP8
_EVERY_TILE = itertools.product([_E4M3], [_E4M3], [torch.bfloat16], ("fast", "split"), TILES, (16, 32))
_EVERY_FORMAT = itertools.product([_E5M2], FP8, OUTPUTS, ("fast", "split"), TILES[:1], [32])
_ADDING = [
    (_E5M2, _E4M3, out, "split", tile, n, True) for out, tiles in ADDING.items() for tile in tiles for n in (16, 32)
]
CONFIGURATIONS = [config(*case).listed for case in (*_EVERY_TILE, *_EVERY_FORMAT, *_ADDING)]


def gemm_fp8_rowwise_tiled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
    tile: Tile,
    out: torch.Tensor | None = None,
    add: bool = False,
    cut: int | None = None,
) -> torch.Tensor:
    """`gemm_fp8_rowwise` with a given tile, one of `gemm_tile.TILES`.

    The arguments are those that `gemm_fp8_rowwise` accepts; `out`, `add` and `cut` are as in `gemm.gemm_tiled`.
    """
    out, done = begin(a, b, bias, out_dtype, out, add, lambda zero: zero * b_scale_inv * a_scale_inv[:, None])
    if done:
        return out
    one = config(a.dtype, b.dtype, out_dtype, accumulate, tile, 32 if b.shape[0] % 32 == 0 else 16, add)
    found = [loadable(of) for of in (a_scale_inv, b_scale_inv)]
    scales = [x for of in found if of is not None for x in (of.data_ptr(), np.int32(len(of) > 1))]
    return launch_tiles(one, a, b, tuple(scales), bias, out, cut)


@on_cuda
def gemm_fp8_rowwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """a `[M, K]` and b `[N, K]` float8, scales fp32 `[M]` and `[N]`, or `[1]`, bias `[N]` or None -> `[M, N]`."""
    out = outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulate)
    check_devices("gemm_fp8_rowwise", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, bias=bias)
    (m, k), n = a.shape, b.shape[0]
    accumulate = chains(accumulate, k)
    tile = select_tile(m, n, k, accumulate == "split", multiprocessors(a.device.index), TILES)
    return gemm_fp8_rowwise_tiled(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulate, tile, out)


@on_cuda
def gemm_fp8_rowwise_accumulate(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, out: torch.Tensor
) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; the other arguments are those of `gemm_fp8_rowwise`."""
    accumulate_outputs(a, b, a_scale_inv, b_scale_inv, out)
    check_devices("gemm_fp8_rowwise", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, out=out)
    rest = (a, b, a_scale_inv, b_scale_inv, None)
    if writable(out):
        (m, k), n = a.shape, b.shape[0]
        tile = select_tile(m, n, k, True, multiprocessors(a.device.index), ADDING[out.dtype])
        gemm_fp8_rowwise_tiled(*rest, out.dtype, "split", tile, out, add=True)
    else:
        tell_once("gemm_fp8_rowwise_accumulate", UNWRITABLE)
        out.copy_(out.float() + gemm_fp8_rowwise(*rest, torch.float32, "split"))
