"""`twin::gemm_fp8` and `twin::gemm_fp8_accumulate` on the GPU: kernels/gemms/gemm_fp8.cu. Every tile gives the same
bits.

The definition, with its rounding points: `reference.ops.gemms.gemm_fp8`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from optimized.ops.gemms.gemm_config import FP8, OUTPUTS, GemmConfig, fp8_config
from optimized.ops.gemms.gemm_fp8_split_k import gemm_fp8_split_k, is_faster
from optimized.ops.gemms.gemm_operands import (
    UNWRITABLE,
    bias_arguments,
    check_devices,
    loadable,
    operand_maps,
    run,
    tell_once,
    writable,
)
from optimized.ops.gemms.gemm_tile import FP8_TILES, K_BLOCK_BYTES, TILES, Tile, multiprocessors, select_tile
from reference.ops.gemms.gemm_fp8 import accumulate_outputs, outputs
from reference.ops.library import on_cuda
from reference.support import unwritten

_TILE_MACROS = {
    "gemm_fp8": "WARPGROUPS BLOCK_N STAGES CLUSTER ACROSS NARROW",
    "gemm_fp8_rowwise": "WARPGROUPS BLOCK_N STAGES CLUSTER NARROW",
}


@functools.lru_cache(maxsize=1024)
def config(
    a: torch.dtype,
    b: torch.dtype,
    out: torch.dtype,
    accumulate: str,
    tile: Tile,
    n: int,
    add: bool = False,
    kernel: str = "gemm_fp8",
    maxima: bool = False,
) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_fp8.cu, or of gemm_fp8_rowwise.cu; only n % 32 counts. With `add` it adds
    to what the output holds; with `maxima` its warps leave the largest numbers that they have stored.
    """
    others: dict[str, int | str] = {
        "PROMOTION": "Added" if accumulate == "split" else "OneChain",
        "ACCUMULATE": int(add),
        "RUN": run(n, out, tile.block_n),
        **({"MAXIMA": 1} if maxima else {}),
    }
    return fp8_config(kernel, (a, b, out), tile, _TILE_MACROS[kernel], others)


# The kernel that adds to its output lacks registers in clusters, which help split accumulation little anyway.
ADDING_TILES = tuple(tile for tile in TILES if tile.cluster == 1)

# What the CPU suite compiles: every tile with both accumulations, and every format and output with one tile.
_E4M3, _E5M2 = FP8
_EVERY_TILE = itertools.product([_E4M3], [_E4M3], [torch.bfloat16], ("fast", "split"), FP8_TILES, (16, 32))
_EVERY_FORMAT = itertools.product([_E5M2], FP8, OUTPUTS, ("fast", "split"), TILES[:1], [32])
_ADDING = itertools.product([_E5M2], [_E4M3], OUTPUTS, ["split"], ADDING_TILES, (16, 32), [True])
CONFIGURATIONS = [config(*case).listed for case in (*_EVERY_TILE, *_EVERY_FORMAT, *_ADDING)]
CONFIGURATIONS += [
    config(_E4M3, _E4M3, torch.bfloat16, "fast", tile, 32).ahead.listed for tile in FP8_TILES if tile.sharing_b == 1
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
    """The accumulation to run: with a single k-block both are one chain, and "fast" is faster.

    Split accumulation would add that chain to +0. This changes no word, because no step of a tensor core gives -0.
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
    """`gemm_fp8` with a given tile, one of `gemm_tile.FP8_TILES` or any that fits.

    The arguments are those that `gemm_fp8` accepts; `out`, `add` and `cut` are as in `gemm.gemm_tiled`.
    """
    out, done = begin(a, b, bias, out_dtype, out, add, lambda zero: zero * (a_scale_inv * b_scale_inv))
    if done:
        return out
    one = config(a.dtype, b.dtype, out_dtype, accumulate, tile, 32 if b.shape[0] % 32 == 0 else 16, add)
    scales = (a_scale_inv.data_ptr(), b_scale_inv.data_ptr())
    early = accumulate == "fast" and not add and tile.sharing_b == 1 and unwritten.holds(b)
    return launch_tiles(one, a, b, scales, bias, out, cut, early)


def begin(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
    add: bool,
    scaled: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, bool]:
    """Room for a product if `out` is None, and whether it has its numbers already, because it is empty or K is 0.

    Without a K the accumulators are +0: what remains is the epilogue, which makes numbers of them by `scaled`, and adds
    the bias and with `add` what `out` holds.
    """
    (m, k), n = a.shape, b.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if out.numel() and k == 0:
        found = scaled(torch.zeros((m, n), dtype=torch.float32, device=a.device))
        found = found if bias is None else found + bias.to(torch.float32)
        out.copy_(out.float() + found if add else found)
    return out, out.numel() == 0 or k == 0


def launch_tiles(
    config: GemmConfig,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[Any, ...],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    cut: int | None,
    early: bool = False,
) -> torch.Tensor:
    """Launch an FP8 GEMM that writes `out`; `scales`: the kernel's arguments between the bias and the sizes."""
    bias, tile, index = loadable(bias), config.tile, a.device.index
    (m, k), n = a.shape, b.shape[0]
    cut = tile.cut(m, n, multiprocessors(index)) if cut is None else cut
    maps = operand_maps(a, b, tile, run(n, out.dtype, tile.block_n))
    sizes = (np.int32(m), np.int32(n), np.int32(k), np.int32(cut))
    args = (maps, out.data_ptr(), *bias_arguments(bias), *scales, *sizes)
    (config.ahead if early else config).launch(index, cut, args, early)
    return out


@on_cuda
def gemm_fp8_accumulate(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, out: torch.Tensor
) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; a `[M, K]` and b `[N, K]` are float8, scales fp32 `[1]`."""
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
