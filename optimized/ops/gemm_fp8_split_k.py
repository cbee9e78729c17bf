"""Split accumulation over few output tiles and a long K: the host side of kernels/gemm_fp8_split_k.cu.

The same words as gemm_fp8's "split" (reference/ops/gemm_fp8.py): chains of K = 128 on all multiprocessors, then their
sums in order.
"""

import functools
import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops.gemm_operands import FORMATS, OUTPUTS, bias_arguments, loadable, operands
from optimized.ops.gemm_tile import FP8_TILES, K_BLOCK_BYTES, Tile, modelled_cycles, multiprocessors, select_tile

TILE = Tile(1, 64, 6)
RUN = 4
RESIDENT = 2  # blocks that a multiprocessor holds at once
SUMS, SUMMING = 32, 256  # of a block of the second kernel: outputs, threads
# Cycles, fitted to an H200: of a k-block; of a byte of the slabs, written and read; of both kernels' ends.
BLOCK, BYTE, ENDS = 1040, 1 / 670, 5500


def defines(a: torch.dtype, b: torch.dtype, out: torch.dtype) -> dict[str, int | str]:
    """The macros of one configuration of kernels/gemm_fp8_split_k.cu."""
    return {"A_FORMAT": FORMATS[a], "B_FORMAT": FORMATS[b], "OUT": OUTPUTS[out], "STAGES": TILE.stages}


CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [
    ("gemm_fp8_split_k", defines(*types)) for types in itertools.product(FORMATS, FORMATS, OUTPUTS)
]


def partition(m: int, n: int, k: int, sms: int) -> tuple[int, int, int]:
    """Tiles, parts of K and k-blocks of a part: as many blocks as are resident at once, where K is long enough."""
    tiles, k_blocks = TILE.count(m, n), -(-k // K_BLOCK_BYTES)
    count = -(-k_blocks // max(1, RESIDENT * sms // tiles))
    return tiles, -(-k_blocks // count), count


@functools.lru_cache(maxsize=4096)
def is_faster(m: int, n: int, k: int, sms: int) -> bool:
    """Whether this way is modelled to take less time than the best tile of kernels/gemm_fp8.cu."""
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
    """`gemm_fp8` with split accumulation; arguments as there, checked, none of M, N and K zero.

    `out` is where to write, allocated if None.
    """
    (m, k), n, index = a.shape, b.shape[0], a.device.index
    tiles, parts, count = partition(m, n, k, multiprocessors(index))
    k_blocks = -(-k // K_BLOCK_BYTES)
    slabs = k_blocks - count + 1
    workspace = torch.empty(slabs * m * n, dtype=torch.float32, device=a.device)
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    bias = loadable(bias)
    macros = defines(a.dtype, b.dtype, out_dtype)
    launch.launch(
        launch.function("gemm_fp8_split_k", "partials", macros, TILE.shared_bytes),
        (tiles, parts),
        (TILE.threads,),
        (
            operands(a, b, TILE, RUN),
            workspace.data_ptr(),
            np.int32(m),
            np.int32(n),
            np.int32(k_blocks),
            np.int32(count),
        ),
        TILE.shared_bytes,
        device=index,
    )
    launch.launch(
        launch.function("gemm_fp8_split_k", "add_in_order", macros),
        (-(-m * n // SUMS),),
        (SUMMING,),
        (
            workspace.data_ptr(),
            out.data_ptr(),
            *bias_arguments(bias),
            a_scale_inv.data_ptr(),
            b_scale_inv.data_ptr(),
            np.int32(m),
            np.int32(n),
            np.int32(slabs),
        ),
        device=index,
        early=True,
    )
    return out
