"""Calls of `cast_rowwise`, and of it with a transposed copy."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, every_word

twin = torch.ops.twin
_OPS = (twin.cast_rowwise, twin.cast_rowwise_transpose)


def calls(c: Inputs) -> Calls:
    for op, dtype, q, power_of_two in product(_OPS, WIDE, FP8, (True, False)):
        for shape in ((1, 16), (130, 272)):
            yield Call(op, (c.x(*shape, dtype=dtype, special=True), q, power_of_two, 1e-12))
    for op, epsilon in product(_OPS, (0.0, 1e-12, 1e4)):
        yield Call(op, (c.x(20, 144, dtype=BF16), E4M3, True, epsilon))
        yield Call(op, (c.x(20, 144, dtype=FP32) * 1e-40, E5M2, True, epsilon))
        yield Call(op, (c.zeros(20, 48), E4M3, False, epsilon))
    for dtype in WIDE:  # a number a row, with zeros: the scale of every word
        words = torch.nn.functional.pad(every_word(dtype).reshape(-1, 1), (0, 15)).to(c.device)
        yield Call(twin.cast_rowwise, (words, E4M3, True, 1e-12))
    for op in _OPS:
        for shape, start in (
            ((0, 16), 0),
            ((16, 0), 0),
            ((65, 16), 4),
            ((128, 256), 0),
            ((257, 272), 0),
            ((3, 4112), 0),
        ):
            yield Call(op, (c.x(*shape, start=start), E4M3, True, 1e-12))


def large(c: Inputs) -> Calls:
    for op, rows in product(_OPS, (128 * 65535, 128 * 65536)):
        yield Call(op, (c.x(rows, 16), E4M3, True, 1e-12))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for op in _OPS:
        yield Call(op, (c.x(rows, cols), E4M3, True, 1e-12))
