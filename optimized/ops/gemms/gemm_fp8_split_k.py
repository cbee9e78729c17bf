"""`twin::gemm_fp8` with split accumulation where few output tiles meet a long K: kernels/gemms/gemm_fp8_split_k.cu.

All multiprocessors compute chains of K = 128, and a second kernel adds them in order, so the words are those of
kernels/gemms/gemm_fp8.cu.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.gemms.gemm_config import FP8, OUTPUTS, GemmConfig, fp8_config
from optimized.ops.gemms.gemm_operands import bias_arguments, loadable, operand_maps
from optimized.ops.gemms.gemm_tile import FP8_TILES, K_BLOCK_BYTES, Tile, modelled_cycles, multiprocessors, select_tile

TILE = Tile(1, 64, 6)
RUN = 4
RESIDENT = 2  # blocks that a multiprocessor holds at once
SUMS, SUMMING = 32, 256  # outputs and threads of a block of the second kernel
# Cycles, fitted to an H200: for a k-block, for writing and reading a byte of a slab, for the ends of both kernels.
BLOCK, BYTE, ENDS = 1040, 1 / 670, 5500


@functools.lru_cache(maxsize=1024)
def config(a: torch.dtype, b: torch.dtype, out: torch.dtype) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_fp8_split_k.cu."""
    return fp8_config("gemm_fp8_split_k", (a, b, out), TILE, "STAGES")


CONFIGURATIONS = [config(*types).listed for types in itertools.product(FP8, FP8, OUTPUTS)]


def partition(m: int, n: int, k: int, sms: int) -> tuple[int, int, int]:
    """Tiles, parts of K and k-blocks of a part; where K is long enough, as many blocks as are resident at once."""
    tiles, k_blocks = TILE.count(m, n), -(-k // K_BLOCK_BYTES)
    count = -(-k_blocks // max(1, RESIDENT * sms // tiles))
    return tiles, -(-k_blocks // count), count


@functools.lru_cache(maxsize=4096)
def is_faster(m: int, n: int, k: int, sms: int) -> bool:
    """Whether the model expects this to take less time than the best tile of kernels/gemms/gemm_fp8.cu."""
    _, parts, count = partition(m, n, k, sms)
    if parts == 1:
        return False
    slabs = -(-k // K_BLOCK_BYTES) - count + 1
    cycles = count * BLOCK + slabs * m * n * 4 * BYTE + ENDS
    return cycles < modelled_cycles(select_tile(m, n, k, True, sms, FP8_TILES), m, n, k, True, sms)


def gemm_fp8_split_k(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm_fp8` with split accumulation on checked arguments, none of M, N and K zero; `out` is allocated if None."""
    (m, k), n, index = a.shape, b.shape[0], a.device.index
    tiles, parts, count = partition(m, n, k, multiprocessors(index))
    k_blocks = -(-k // K_BLOCK_BYTES)
    slabs = k_blocks - count + 1
    workspace = torch.empty(slabs * m * n, dtype=torch.float32, device=a.device)
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    bias = loadable(bias)
    defines = config(a.dtype, b.dtype, out_dtype).defines
    maps = operand_maps(a, b, TILE, RUN)
    sizes = np.int32(m), np.int32(n)
    partials = launch.function("gemm_fp8_split_k", "partials", defines, TILE.shared_bytes)
    args = (maps, workspace.data_ptr(), *sizes, np.int32(k_blocks), np.int32(count))
    launch.launch(partials, (tiles, parts), (TILE.threads,), args, TILE.shared_bytes, device=index)
    add_in_order = launch.function("gemm_fp8_split_k", "add_in_order", defines)
    scales = a_scale_inv.data_ptr(), b_scale_inv.data_ptr()
    sums = (workspace.data_ptr(), out.data_ptr(), *bias_arguments(bias), *scales, *sizes, np.int32(slabs))
    launch.launch(add_in_order, (-(-m * n // SUMS),), (SUMMING,), sums, device=index, early=True)
    return out
