"""`twin::gemm_fp8_part` on the GPU: kernels/gemms/gemm_fp8_part.cu. Every tile gives the same bits.

The definition: `reference.ops.gemms.gemm_part`, whose other ops have no kernel yet.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.ops.gemms.gemm_config import FP8, TYPES, GemmConfig
from optimized.ops.gemms.gemm_operands import check_devices, loadable, operand_maps
from optimized.ops.gemms.gemm_tile import FP8_TILES, Tile, multiprocessors, select_tile
from reference.ops.gemms.gemm_part import fp8_part_outputs
from reference.ops.library import on_cuda

RUN = 4


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


CONFIGURATIONS = [config(*case).listed for case in itertools.product(FP8, FP8, ("fast", "split"), FP8_TILES)]


@on_cuda
def gemm_fp8_part(a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None, accumulate: str) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]` float8, accumulator fp32 `[M, N]` or None -> fp32 `[M, N]`."""
    fp8_part_outputs(a, b, accumulator, accumulate)
    check_devices("gemm_fp8_part", a, b=b, accumulator=accumulator)
    (m, k), n, sms = a.shape, b.shape[0], multiprocessors(a.device.index)
    return gemm_fp8_part_tiled(
        a, b, accumulator, accumulate, select_tile(m, n, k, accumulate == "split", sms, FP8_TILES)
    )


def gemm_fp8_part_tiled(
    a: torch.Tensor,
    b: torch.Tensor,
    accumulator: torch.Tensor | None,
    accumulate: str,
    tile: Tile,
    cut: int | None = None,
) -> torch.Tensor:
    """`gemm_fp8_part` with a given tile; `cut` is as in `gemm.gemm_tiled`."""
    (m, k), n, index = a.shape, b.shape[0], a.device.index
    out = torch.empty((m, n), dtype=torch.float32, device=a.device)
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_() if accumulator is None else out.copy_(accumulator)
    start, one = loadable(accumulator), config(a.dtype, b.dtype, accumulate, tile)
    cut = tile.cut(m, n, multiprocessors(index)) if cut is None else cut
    sizes = (np.int32(m), np.int32(n), np.int32(k), np.int32(cut))
    from_where = 0 if start is None else start.data_ptr()
    one.launch(index, cut, (operand_maps(a, b, tile, RUN), out.data_ptr(), from_where, *sizes))
    return out
