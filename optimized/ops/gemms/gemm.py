"""`twin::gemm` and `twin::gemm_accumulate` on the GPU: kernels/gemms/gemm.cu. Every tile gives the same bits.

The definition, with its rounding points: `reference.ops.gemms.gemm`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda.tensor_map import TensorMap, encode
from optimized.ops.gemms.gemm_config import HALVES, OUTPUTS, TYPES, GemmConfig
from optimized.ops.gemms.gemm_operands import UNWRITABLE, bias_arguments, check_devices, loadable, tell_once, writable
from optimized.ops.gemms.gemm_tile import TILES, Tile, multiprocessors, select_tile
from reference.ops.gemms.gemm import accumulate_outputs, outputs
from reference.ops.library import on_cuda
from reference.support import unwritten


@functools.lru_cache(maxsize=1024)
def config(
    dtype: torch.dtype, out: torch.dtype, transpose_a: bool, transpose_b: bool, tile: Tile, add: bool = False
) -> GemmConfig:
    """One configuration of kernels/gemms/gemm.cu; with `add` it adds the product to what the output holds."""
    macros: dict[str, int | str] = {
        "FORMAT": TYPES[dtype],
        "OUT": TYPES[out],
        "TRANSPOSE_A": int(transpose_a),
        "TRANSPOSE_B": int(transpose_b),
        "ACCUMULATE": int(add),
        **tile.macros("WARPGROUPS", "BLOCK_N", "STAGES", "CLUSTER", "NARROW"),
    }
    return GemmConfig("gemm", tile, tuple(macros.items()))


# What the CPU suite compiles: every tile with each layout, and every output and format with one tile.
_EVERY_TILE = itertools.product(HALVES[:1], HALVES[:1], (False, True), (False, True), TILES)
_EVERY_FORMAT = itertools.product(HALVES, OUTPUTS[1:], [False], [False], TILES[:1])
_ADDING = itertools.product(HALVES[:1], OUTPUTS, [True], [True], TILES, [True])
CONFIGURATIONS = [config(*case).listed for case in (*_EVERY_TILE, *_EVERY_FORMAT, *_ADDING)]
# Of few rows, which are one tile's.
CONFIGURATIONS += [
    config(dtype, out, False, False, tile).ahead.listed
    for dtype, out, tile in itertools.product(HALVES, OUTPUTS, TILES)
    if tile.cluster == 1
]


def is_transposed(x: torch.Tensor) -> bool:
    """Whether `x` `[rows, K]` is a transposed view, in which the rows' numbers lie side by side in memory."""
    rows, depth = x.shape
    return not (x.stride(1) == 1 or depth == 1) and (x.stride(0) == 1 or rows == 1)


UNALIGNED = (
    "got a matrix whose rows do not start at multiples of 16 bytes, which the copy engine needs; it is copied into "
    "padded memory first: features that are a multiple of 8 avoid it"
)


def padded(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x`, or a copy in padded memory; and how many elements lie from one contiguous line of it to the next."""
    lines, line = (x.shape[1], x.shape[0]) if is_transposed(x) else (x.shape[0], x.shape[1])
    padded = -(-line // 8) * 8
    # The stride of a dimension of one element means nothing, and torch may report any number.
    stride = padded if lines == 1 else x.stride(1 if is_transposed(x) else 0)
    if x.data_ptr() % 16 == 0 and stride % 8 == 0 and stride > 0:
        return x, stride
    tell_once("gemm", UNALIGNED)
    memory = x.new_empty((lines, padded))[:, :line]
    copy = memory.t() if is_transposed(x) else memory
    return copy.copy_(x), padded


def operand_map(x: torch.Tensor, stride: int, transposed: bool, box_rows: int) -> TensorMap:
    rows, depth = x.shape
    if transposed:
        return encode(x.data_ptr(), x.dtype, (rows, depth), (2 * stride,), (64, 64), 128, 256)
    return encode(x.data_ptr(), x.dtype, (depth, rows), (2 * stride,), (64, box_rows), 128, 256)


@on_cuda
def gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """a `[M, K]` and b `[N, K]`, both bf16 or both fp16, bias `[N]` or None -> `[M, N]` of out_dtype.

    Each of a and b may be row-major or a transposed view; neither is copied unless its rows are not aligned.
    """
    out = outputs(a, b, bias, out_dtype)
    check_devices("gemm", a, b=b, bias=bias)
    return gemm_tiled(a, b, bias, out_dtype, _tile(a, b), out)


def _tile(a: torch.Tensor, b: torch.Tensor) -> Tile:
    return select_tile(a.shape[0], b.shape[0], 2 * a.shape[1], False, multiprocessors(a.device.index))


@on_cuda
def gemm_accumulate(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; a `[M, K]` and b `[N, K]` are both bf16 or both fp16."""
    accumulate_outputs(a, b, out)
    check_devices("gemm", a, b=b, out=out)
    if writable(out):
        gemm_tiled(a, b, None, out.dtype, _tile(a, b), out, add=True)
    else:
        tell_once("gemm_accumulate", UNWRITABLE)
        out.copy_(out.float() + gemm(a, b, None, torch.float32))


def gemm_tiled(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
    out: torch.Tensor | None = None,
    add: bool = False,
    cut: int | None = None,
) -> torch.Tensor:
    """`gemm` with a given tile; arguments are those that `gemm` accepts.

    Args:
        tile: one of `gemm_tile.TILES`, or any that fits.
        out: where to write, `[M, N]` contiguous and 16-byte aligned; allocated if None.
        add: add to what `out` holds, in fp32.
        cut: how many clusters' tiles the output is cut into; `Tile.cut` if None.
    """
    (m, k), n = a.shape, b.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    if k == 0:
        zero = torch.zeros(n, dtype=torch.float32, device=a.device) if bias is None else bias.expand(m, n)
        return out.copy_(out.float() + zero if add else zero)
    bias = loadable(bias)
    a, a_stride = padded(a)
    b, b_stride = padded(b)
    transpose_a, transpose_b = is_transposed(a), is_transposed(b)
    index = a.device.index
    cut = tile.cut(m, n, multiprocessors(index)) if cut is None else cut
    # Of few rows, with weights that nobody writes: they are loaded before the kernel before has ended.
    early = m <= tile.block_m and tile.cluster == 1 and not (transpose_a or transpose_b or add) and unwritten.holds(b)
    a_map = operand_map(a, a_stride, transpose_a, m if early else tile.block_m)
    b_map = operand_map(b, b_stride, transpose_b, tile.block_n // tile.cluster)
    sizes = (np.int32(m), np.int32(n), np.int32(k), np.int32(cut))
    args = (a_map.argument, b_map.argument, out.data_ptr(), *bias_arguments(bias), *sizes)
    one = config(a.dtype, out_dtype, transpose_a, transpose_b, tile, add)
    (one.ahead if early else one).launch(index, cut, args, early)
    return out
