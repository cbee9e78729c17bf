"""twin::gemm_fp8 on Hopper: the host side of kernels/gemm_fp8.cu.

The definition, with its rounding points, is reference/ops/gemm_fp8.py. Every tile gives the same bits.
"""

import functools
import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops.gemm_fp8_split_k import gemm_fp8_split_k, is_faster
from optimized.ops.gemm_operands import FORMATS, OUTPUTS, bias_arguments, loadable, operands, run
from optimized.ops.gemm_tile import FP8_TILES, K_BLOCK_BYTES, TILES, Tile, multiprocessors, select_tile
from reference.notice import say_once
from reference.ops.gemm_fp8 import accumulate_outputs, outputs
from reference.ops.library import on_cuda


def defines(
    a: torch.dtype, b: torch.dtype, out: torch.dtype, accumulate: str, tile: Tile, n: int, add: bool = False
) -> dict[str, int | str]:
    """The macros of one configuration of kernels/gemm_fp8.cu; `add`: to what the output holds."""
    return {
        "A_FORMAT": FORMATS[a],
        "B_FORMAT": FORMATS[b],
        "OUT": OUTPUTS[out],
        "SPLIT": int(accumulate == "split"),
        "ACCUMULATE": int(add),
        "WARPGROUPS": tile.warpgroups,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "CLUSTER": tile.cluster,
        "ACROSS": int(tile.across),
        "NARROW": tile.narrow,
        "RUN": run(n, out, tile.block_n),
    }


# Of a product that is added to: in clusters, which help split accumulation little, there are too few registers for it.
ADDING_TILES = tuple(tile for tile in TILES if tile.cluster == 1)

# What the CPU suite compiles: every tile with both accumulations, and every format and output in one tile.
CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [
    ("gemm_fp8", defines(a, b, out, accumulate, tile, n))
    for a, b, out, accumulate, tile, n in [
        *itertools.product(
            [torch.float8_e4m3fn], [torch.float8_e4m3fn], [torch.bfloat16], ("fast", "split"), FP8_TILES, (16, 32)
        ),
        *itertools.product([torch.float8_e5m2], FORMATS, OUTPUTS, ("fast", "split"), TILES[:1], [32]),
    ]
] + [
    ("gemm_fp8", defines(torch.float8_e5m2, torch.float8_e4m3fn, out, "split", tile, n, add=True))
    for out, tile, n in itertools.product(OUTPUTS, ADDING_TILES, (16, 32))
]


@functools.lru_cache(maxsize=1024)
def _kernel(
    a: torch.dtype, b: torch.dtype, out: torch.dtype, accumulate: str, tile: Tile, columns: int, add: bool
) -> launch.Kernel:
    # `columns` is 32 or 16: what of N the configuration depends on.
    macros = defines(a, b, out, accumulate, tile, columns, add)
    return launch.function("gemm_fp8", "gemm_fp8", macros, tile.shared_bytes)


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
    check_devices(a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, bias=bias)
    return product(out, a, b, a_scale_inv, b_scale_inv, bias, accumulate)


def product(
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


def check_devices(a: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse tensors that are not where `a` is, by their names."""
    for name, other in others.items():
        if other is not None and other.device != a.device:
            raise ValueError(f"{name} is on {other.device} and a on {a.device}; gemm_fp8 runs on one device.")


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
    maps = operands(a, b, tile, run(n, out_dtype, tile.block_n))
    bias = loadable(bias)
    index = a.device.index
    cut = tile.cut(m, n, multiprocessors(index)) if cut is None else cut
    kernel = _kernel(a.dtype, b.dtype, out_dtype, accumulate, tile, 32 if n % 32 == 0 else 16, add)
    args = (
        maps,
        out.data_ptr(),
        *bias_arguments(bias),
        a_scale_inv.data_ptr(),
        b_scale_inv.data_ptr(),
        np.int32(m),
        np.int32(n),
        np.int32(k),
        np.int32(cut),
    )
    blocks = tile.blocks(cut, multiprocessors(index))
    launch.launch(kernel, (blocks,), (tile.threads,), args, tile.shared_bytes, device=index)
    return out


def tell_once(op: str, what: str) -> None:
    """Say once that an op goes a slower way."""
    say_once(f"{op} {what}", f"twin::{op} {what}: a fallback")


@on_cuda
def gemm_fp8_accumulate(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, out: torch.Tensor
) -> None:
    """a `[M, K]` and b `[N, K]` float8, scales fp32 `[1]`; out `[M, N]` fp32, bf16 or fp16 is added to."""
    accumulate_outputs(a, b, a_scale_inv, b_scale_inv, out)
    check_devices(a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, out=out)
    rest = (a, b, a_scale_inv, b_scale_inv, None)
    if writable(out):
        (m, k), n = a.shape, b.shape[0]
        tile = select_tile(m, n, k, True, multiprocessors(a.device.index), ADDING_TILES)
        gemm_fp8_tiled(*rest, out.dtype, "split", tile, out, add=True)
    else:
        tell_once("gemm_fp8_accumulate", UNWRITABLE)
        out.copy_(out.float() + gemm_fp8(*rest, torch.float32, "split"))


UNWRITABLE = "got an out that is not contiguous from a multiple of 16 bytes, and adds the product in a second pass"


def writable(out: torch.Tensor) -> bool:
    """Whether a kernel can write `out` in vectors."""
    return out.is_contiguous() and out.data_ptr() % 16 == 0


def _epilogue_of_zero(
    m: int, n: int, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """K = 0: the accumulators are +0 and only the epilogue remains."""
    out = torch.zeros((m, n), dtype=torch.float32, device=a_scale_inv.device) * (a_scale_inv * b_scale_inv)
    return out if bias is None else out + bias.to(torch.float32)
