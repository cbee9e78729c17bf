"""Cases of `cast_blocks`, and of it with a transposed copy."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, Case, Outputs, named, numbers, short
from reference.ops.casts.cast_blocks import DIALECTS

twin = torch.ops.twin
_OPS = (twin.cast_blocks, twin.cast_blocks_transpose)
_SHAPES = ("blocks of a row", "square blocks")


def _cast_blocks(
    shape: tuple[int, int], wide: torch.dtype, dtype: torch.dtype, square: bool, dialect: str, device: torch.device
) -> Outputs:
    """Rows of different magnitudes, and one of zeros."""
    x = numbers(shape, wide, 31)
    x[shape[0] // 2] = 0
    found = twin.cast_blocks_transpose(x.to(device), dtype, square, dialect, 0.0)
    return named("codes codes_t scale_inv scale_inv_t", found)


def _alone(dtype: torch.dtype, square: bool, device: torch.device) -> Outputs:
    x = numbers((300, 272), BF16, 32).to(device)
    return named("codes scale_inv", twin.cast_blocks(x, dtype, square, "power_of_two", 0.0))


def cases() -> Iterator[Case]:
    for wide, dtype, square, dialect in product(WIDE, FP8, (False, True), DIALECTS):
        for rows in (1, 300, 2048):
            label = f"{dialect}, {_SHAPES[square]}, {short(wide)} to {short(dtype)}, [{rows}, 272]"
            run = partial(_cast_blocks, (rows, 272), wide, dtype, square, dialect)
            yield Case("cast_blocks_transpose", label, run, live=True)
    for dtype, square in product(FP8, (False, True)):
        run = partial(_alone, dtype, square)
        yield Case("cast_blocks", f"{_SHAPES[square]}, bf16 to {short(dtype)}, [300, 272]", run, live=True)


def calls(c: Inputs) -> Calls:
    for op, dtype, q, square in product(_OPS, WIDE, FP8, (False, True)):
        for shape in ((1, 16), (130, 272)):
            yield Call(op, (c.x(*shape, dtype=dtype, special=True), q, square, "power_of_two", 0.0))
    for op, dialect, square, epsilon in product(_OPS, DIALECTS, (False, True), (0.0, 1e-4)):
        yield Call(op, (c.x(20, 144, dtype=BF16), E4M3, square, dialect, epsilon))
        yield Call(op, (c.x(20, 144, dtype=FP32) * 1e-40, E5M2, square, dialect, epsilon))
    for op, square in product(_OPS, (False, True)):
        for shape, start in (((0, 16), 0), ((16, 0), 0), ((65, 16), 4), ((128, 128), 0), ((129, 640), 0)):
            yield Call(op, (c.x(*shape, start=start), E4M3, square, "power_of_two", 0.0))


def large(c: Inputs) -> Calls:
    for op, rows in product(_OPS, (128 * 65535, 128 * 65536)):
        yield Call(op, (c.x(rows, 16), E4M3, False, "power_of_two", 0.0))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for op, square in product(_OPS, (False, True)):
        yield Call(op, (c.x(rows, cols), E4M3, square, "power_of_two", 0.0))
