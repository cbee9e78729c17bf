"""Calls of `cast_blocks`, and of it with a transposed copy."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE
from reference.ops.casts.cast_blocks import DIALECTS

twin = torch.ops.twin
_OPS = (twin.cast_blocks, twin.cast_blocks_transpose)


def calls(c: Inputs) -> Calls:
    for op, dtype, q, square in product(_OPS, WIDE, FP8, (False, True)):
        for shape in ((1, 16), (130, 272)):
            yield Call(op, (c.x(*shape, dtype=dtype, special=True), q, square, "power_of_two", 0.0))
    for op, dialect, square, epsilon in product(_OPS, DIALECTS, (False, True), (0.0, 1e-4)):
        yield Call(op, (c.x(20, 144, dtype=BF16), E4M3, square, dialect, epsilon))
        yield Call(op, (c.x(20, 144, dtype=FP32) * 1e-40, E5M2, square, dialect, epsilon))
        yield Call(op, (c.zeros(20, 48), E4M3, square, dialect, epsilon))
    for op, square in product(_OPS, (False, True)):
        for shape, start in (((0, 16), 0), ((16, 0), 0), ((65, 16), 4), ((128, 128), 0), ((129, 640), 0)):
            yield Call(op, (c.x(*shape, start=start), E4M3, square, "power_of_two", 0.0))


def large(c: Inputs) -> Calls:
    for op, rows in product(_OPS, (128 * 65535, 128 * 65536)):
        yield Call(op, (c.x(rows, 16), E4M3, False, "power_of_two", 0.0))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for op, square in product(_OPS, (False, True)):
        yield Call(op, (c.x(rows, cols), E4M3, square, "power_of_two", 0.0))
