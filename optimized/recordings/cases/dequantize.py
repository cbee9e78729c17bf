"""Calls of `dequantize`."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE
from reference.ops.casts.cast_blocks import scale_shape

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    for q, wide, (rows, cols) in product(FP8, WIDE, ((1, 16), (37, 144), (130, 272))):
        yield Call(twin.dequantize, (c.codes(rows, cols, dtype=q), c.one(), False, wide))
        yield Call(twin.dequantize, (c.codes(rows, cols, dtype=q), c.positive(rows), False, wide))
        for square in (False, True):
            scales = c.positive(*scale_shape(rows, cols, square))
            yield Call(twin.dequantize, (c.codes(rows, cols, dtype=q), scales, square, wide))
    for rows, cols, start in ((0, 16, 0), (16, 0, 0), (5, 48, 1), (5, 48, 16)):
        yield Call(twin.dequantize, (c.codes(rows, cols, start=start), c.one(), False, BF16))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.dequantize, (c.codes(rows, cols, dtype=E4M3), c.one(), True, BF16))
