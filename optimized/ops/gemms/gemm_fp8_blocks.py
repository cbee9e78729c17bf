"""`twin::gemm_fp8_blocks` and `twin::gemm_fp8_blocks_accumulate` on the GPU: kernels/gemms/gemm_fp8_blocks.cu; and
`twin::gemm_fp8_blocks_bias_dropout_add`: kernels/gemms/gemm_fp8_blocks_fused.cu. Every tile gives the same bits.

The definition, with its rounding points: `reference.ops.gemms.gemm_fp8_blocks`.
"""

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from optimized.cuda import launch
from optimized.cuda.tensor_map import tensor_map_2d
from optimized.ops.casts.amax import pointer
from optimized.ops.gemms.gemm_config import FP8, OUTPUTS, GemmConfig, fp8_config
from optimized.ops.gemms.gemm_fp8 import begin, launch_tiles
from optimized.ops.gemms.gemm_operands import UNWRITABLE, check_devices, loadable, run, tell_once, writable
from optimized.ops.gemms.gemm_tile import Cost, Tile, cheapest_tile, multiprocessors
from optimized.ops.random import dropout
from reference.ops.gemms.gemm_fp8_blocks import accumulate_outputs, bias_dropout_add_outputs, outputs
from reference.ops.library import on_cuda
from reference.ops.random.dropout import keep_scale, threshold

_BUFFERS, _BOX_ROWS, _BOX_COLUMNS = 4, 16, 32  # of a warp, of kernels/gemms/gemm_staged.cuh
_SQUARES = ((False, False), (False, True), (True, False))
# What a tile costs (gemm_tile.py): where b's blocks are square, and where they are of rows. A tile with square blocks
# lies within one of them or begins with one, so those of 256 columns are mixed with half as wide ones. The cycles come
# from a sweep on an H200.
COSTS: dict[Tile, tuple[Cost | None, Cost | None]] = {
    Tile(2, 256, 4, mixed=128): (Cost(1260, 5500), None),
    Tile(2, 256, 4): (None, Cost(1550, 5500)),
    Tile(3, 128, 5): (None, Cost(1135, 3000)),
    Tile(2, 192, 5): (None, Cost(1080, 5360)),
    Tile(2, 160, 6): (None, Cost(940, 4830)),
    Tile(2, 128, 6): (Cost(680, 2100), Cost(850, 2100)),
    Tile(2, 96, 7): (None, Cost(665, 1640)),
    Tile(2, 64, 9): (Cost(520, 1010), Cost(535, 1010)),
    Tile(1, 128, 9): (Cost(420, 1450), Cost(590, 1450)),
    Tile(1, 64, 13): (Cost(310, 860), Cost(410, 860)),
    Tile(1, 32, 18): (Cost(245, 650), Cost(290, 650)),
    Tile(1, 16, 21): (Cost(210, 470), Cost(230, 470)),
}


def costs(squares: tuple[bool, bool]) -> tuple[tuple[Tile, Cost], ...]:
    """The tiles that the kernel has, and what each costs, where the blocks of a and of b are square or of rows."""
    a_square, b_square = squares
    found = ((tile, pair[0 if b_square else 1]) for tile, pair in COSTS.items())
    # 192 rows may lie in three squares of a.
    return tuple((tile, cost) for tile, cost in found if cost is not None and not (a_square and tile.block_m > 128))


_COSTS = {squares: costs(squares) for squares in _SQUARES}
# Those of the fused kernel, whose mask has words of 64 columns.
_FUSED = {
    squares: tuple((tile, cost) for tile, cost in found if tile.block_n % 64 == 0 and tile.warpgroups < 3)
    for squares, found in _COSTS.items()
}


def fused_tiles(squares: tuple[bool, bool]) -> tuple[Tile, ...]:
    """The tiles that the fused kernel has, where the blocks of a and of b are square or of rows."""
    return tuple(tile for tile, _ in _FUSED[squares])


def beside_bytes(tile: Tile, squares: tuple[bool, bool]) -> int:
    """Shared memory of the scales, in all stages (kernels/gemms/gemm_fp8_blocks.cuh)."""
    rows = zip((tile.block_m, tile.block_n), squares, strict=True)
    return tile.stages * sum(16 * -(-count // 128) if square else 4 * count for count, square in rows)


def leaves_staged(tile: Tile, squares: tuple[bool, bool], out: torch.dtype, add: bool) -> bool:
    """Whether tiles leave through shared memory (kernels/gemms/gemm_staged.cuh): the largest, where there is room."""
    return tile.block_n == 256 and squares[1] and out != torch.float32 and not add


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
    others = {
        "SQUARE_A": int(squares[0]),
        "SQUARE_B": int(squares[1]),
        "ACCUMULATE": int(add),
        "RUN": run(n, out, tile.block_n),
    }
    beside = beside_bytes(tile, squares)
    if leaves_staged(tile, squares, out, add):
        others["STAGED"] = 1
        beside += -(tile.shared_bytes + beside) % 128  # where the first buffer begins
        beside += 4 * tile.warpgroups * _BUFFERS * _BOX_ROWS * _BOX_COLUMNS * 2
    return fp8_config("gemm_fp8_blocks", (a, b, out), tile, "WARPGROUPS BLOCK_N NARROW STAGES", others, beside)


@functools.lru_cache(maxsize=1024)
def fused_config(
    formats: tuple[torch.dtype, torch.dtype],
    out: torch.dtype,
    squares: tuple[bool, bool],
    tile: Tile,
    n: int,
    drop: bool,
) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_fp8_blocks_fused.cu; only n % 32 counts. `drop`: whether it drops."""
    macros = dict(config(*formats, out, squares, tile, n).macros) | {"DROP": int(drop)}
    del macros["ACCUMULATE"]
    # The bias in 16 bits and the mask, each with two barriers.
    epilogue = 2 * tile.block_n + 16 + tile.block_m * tile.block_n // 8 + 16
    return GemmConfig("gemm_fp8_blocks_fused", tile, tuple(macros.items()), beside_bytes(tile, squares) + epilogue)


# What the CPU suite compiles: every tile with each form of blocks, and every format and output with one tile.
_E4M3, _E5M2 = FP8
_EVERY_TILE = [
    (_E4M3, _E4M3, torch.bfloat16, squares, tile, n)
    for squares in _SQUARES
    for tile, _ in costs(squares)
    for n in (16, 32)
]
_EVERY_FORMAT = itertools.product([_E5M2], FP8, OUTPUTS, _SQUARES[:1], [Tile(2, 128, 6)], [32])
_TILES = [tile for tile, _ in costs((False, False))]
_ADDING = itertools.product([_E4M3], [_E4M3], OUTPUTS, _SQUARES[:1], _TILES, (16, 32), [True])
CONFIGURATIONS = [config(*case).listed for case in (*_EVERY_TILE, *_EVERY_FORMAT, *_ADDING)]
_FUSED_CHOICES = [
    *(
        ((_E4M3, _E4M3), torch.bfloat16, one, tile, n)
        for one in _SQUARES
        for tile in fused_tiles(one)
        for n in (16, 32)
    ),
    *itertools.product(itertools.product(FP8, FP8), (torch.bfloat16, torch.float16), _SQUARES, [Tile(2, 128, 6)], [32]),
]
CONFIGURATIONS += [fused_config(*case, drop).listed for case in _FUSED_CHOICES for drop in (False, True)]


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
    """`gemm_fp8_blocks` with a given tile, one of `costs((a_square, b_square))`.

    The arguments are those that `gemm_fp8_blocks` accepts; `out`, `add` and `cut` are as in `gemm.gemm_tiled`.
    """
    out, done = begin(a, b, bias, out_dtype, out, add, lambda zero: zero)
    if done:
        return out
    one = config(a.dtype, b.dtype, out_dtype, (a_square, b_square), tile, 32 if b.shape[0] % 32 == 0 else 16, add)
    found = [loadable(of) for of in (a_scale_inv, b_scale_inv)]
    maps: tuple[launch.ByValue, ...] = ()
    if leaves_staged(tile, (a_square, b_square), out_dtype, add):
        (m, n), stride = out.shape, out.element_size() * out.shape[1]
        maps = (tensor_map_2d(out.data_ptr(), out.dtype, m, n, stride, _BOX_ROWS, _BOX_COLUMNS, swizzle=0).argument,)
    return launch_tiles(one, a, b, (*maps, *scale_arguments(found)), bias, out, cut)


def scale_arguments(scales: Sequence[torch.Tensor | None]) -> tuple[int | np.int32, ...]:
    """Those of `loadable` scales, which must live until the launch."""
    return tuple(x for of in scales if of is not None for x in (of.data_ptr(), np.int32(of.stride(0))))


def _tile(a: torch.Tensor, b: torch.Tensor, costs: tuple[tuple[Tile, Cost], ...]) -> Tile:
    return cheapest_tile(a.shape[0], b.shape[0], a.shape[1], multiprocessors(a.device.index), costs)


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
    tile = _tile(a, b, _COSTS[a_square, b_square])
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
        gemm_fp8_blocks_tiled(*rest, out.dtype, _tile(a, b, _COSTS[a_square, b_square]), out, add=True)
    else:
        tell_once("gemm_fp8_blocks_accumulate", UNWRITABLE)
        out.copy_(out.float() + gemm_fp8_blocks(*rest, torch.float32))


@on_cuda
def gemm_fp8_blocks_bias_dropout_add(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    p: float,
    rng_state: torch.Tensor | None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]` float8, bias `[N]`, residual `[M, N]` of out_dtype -> `[M, N]`; advances `rng_state`.

    Two kernels run where the fused one has no form (fp32, an empty matrix, no residual) and, unless the caller names a
    tile, where K is so short that the mask is not drawn in time.
    """
    operands = (a, b, a_scale_inv, b_scale_inv, a_square, b_square)
    out = bias_dropout_add_outputs(*operands, bias, residual, out_dtype, p, rng_state)
    check_devices("gemm_fp8_blocks", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv)
    (m, k), drop = a.shape, threshold(p) > 0
    # The kernel counts groups of eight elements in 32 bits.
    apart = drop and (out.numel() >= 2**35 or (tile is None and m >= 2048 and k < 2048))
    if apart or residual is None or out_dtype == torch.float32 or not out.numel() * k:
        x = gemm_fp8_blocks_tiled(*operands, None, out_dtype, _tile(a, b, _COSTS[a_square, b_square]))
        dropout.run(out, x, bias, residual, p, rng_state)
    else:
        tile = tile or _tile(a, b, _FUSED[a_square, b_square])
        width = 32 if b.shape[0] % 32 == 0 else 16
        one = fused_config((a.dtype, b.dtype), out_dtype, (a_square, b_square), tile, width, drop)
        addend, *found = [loadable(of) for of in (residual, a_scale_inv, b_scale_inv)]
        assert addend is not None
        mask = (pointer(rng_state) if drop else 0, np.uint32(threshold(p)), np.float32(keep_scale(p)))
        launch_tiles(one, a, b, (addend.data_ptr(), *mask, *scale_arguments(found)), bias, out, None)
    if drop:
        assert rng_state is not None
        dropout.advance(rng_state)
    return out
