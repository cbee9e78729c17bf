"""`twin::gemm_fp8_blocks` and `twin::gemm_fp8_blocks_accumulate` on the GPU: kernels/gemms/gemm_fp8_blocks.cu. Every
tile gives the same bits.

The definition, with its rounding points: `reference.ops.gemms.gemm_fp8_blocks`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.ops.gemms.gemm_config import FP8, OUTPUTS, TYPES, GemmConfig
from optimized.ops.gemms.gemm_fp8 import add_bias_alone, launch_tiles
from optimized.ops.gemms.gemm_operands import UNWRITABLE, check_devices, run, tell_once, writable
from optimized.ops.gemms.gemm_tile import FP8_TILES, Tile, multiprocessors, select_tile
from reference.ops.gemms.gemm_fp8_blocks import accumulate_outputs, outputs
from reference.ops.library import on_cuda

# Wider tiles leave no registers for scales, and clusters none for a sum that is added to.
BLOCK_TILES = tuple(tile for tile in FP8_TILES if tile.cluster == 1 and tile.block_n in (64, 128, 160))
_SQUARES = ((False, False), (False, True), (True, False))


@functools.lru_cache(maxsize=1024)
def config(
    a: torch.dtype,
    b: torch.dtype,
    out: torch.dtype,
    squares: tuple[bool, bool],
    tile: Tile,
    n: int,
    add: bool = False,
) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_fp8_blocks.cu; only n % 32 counts. With `add` it adds to what the output
    holds.
    """
    macros: dict[str, int | str] = {
        "A_FORMAT": TYPES[a],
        "B_FORMAT": TYPES[b],
        "OUT": TYPES[out],
        "SQUARE_A": int(squares[0]),
        "SQUARE_B": int(squares[1]),
        "ACCUMULATE": int(add),
        **tile.macros("WARPGROUPS", "BLOCK_N", "STAGES", "CLUSTER", "ACROSS", "NARROW"),
        "RUN": run(n, out, tile.block_n),
    }
    return GemmConfig("gemm_fp8_blocks", tile, tuple(macros.items()))


# What the CPU suite compiles: every tile with each form of blocks, and every format and output with one tile.
_E4M3, _E5M2 = FP8
_EVERY_TILE = itertools.product([_E4M3], [_E4M3], [torch.bfloat16], _SQUARES, BLOCK_TILES, (16, 32))
_EVERY_FORMAT = itertools.product([_E5M2], FP8, OUTPUTS, _SQUARES[:1], BLOCK_TILES[:1], [32])
_ADDING = itertools.product([_E4M3], [_E4M3], OUTPUTS, _SQUARES[:1], BLOCK_TILES, (16, 32), [True])
CONFIGURATIONS = [config(*case).listed for case in (*_EVERY_TILE, *_EVERY_FORMAT, *_ADDING)]


def gemm_fp8_blocks_tiled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
    out: torch.Tensor | None = None,
    add: bool = False,
    cut: int | None = None,
) -> torch.Tensor:
    """`gemm_fp8_blocks` with a given tile, one of `gemm_tile.TILES` without a cluster or any that fits.

    The arguments are those that `gemm_fp8_blocks` accepts; `out`, `add` and `cut` are as in `gemm.gemm_tiled`.
    """
    (m, k), n = a.shape, b.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    if k == 0:  # the accumulators are +0, and only the bias remains
        return add_bias_alone(torch.zeros((m, n), dtype=torch.float32, device=a.device), bias, out, add)
    one = config(a.dtype, b.dtype, out_dtype, (a_square, b_square), tile, 32 if n % 32 == 0 else 16, add)
    scales = [x for of in (a_scale_inv, b_scale_inv) for x in (of.data_ptr(), np.int32(of.stride(0)))]
    return launch_tiles(one, a, b, tuple(scales), bias, out, cut)


def _tile(m: int, n: int, k: int, index: int) -> Tile:
    return select_tile(m, n, k, True, multiprocessors(index), BLOCK_TILES)


@on_cuda
def gemm_fp8_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a `[M, K]` and b `[N, K]` float8 with the scales of their blocks, bias `[N]` or None -> `[M, N]` of out_dtype."""
    out = outputs(a, b, a_scale_inv, b_scale_inv, a_square, b_square, bias, out_dtype)
    check_devices("gemm_fp8_blocks", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, bias=bias)
    tile = _tile(a.shape[0], b.shape[0], a.shape[1], a.device.index)
    rest = (a, b, a_scale_inv, b_scale_inv, a_square, b_square, bias, out_dtype)
    return gemm_fp8_blocks_tiled(*rest, tile, out)


@on_cuda
def gemm_fp8_blocks_accumulate(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    out: torch.Tensor,
) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; the other arguments are those of `gemm_fp8_blocks`."""
    accumulate_outputs(a, b, a_scale_inv, b_scale_inv, a_square, b_square, out)
    check_devices("gemm_fp8_blocks", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, out=out)
    rest = (a, b, a_scale_inv, b_scale_inv, a_square, b_square, None)
    if writable(out):
        tile = _tile(a.shape[0], b.shape[0], a.shape[1], a.device.index)
        gemm_fp8_blocks_tiled(*rest, out.dtype, tile, out, add=True)
    else:
        tell_once("gemm_fp8_blocks_accumulate", UNWRITABLE)
        out.copy_(out.float() + gemm_fp8_blocks(*rest, torch.float32))
