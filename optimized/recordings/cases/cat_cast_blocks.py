"""Calls of `cat_cast_blocks_transpose_dbias`: gradients side by side, cast in blocks."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE
from reference.ops.casts.cast_blocks import DIALECTS

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    op = twin.cat_cast_blocks_transpose_dbias
    for dtype, q, groups in product(WIDE, FP8, (1, 3)):
        xs = [c.x(130, groups * width, dtype=dtype, special=True) for width in (32, 16, 16)]
        yield Call(op, (xs, groups, q, "power_of_two", 0.0))
    for dialect in DIALECTS:
        yield Call(op, ([c.x(65, 144, dtype=BF16)], 1, E5M2, dialect, 1e-4))
    yield Call(op, ([c.x(7, 16, start=1), c.x(7, 16)], 1, E4M3, "power_of_two", 0.0))
    yield Call(op, ([c.x(129, 2400)], 1, E4M3, "fp32", 0.0))
    yield Call(op, ([c.x(0, 16), c.x(0, 16)], 1, E4M3, "power_of_two", 0.0))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    op = twin.cat_cast_blocks_transpose_dbias
    yield Call(op, ([c.x(rows, cols), c.x(rows, cols)], 1, E4M3, "power_of_two", 0.0))
