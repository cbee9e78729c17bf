"""`twin::gemm_fp8_part` and `twin::gemm_fp8_blocks_part` on the GPU: kernels/gemms/gemm_fp8_part.cu and
gemm_fp8_blocks_part.cu. Every tile gives the same bits.

The definition: `reference.ops.gemms.gemm_part`, whose other ops have no kernel yet.
"""

import functools
import itertools
from typing import Any

import numpy as np
import torch

from optimized.ops.gemms import gemm_fp8_blocks as blocks
from optimized.ops.gemms.gemm_config import FP8, TYPES, GemmConfig
from optimized.ops.gemms.gemm_operands import check_devices, loadable, operand_maps
from optimized.ops.gemms.gemm_tile import FP8_TILES, Tile, cheapest_tile, multiprocessors, select_tile
from reference.ops.gemms.gemm_part import blocks_part_outputs, fp8_part_outputs
from reference.ops.library import on_cuda

RUN = 4
SQUARES = ((False, False), (False, True), (True, False))


@functools.lru_cache(maxsize=1024)
def config(a: torch.dtype, b: torch.dtype, accumulate: str, tile: Tile) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_fp8_part.cu."""
    macros: dict[str, int | str] = {
        "A_FORMAT": TYPES[a],
        "B_FORMAT": TYPES[b],
        "PROMOTION": "Added" if accumulate == "split" else "OneChain",
        **tile.macros("WARPGROUPS", "BLOCK_N", "STAGES", "CLUSTER", "ACROSS", "NARROW"),
    }
    return GemmConfig("gemm_fp8_part", tile, tuple(macros.items()))


@functools.lru_cache(maxsize=1024)
def blocks_config(a: torch.dtype, b: torch.dtype, squares: tuple[bool, bool], tile: Tile) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_fp8_blocks_part.cu."""
    macros: dict[str, int | str] = {
        "A_FORMAT": TYPES[a],
        "B_FORMAT": TYPES[b],
        "SQUARE_A": int(squares[0]),
        "SQUARE_B": int(squares[1]),
        **tile.macros("WARPGROUPS", "BLOCK_N", "NARROW", "STAGES"),
    }
    return GemmConfig("gemm_fp8_blocks_part", tile, tuple(macros.items()), blocks.beside_bytes(tile, squares))


CONFIGURATIONS = [config(*case).listed for case in itertools.product(FP8, FP8, ("fast", "split"), FP8_TILES)]
CONFIGURATIONS += [
    blocks_config(*formats, squares, tile).listed
    for squares in SQUARES
    for tile, _ in blocks.costs(squares)
    for formats in itertools.product(FP8, FP8)
]


@on_cuda
def gemm_fp8_part(a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None, accumulate: str) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]` float8, accumulator fp32 `[M, N]` or None -> fp32 `[M, N]`."""
    fp8_part_outputs(a, b, accumulator, accumulate)
    check_devices("gemm_fp8_part", a, b=b, accumulator=accumulator)
    (m, k), n, sms = a.shape, b.shape[0], multiprocessors(a.device.index)
    tile = select_tile(m, n, k, accumulate == "split", sms, FP8_TILES)
    return gemm_fp8_part_tiled(a, b, accumulator, accumulate, tile)


def gemm_fp8_part_tiled(
    a: torch.Tensor,
    b: torch.Tensor,
    accumulator: torch.Tensor | None,
    accumulate: str,
    tile: Tile,
    cut: int | None = None,
) -> torch.Tensor:
    """`gemm_fp8_part` with a given tile; `cut` is as in `gemm.gemm_tiled`."""
    return _launch(config(a.dtype, b.dtype, accumulate, tile), a, b, accumulator, (), cut)


@on_cuda
def gemm_fp8_blocks_part(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    accumulator: torch.Tensor | None,
) -> torch.Tensor:
    """Operands as of `gemm_fp8_blocks`, accumulator fp32 `[M, N]` or None -> fp32 `[M, N]`."""
    operands = (a, b, a_scale_inv, b_scale_inv, a_square, b_square)
    blocks_part_outputs(*operands, accumulator)
    others = {"a_scale_inv": a_scale_inv, "b_scale_inv": b_scale_inv, "accumulator": accumulator}
    check_devices("gemm_fp8_blocks_part", a, b=b, **others)
    (m, k), n, costs = a.shape, b.shape[0], blocks.costs((a_square, b_square))
    tile = cheapest_tile(m, n, k, multiprocessors(a.device.index), costs)
    return gemm_fp8_blocks_part_tiled(*operands, accumulator, tile)


def gemm_fp8_blocks_part_tiled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    accumulator: torch.Tensor | None,
    tile: Tile,
    cut: int | None = None,
) -> torch.Tensor:
    """`gemm_fp8_blocks_part` with a given tile, one of `gemm_fp8_blocks.costs((a_square, b_square))`."""
    scales = [one for one in map(loadable, (a_scale_inv, b_scale_inv)) if one is not None]
    arguments = [x for one in scales for x in (one.data_ptr(), np.int32(one.stride(0)))]
    return _launch(blocks_config(a.dtype, b.dtype, (a_square, b_square), tile), a, b, accumulator, arguments, cut)


def _launch(
    one: GemmConfig, a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None, scales: Any, cut: int | None
) -> torch.Tensor:
    """Launch a part; `scales`: the kernel's arguments between the accumulators and the sizes."""
    (m, k), n, index, tile = a.shape, b.shape[0], a.device.index, one.tile
    out = torch.empty((m, n), dtype=torch.float32, device=a.device)
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_() if accumulator is None else out.copy_(accumulator)
    start = loadable(accumulator)
    cut = tile.cut(m, n, multiprocessors(index)) if cut is None else cut
    sizes = (np.int32(m), np.int32(n), np.int32(k), np.int32(cut))
    begins = 0 if start is None else start.data_ptr()
    one.launch(index, cut, (operand_maps(a, b, tile, RUN), out.data_ptr(), begins, *scales, *sizes))
    return out
