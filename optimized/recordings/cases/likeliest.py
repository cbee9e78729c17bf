"""Calls of `likeliest`: the first largest logit and its loss."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    for dtype, cols, special in product(WIDE, (1, 33, 2056), (False, True)):
        yield Call(twin.likeliest, (c.x(5, cols, dtype=dtype, special=special),))
    yield Call(twin.likeliest, (c.x(3, 64, start=1),))
    yield Call(twin.likeliest, (c.x(0, 64),))
    equal = c.zeros(4, 70)
    for value in (0.0, -torch.inf, torch.inf, torch.nan):
        yield Call(twin.likeliest, (equal + value,))
    yield Call(twin.likeliest, (c.x(2, 50304),))


def large(c: Inputs) -> Calls:
    yield Call(twin.likeliest, (c.x(70000, 8),))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for dtype in (BF16, FP32):
        yield Call(twin.likeliest, (c.x(rows, cols, dtype=dtype),))
