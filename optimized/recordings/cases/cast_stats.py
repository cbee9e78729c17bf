"""Calls of `cast_stats`, of one scale and of blocks."""

from itertools import product

import torch

from optimized.recordings.calls import E4M3, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, every_word
from reference.ops.casts.cast_blocks import scale_shape

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    for dtype in WIDE:
        for shape in ((1, 16), (33, 4096), (4160, 272)):
            yield Call(twin.cast_stats, (c.x(*shape, dtype=dtype, special=True), None, None))
            for q in FP8:
                x = c.x(*shape, dtype=dtype, special=True)
                yield Call(twin.cast_stats, (x, c.codes(*shape, dtype=q), c.one()))
                yield Call(twin.cast_stats, (x, c.codes(*shape, dtype=q), c.positive(shape[0])))
    for dtype, q, square, shape in product(WIDE, FP8, (False, True), ((1, 16), (33, 4096), (260, 272))):
        scales = c.positive(*scale_shape(*shape, square))
        yield Call(
            twin.cast_stats_blocks, (c.x(*shape, dtype=dtype, special=True), c.codes(*shape, dtype=q), scales, square)
        )
    for dtype, q in product(WIDE, FP8):
        words, codes = every_word(dtype).to(c.device), c.codes(256, 256, dtype=q)
        yield Call(twin.cast_stats, (words, codes, c.one()))
        yield Call(twin.cast_stats_blocks, (words, codes, c.positive(*scale_shape(256, 256, True)), True))
    yield Call(twin.cast_stats, (c.x(0, 48), None, None))
    yield Call(twin.cast_stats, (c.x(3, 48, start=1), c.codes(3, 48, start=3), c.one()))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    scales = c.positive(*scale_shape(rows, cols, True))
    yield Call(twin.cast_stats_blocks, (c.x(rows, cols), c.codes(rows, cols, dtype=E4M3), scales, True))
    yield Call(twin.cast_stats, (c.x(rows, cols), c.codes(rows, cols, dtype=E4M3), c.one()))
    yield Call(twin.cast_stats, (c.x(rows, cols), None, None))
