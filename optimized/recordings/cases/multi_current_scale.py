"""Calls of `multi_current_scale`: the scales of several matrices, or of what they are together."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    op = twin.multi_current_scale
    for wide, joined, power_of_two in product(WIDE, (False, True), (False, True)):
        xs = [c.normal(rows, 51, dtype=wide) for rows in (37, 1, 5)]
        yield Call(op, (xs, joined, E4M3, power_of_two, 0.0))
    for joined in (False, True):
        yield Call(op, ([c.x(3, 16, start=1), c.x(0, 16), c.x(130, 144)], joined, E5M2, False, 1e-3))
        yield Call(op, ([c.x(3, 16)] * 9, joined, E4M3, False, 0.0))  # more than a launch takes
        special = [c.positive(3, 16, dtype=FP32) * factor for factor in (0.0, float("inf"), float("nan"), 1e-44)]
        yield Call(op, (special, joined, E4M3, False, 0.0))
    yield Call(op, ([c.x(16, 0)], True, E4M3, False, 0.0))


def large(c: Inputs) -> Calls:
    xs = [c.x(1 << 20, 4096), c.x(1, 16), c.x(4096, 4096)]
    for joined in (False, True):
        yield Call(twin.multi_current_scale, (xs, joined, E4M3, False, 0.0))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    xs = [c.x(rows, cols, dtype=BF16), c.x(1, cols, dtype=BF16)]
    for joined in (False, True):
        yield Call(twin.multi_current_scale, (xs, joined, E4M3, False, 0.0))
