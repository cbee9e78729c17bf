"""GEMMs in parts along K on the GPU: kernels/gemms/gemm_part.cu, gemm_fp8_part.cu, gemm_fp8_blocks_part.cu, and what
follows them, end_gemm.cu. Every tile gives the same bits.

The definitions: `reference.ops.gemms.gemm_part`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, pointer
from optimized.ops.gemms import gemm as gemm_16
from optimized.ops.gemms import gemm_fp8_blocks as blocks
from optimized.ops.gemms.gemm_config import FP8, HALVES, OUTPUTS, TYPES, GemmConfig, fp8_config
from optimized.ops.gemms.gemm_operands import bias_arguments, check_devices, loadable, operand_maps
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES, Tile, cheapest_tile, multiprocessors, select_tile
from reference.ops.gemms.gemm_part import (
    blocks_part_outputs,
    end_outputs,
    fp8_end_outputs,
    fp8_part_outputs,
    part_outputs,
)
from reference.ops.library import on_cuda

_THREADS, _ELEMENTS = 256, 8  # of a block of end_gemm, of a thread
RUN = 4
SQUARES = ((False, False), (False, True), (True, False))


@functools.lru_cache(maxsize=1024)
def config(a: torch.dtype, b: torch.dtype, accumulate: str, tile: Tile, out: torch.dtype | None = None) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_fp8_part.cu: a part's, or with the dtype of `out` the last part's."""
    promotion = {"PROMOTION": "Added" if accumulate == "split" else "OneChain"}
    types = (a, b) if out is None else (a, b, out)
    return fp8_config("gemm_fp8_part", types, tile, "WARPGROUPS BLOCK_N STAGES CLUSTER ACROSS NARROW", promotion)


@functools.lru_cache(maxsize=1024)
def blocks_config(a: torch.dtype, b: torch.dtype, squares: tuple[bool, bool], tile: Tile) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_fp8_blocks_part.cu."""
    others = {"SQUARE_A": int(squares[0]), "SQUARE_B": int(squares[1])}
    beside = blocks.beside_bytes(tile, squares)
    return fp8_config("gemm_fp8_blocks_part", (a, b), tile, "WARPGROUPS BLOCK_N NARROW STAGES", others, beside)


@functools.lru_cache(maxsize=1024)
def half_config(dtype: torch.dtype, transpose_a: bool, transpose_b: bool, tile: Tile) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_part.cu."""
    macros: dict[str, int | str] = {
        "FORMAT": TYPES[dtype],
        "TRANSPOSE_A": int(transpose_a),
        "TRANSPOSE_B": int(transpose_b),
        **tile.macros("WARPGROUPS", "BLOCK_N", "STAGES", "CLUSTER", "NARROW"),
    }
    return GemmConfig("gemm_part", tile, tuple(macros.items()))


_ends = {dtype: launch.function("end_gemm", "end_gemm", {"WIDE": wide}) for dtype, wide in WIDE.items()}
CONFIGURATIONS = [config(*case).listed for case in itertools.product(FP8, FP8, ("fast", "split"), FP8_TILES)]
CONFIGURATIONS += [
    blocks_config(*formats, squares, tile).listed
    for squares in SQUARES
    for tile, _ in blocks.costs(squares)
    for formats in itertools.product(FP8, FP8)
]


_FLAGS = (False, True)
CONFIGURATIONS += [half_config(*case).listed for case in itertools.product(HALVES, _FLAGS, _FLAGS, TILES)]
CONFIGURATIONS += [one.configuration for one in _ends.values()]
# Every tile with both accumulations, and every format and output with one tile, as of the whole GEMM.
_ENDING = (
    *itertools.product(FP8[:1], FP8[:1], ("fast", "split"), FP8_TILES, OUTPUTS[:1]),
    *itertools.product(FP8, FP8, ("fast", "split"), FP8_TILES[:1], OUTPUTS),
)
CONFIGURATIONS += [config(*case).listed for case in dict.fromkeys(_ENDING)]


@on_cuda
def gemm_part(a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]`, both bf16 or both fp16, accumulator fp32 `[M, N]` or None -> fp32 `[M, N]`."""
    part_outputs(a, b, accumulator)
    check_devices("gemm_part", a, b=b, accumulator=accumulator)
    (m, k), n, sms = a.shape, b.shape[0], multiprocessors(a.device.index)
    return gemm_part_tiled(a, b, accumulator, select_tile(m, n, 2 * k, False, sms))


def gemm_part_tiled(
    a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None, tile: Tile, cut: int | None = None
) -> torch.Tensor:
    """`gemm_part` with a given tile; `cut` is as in `gemm.gemm_tiled`."""
    (a, a_stride), (b, b_stride) = gemm_16.padded(a), gemm_16.padded(b)
    transposed = gemm_16.is_transposed(a), gemm_16.is_transposed(b)

    def maps() -> Any:
        return (
            gemm_16.operand_map(a, a_stride, transposed[0], tile.block_m).argument,
            gemm_16.operand_map(b, b_stride, transposed[1], tile.block_n // tile.cluster).argument,
        )

    return _launch(half_config(a.dtype, *transposed, tile), a, b, accumulator, (), cut, maps)


@on_cuda
def end_gemm(
    accumulator: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """accumulator fp32 `[M, N]`, scales fp32 `[1]` or None, bias `[N]` or None -> `[M, N]` of out_dtype."""
    out = end_outputs(accumulator, a_scale_inv, b_scale_inv, bias, out_dtype)
    check_devices("end_gemm", accumulator, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, bias=bias)
    if not out.numel():
        return out
    acc, bias = accumulator.contiguous(), loadable(bias)
    vector = np.int32(acc.data_ptr() % 16 == out.data_ptr() % 16 == 0)
    sizes = (np.int64(out.numel()), np.int32(out.shape[1]), vector)
    scales = (pointer(a_scale_inv), pointer(b_scale_inv))
    args = (acc.data_ptr(), out.data_ptr(), *bias_arguments(bias), *scales, *sizes)
    grid = (-(-out.numel() // (_THREADS * _ELEMENTS)),)
    launch.launch(_ends[out_dtype], grid, (_THREADS,), args, device=out.device.index)
    return out


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
def gemm_fp8_end(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """`end_gemm` of `gemm_fp8_part` with their arguments -> `[M, N]` of out_dtype, by one kernel."""
    fp8_end_outputs(a, b, a_scale_inv, b_scale_inv, bias, accumulator, out_dtype, accumulate)
    others = {"a_scale_inv": a_scale_inv, "b_scale_inv": b_scale_inv, "bias": bias, "accumulator": accumulator}
    check_devices("gemm_fp8_end", a, b=b, **others)
    (m, k), n, sms = a.shape, b.shape[0], multiprocessors(a.device.index)
    tile = select_tile(m, n, k, accumulate == "split", sms, FP8_TILES)
    return gemm_fp8_end_tiled(a, b, a_scale_inv, b_scale_inv, bias, accumulator, out_dtype, accumulate, tile)


def gemm_fp8_end_tiled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
    tile: Tile,
    cut: int | None = None,
) -> torch.Tensor:
    """`gemm_fp8_end` with a given tile; `cut` is as in `gemm.gemm_tiled`."""
    if not a.numel() or not b.numel():
        sums = gemm_fp8_part_tiled(a, b, accumulator, accumulate, tile)
        return end_gemm(sums, a_scale_inv, b_scale_inv, bias, out_dtype)  # type: ignore[no-any-return]
    bias = loadable(bias)
    rest = (*bias_arguments(bias), a_scale_inv.data_ptr(), b_scale_inv.data_ptr())
    return _launch(config(a.dtype, b.dtype, accumulate, tile, out_dtype), a, b, accumulator, rest, cut, None, out_dtype)


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
    scales = [loadable(one) for one in (a_scale_inv, b_scale_inv)]
    one = blocks_config(a.dtype, b.dtype, (a_square, b_square), tile)
    return _launch(one, a, b, accumulator, blocks.scale_arguments(scales), cut)


def _launch(
    one: GemmConfig,
    a: torch.Tensor,
    b: torch.Tensor,
    accumulator: torch.Tensor | None,
    rest: tuple[Any, ...],
    cut: int | None,
    maps: Callable[[], Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Launch a part; `rest`: the kernel's arguments between the accumulators and the sizes; `maps`: of 16 bits."""
    (m, k), n, index, tile = a.shape, b.shape[0], a.device.index, one.tile
    out = torch.empty((m, n), dtype=dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_() if accumulator is None else out.copy_(accumulator)
    start = loadable(accumulator)
    cut = tile.cut(m, n, multiprocessors(index)) if cut is None else cut
    sizes = (np.int32(m), np.int32(n), np.int32(k), np.int32(cut))
    begins = 0 if start is None else start.data_ptr()
    operands = (operand_maps(a, b, tile, RUN),) if maps is None else maps()
    one.launch(index, cut, (*operands, out.data_ptr(), begins, *rest, *sizes))
    return out
