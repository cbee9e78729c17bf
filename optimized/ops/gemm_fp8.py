"""twin::gemm_fp8 on Hopper: the host side of kernels/gemm_fp8.cu.

The definition, with its rounding points, is reference/ops/gemm_fp8.py. Every tile gives the same bits.
"""

import functools
import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops.gemm_tile import TILES, Tile, multiprocessors, select_tile
from optimized.tensor_map import TensorMap, encode
from reference.ops.gemm_fp8 import check
from reference.ops.library import LIBRARY

FORMATS = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
OUTPUTS = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
BIAS_TYPES = {
    None: np.int32(0),
    torch.bfloat16: np.int32(1),
    torch.float16: np.int32(2),
    torch.float32: np.int32(3),
}


def defines(
    a: torch.dtype, b: torch.dtype, out: torch.dtype, accumulate: str, tile: Tile, n: int
) -> dict[str, int | str]:
    """The macros of one configuration of kernels/gemm_fp8.cu."""
    return {
        "A_FORMAT": FORMATS[a],
        "B_FORMAT": FORMATS[b],
        "OUT": OUTPUTS[out],
        "SPLIT": int(accumulate == "split"),
        "WARPGROUPS": tile.warpgroups,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "CLUSTER": tile.cluster,
        "RUN": run(n),
    }


def run(n: int) -> int:
    """Consecutive columns of the output that a thread owns: 8, or 4 where N is an odd multiple of 16."""
    return 8 if n % 32 == 0 else 4


# What the CPU suite compiles: every tile with both accumulations, and every format and output in one tile.
CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [
    ("gemm_fp8", defines(a, b, out, accumulate, tile, n))
    for a, b, out, accumulate, tile, n in [
        *itertools.product(
            [torch.float8_e4m3fn], [torch.float8_e4m3fn], [torch.bfloat16], ("fast", "split"), TILES, (16, 32)
        ),
        *itertools.product([torch.float8_e5m2], FORMATS, OUTPUTS, ("fast", "split"), TILES[:1], [32]),
    ]
]


@functools.lru_cache(maxsize=1024)
def _kernel(
    a: torch.dtype, b: torch.dtype, out: torch.dtype, accumulate: str, tile: Tile, columns: int
) -> launch.Kernel:
    # `columns` is 32 or 16: what of N the configuration depends on.
    return launch.function("gemm_fp8", "gemm_fp8", defines(a, b, out, accumulate, tile, columns), tile.shared_bytes)


def _a_map(a: torch.Tensor, tile: Tile) -> TensorMap:
    m, k = a.shape
    return encode(a.data_ptr(), a.dtype, (k, m), (k,), (128, tile.block_m), 128, 256)


def _b_map(b: torch.Tensor, tile: Tile) -> TensorMap:
    """B with its rows permuted: dimensions k, e, q, j, g, where row = 4·run·g + run·q + 2·j + e.

    Shared memory then holds the rows in the order in which wgmma gives a thread `run` consecutive columns. A box is
    what one block copies: all of a tile's rows of B, or its part of what a cluster shares.
    """
    n, k = b.shape
    width = run(n)
    return encode(
        b.data_ptr(),
        b.dtype,
        (k, 2, 4, width // 2, n // (4 * width)),
        (k, width * k, 2 * k, 4 * width * k),
        (128, 2, 4, width // 2, tile.block_n // (4 * width * tile.cluster)),
        128,
        256,
    )


def gemm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """a `[M, K]` and b `[N, K]` float8, scales fp32 `[1]`, bias `[N]` or None -> `[M, N]` of out_dtype."""
    check(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulate)
    for name, other in (("b", b), ("a_scale_inv", a_scale_inv), ("b_scale_inv", b_scale_inv), ("bias", bias)):
        if other is not None and other.device != a.device:
            raise ValueError(f"{name} is on {other.device} and a on {a.device}; gemm_fp8 runs on one device.")
    m, k = a.shape
    n = b.shape[0]
    tile = select_tile(m, n, k, accumulate == "split", multiprocessors(a.device.index))
    return gemm_fp8_tiled(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulate, tile)


def gemm_fp8_tiled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
    tile: Tile,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm_fp8` with a given tile, for tests and tuning; arguments are those that `check` accepts.

    Args:
        tile: one of `gemm_tile.TILES`, or any that fits.
        out: where to write, `[M, N]` contiguous and 16-byte aligned; allocated if None.
    """
    (m, k), n = a.shape, b.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.copy_(_epilogue_of_zero(m, n, a_scale_inv, b_scale_inv, bias))
    for name, operand in (("a", a), ("b", b)):
        if operand.data_ptr() % 16:
            raise ValueError(
                f"{name} starts at address {operand.data_ptr():#x}; the copy engine needs a multiple of 16 "
                f"bytes (a slice that begins inside a row of 16 values does not have it: clone it)."
            )
    if bias is not None and (bias.data_ptr() % 16 or not bias.is_contiguous()):
        bias = bias.clone(memory_format=torch.contiguous_format)
    index = a.device.index
    kernel = _kernel(a.dtype, b.dtype, out_dtype, accumulate, tile, 32 if n % 32 == 0 else 16)
    args = (
        _a_map(a, tile).argument,
        _b_map(b, tile).argument,
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        BIAS_TYPES[None if bias is None else bias.dtype],
        a_scale_inv.data_ptr(),
        b_scale_inv.data_ptr(),
        np.int32(m),
        np.int32(n),
        np.int32(k),
    )
    blocks = tile.blocks(m, n, multiprocessors(index))
    launch.launch(kernel, (blocks,), (tile.threads,), args, tile.shared_bytes, device=index)
    return out


def _epilogue_of_zero(
    m: int, n: int, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """K = 0: the accumulators are +0 and only the epilogue remains."""
    out = torch.zeros((m, n), dtype=torch.float32, device=a_scale_inv.device) * (a_scale_inv * b_scale_inv)
    return out if bias is None else out + bias.to(torch.float32)


LIBRARY.impl("gemm_fp8", gemm_fp8, "CUDA")
