"""What the GEMM ops share: how their kernels read operands and a bias, and which outputs they can write."""

import functools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.cuda.tensor_map import TensorMap, encode
from optimized.ops.gemms.gemm_tile import Tile
from reference.support.notice import say_once

UNWRITABLE = "got an out that is not contiguous from a multiple of 16 bytes, and adds the product in a second pass"
BIAS_TYPES = {torch.bfloat16: np.int32(1), torch.float16: np.int32(2), torch.float32: np.int32(3)}
_NO_BIAS = 0, np.int32(0)


def check_devices(op: str, a: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse tensors on another device than `a`; the keywords are their names."""
    for name, other in others.items():
        if other is not None and other.device != a.device:
            raise ValueError(f"{name} is on {other.device} and a on {a.device}; {op} runs on one device.")


def tell_once(op: str, what: str) -> None:
    """Say once that an op takes a slower way."""
    say_once(f"{op} {what}", f"twin::{op} {what}: a fallback")


def writable(out: torch.Tensor) -> bool:
    """Whether a kernel can write `out` in vectors."""
    return out.is_contiguous() and out.data_ptr() % 16 == 0


def run(n: int, out: torch.dtype, block_n: int = 32) -> int:
    """How many consecutive columns of the output a thread owns: 16 bytes, or 8 if N or a tile is no multiple of 32."""
    return 8 if n % 32 == block_n % 32 == 0 and out != torch.float32 else 4


# struct OperandMaps of kernels/gemms/gemm_fp8_mainloop.cuh.
MAPS = np.dtype([(name, "u8", 16) for name in ("a", "b", "a_edge", "b_edge")])


@functools.lru_cache(maxsize=1024)
def _operand_maps(
    a: int,
    b: int,
    formats: tuple[torch.dtype, torch.dtype],
    m: int,
    n: int,
    k: int,
    rows_apart: tuple[int, int],
    tile: Tile,
    width: int,
    halves: int,
) -> launch.ByValue:
    # L2 fetches two lines at a time, except where rows straddle lines: there it would cost 5 to 20 %.
    l2 = 128 if any(bytes_ % 128 for bytes_ in rows_apart) else 256
    a_part = tile.block_m // tile.sharing_a
    part = tile.block_n // max(halves, tile.sharing_b)

    def a_map(rows: int) -> TensorMap:
        return encode(a, formats[0], (k, m), rows_apart[:1], (128, rows), 128, l2)

    def b_map(rows: int) -> TensorMap:
        shape, strides = (k, 2, 4, width // 2, n // (4 * width)), [i * rows_apart[1] for i in (1, width, 2, 4 * width)]
        return encode(b, formats[1], shape, tuple(strides), (128, 2, 4, width // 2, rows // (4 * width)), 128, l2)

    maps = [a_map(a_part), b_map(part), a_map(m % a_part or a_part), b_map(n // halves % part or part)]
    addresses = [(128 * i, address) for i, address in enumerate((a, b, a, b))]
    return launch.by_value(np.concatenate([one.words for one in maps]), addresses)


def operand_maps(a: torch.Tensor, b: torch.Tensor, tile: Tile, width: int, halves: int = 1) -> launch.ByValue:
    """The kernels' struct OperandMaps: how the copy engine reads FP8 operands, the rows of B permuted.

    B's dimensions are k, e, q, j, g, where row = 4·width·g + width·q + 2·j + e. In this order wgmma gives a thread
    `width` consecutive columns. A tile's rows of A or B are one box, or one box for each block of a cluster that shares
    them, or for each of B's `halves`. At the edges a box has the rows that remain.
    """
    for name, operand in (("a", a), ("b", b)):
        if operand.data_ptr() % 16:
            raise ValueError(
                f"{name} starts at address {operand.data_ptr():#x}; the copy engine needs a multiple of 16 "
                f"bytes (a slice that begins inside a row of 16 values does not have it: clone it)."
            )
    (m, k), n = a.shape, b.shape[0]
    # The stride of a dimension of one element means nothing.
    apart = k if m == 1 else a.stride(0), k if n == 1 else b.stride(0)
    return _operand_maps(a.data_ptr(), b.data_ptr(), (a.dtype, b.dtype), m, n, k, apart, tile, width, halves)


def loadable(x: torch.Tensor | None) -> torch.Tensor | None:
    """`x`, or a copy where it is not contiguous from the 16-byte boundary that vector loads need."""
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def bias_arguments(bias: torch.Tensor | None) -> tuple[int, np.int32]:
    """The address and the type of a `loadable` bias, which must live until the launch."""
    return _NO_BIAS if bias is None else (bias.data_ptr(), BIAS_TYPES[bias.dtype])
