"""Calls of `adafactor`."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE
from optimized.recordings.cases.adam import SHAPES

twin = torch.ops.twin


def _call(c: Inputs, *shape: int, wide: torch.dtype = BF16, dtype: torch.dtype = BF16, maximize: bool = False) -> Call:
    matrix = len(shape) > 1
    row = c.positive(*((*shape[:-1], 1) if matrix else shape))
    col = c.positive(*shape[:-2], 1, shape[-1]) if matrix else None
    rest = (0.01, 0.5, 0.99, 1e-7, 1e-14, 1e-3, 1.0, maximize)
    return Call(twin.adafactor, (c.x(*shape, dtype=wide), c.x(*shape, dtype=dtype), row, col, *rest))


def calls(c: Inputs) -> Calls:
    for wide, master, shape in product(WIDE, (False, True), ((70, 300), (2, 65, 40), (40000,))):
        yield _call(c, *shape, wide=wide, dtype=FP32 if master else wide, maximize=master)
    yield _call(c, 2, 3, 5, 32769)
    yield _call(c, 0, 7)
    yield _call(c)


def large(c: Inputs) -> Calls:
    yield _call(c, 2, 3, 65, 32769, maximize=True)
    yield _call(c, 50000, 4096)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for shape in (*SHAPES, (rows, cols), (2, rows, cols)):
        yield _call(c, *shape)
