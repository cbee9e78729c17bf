"""twin::gemm_fp8 on Hopper: the host side of kernels/gemm_fp8.cu.

The definition, with its rounding points, is reference/ops/gemm_fp8.py. Every tile gives the same bits.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.ops.gemm_config import FP8, OUTPUTS, TYPES, GemmConfig
from optimized.ops.gemm_fp8_split_k import gemm_fp8_split_k, is_faster
from optimized.ops.gemm_operands import (
    UNWRITABLE,
    bias_arguments,
    check_devices,
    loadable,
    operand_maps,
    run,
    tell_once,
    writable,
)
from optimized.ops.gemm_tile import FP8_TILES, K_BLOCK_BYTES, TILES, Tile, multiprocessors, select_tile
from reference.ops.gemm_fp8 import accumulate_outputs, outputs
from reference.ops.library import on_cuda


@functools.lru_cache(maxsize=1024)
def config(
    a: torch.dtype, b: torch.dtype, out: torch.dtype, accumulate: str, tile: Tile, n: int, add: bool = False
) -> GemmConfig:
    """One configuration of kernels/gemm_fp8.cu; of N it depends on n % 32. `add`: to what the output holds."""
    macros: dict[str, int | str] = {
        "A_FORMAT": TYPES[a],
        "B_FORMAT": TYPES[b],
        "OUT": TYPES[out],
        "SPLIT": int(accumulate == "split"),
        "ACCUMULATE": int(add),
        **tile.macros("WARPGROUPS", "BLOCK_N", "STAGES", "CLUSTER", "ACROSS", "NARROW"),
        "RUN": run(n, out, tile.block_n),
    }
    return GemmConfig("gemm_fp8", tile, tuple(macros.items()))


# Of a GEMM that is added to its output: in clusters, which help split accumulation little, it lacks registers.
ADDING_TILES = tuple(tile for tile in TILES if tile.cluster == 1)

# What the CPU suite compiles: every tile with both accumulations, and every format and output in one tile.
CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [
    config(a, b, out, accumulate, tile, n).listed
    for a, b, out, accumulate, tile, n in [
        *itertools.product(
            [torch.float8_e4m3fn], [torch.float8_e4m3fn], [torch.bfloat16], ("fast", "split"), FP8_TILES, (16, 32)
        ),
        *itertools.product([torch.float8_e5m2], FP8, OUTPUTS, ("fast", "split"), TILES[:1], [32]),
    ]
] + [
    config(torch.float8_e5m2, torch.float8_e4m3fn, out, "split", tile, n, add=True).listed
    for out, tile, n in itertools.product(OUTPUTS, ADDING_TILES, (16, 32))
]


@on_cuda
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
    out = outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulate)
    check_devices("gemm_fp8", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, bias=bias)
    return run_gemm(out, a, b, a_scale_inv, b_scale_inv, bias, accumulate)


def run_gemm(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    accumulate: str,
) -> torch.Tensor:
    """`gemm_fp8` on checked arguments, into `out`, which it returns."""
    (m, k), n = a.shape, b.shape[0]
    accumulate, sms = chains(accumulate, k), multiprocessors(a.device.index)
    if accumulate == "split" and m * n * k > 0 and is_faster(m, n, k, sms):
        return gemm_fp8_split_k(a, b, a_scale_inv, b_scale_inv, bias, out.dtype, out)
    tile = select_tile(m, n, k, accumulate == "split", sms, FP8_TILES)
    return gemm_fp8_tiled(a, b, a_scale_inv, b_scale_inv, bias, out.dtype, accumulate, tile, out)


def chains(accumulate: str, k: int) -> str:
    """How to accumulate: a K of one k-block is one chain either way, and "fast" is faster.

    The addition of split accumulation then is to +0, which changes no word: no step of a tensor core gives -0.
    """
    return accumulate if k > K_BLOCK_BYTES else "fast"


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
    add: bool = False,
    cut: int | None = None,
) -> torch.Tensor:
    """`gemm_fp8` with a given tile, for tests and tuning; arguments are those that `gemm_fp8` accepts.

    Args:
        tile: one of `gemm_tile.FP8_TILES`, or any that fits.
        out: where to write, `[M, N]` contiguous and 16-byte aligned; allocated if None.
        add: to what `out` holds, in fp32.
        cut: into how many clusters' tiles; `Tile.cut` if None.
    """
    (m, k), n = a.shape, b.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    if k == 0:
        zero = _epilogue_of_zero(m, n, a_scale_inv, b_scale_inv, bias)
        return out.copy_(out.float() + zero if add else zero)
    bias = loadable(bias)
    index = a.device.index
    cut = tile.cut(m, n, multiprocessors(index)) if cut is None else cut
    args = (
        operand_maps(a, b, tile, run(n, out_dtype, tile.block_n)),
        out.data_ptr(),
        *bias_arguments(bias),
        a_scale_inv.data_ptr(),
        b_scale_inv.data_ptr(),
        np.int32(m),
        np.int32(n),
        np.int32(k),
        np.int32(cut),
    )
    config(a.dtype, b.dtype, out_dtype, accumulate, tile, 32 if n % 32 == 0 else 16, add).launch(index, cut, args)
    return out


@on_cuda
def gemm_fp8_accumulate(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, out: torch.Tensor
) -> None:
    """a `[M, K]` and b `[N, K]` float8, scales fp32 `[1]`; out `[M, N]` fp32, bf16 or fp16 is added to."""
    accumulate_outputs(a, b, a_scale_inv, b_scale_inv, out)
    check_devices("gemm_fp8", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, out=out)
    rest = (a, b, a_scale_inv, b_scale_inv, None)
    if writable(out):
        (m, k), n = a.shape, b.shape[0]
        tile = select_tile(m, n, k, True, multiprocessors(a.device.index), ADDING_TILES)
        gemm_fp8_tiled(*rest, out.dtype, "split", tile, out, add=True)
    else:
        tell_once("gemm_fp8_accumulate", UNWRITABLE)
        out.copy_(out.float() + gemm_fp8(*rest, torch.float32, "split"))


def _epilogue_of_zero(
    m: int, n: int, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """K = 0: the accumulators are +0 and only the epilogue remains."""
    out = torch.zeros((m, n), dtype=torch.float32, device=a_scale_inv.device) * (a_scale_inv * b_scale_inv)
    return out if bias is None else out + bias.to(torch.float32)
