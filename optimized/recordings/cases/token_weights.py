"""Calls of `token_weights`: integers by which tokens are drawn."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE

twin = torch.ops.twin


def _call(c: Inputs, rows: int, cols: int, dtype: torch.dtype = BF16, special: bool = False, start: int = 0) -> Call:
    temperature = c.positive(rows)
    temperature[::3] = 0
    return Call(twin.token_weights, (c.x(rows, cols, dtype=dtype, special=special, start=start), temperature))


def calls(c: Inputs) -> Calls:
    for dtype, cols, special in product(WIDE, (1, 33, 1500), (False, True)):
        yield _call(c, 5, cols, dtype, special)
    yield _call(c, 3, 64, start=1)
    yield _call(c, 0, 64)
    equal = c.zeros(4, 70)
    yield Call(twin.token_weights, (equal, c.zeros(4)))
    for value in (-torch.inf, torch.inf, torch.nan):
        yield Call(twin.token_weights, (equal + value, c.positive(4)))
    yield _call(c, 2, 50304)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for dtype in (BF16, FP32):
        yield _call(c, rows, cols, dtype)
