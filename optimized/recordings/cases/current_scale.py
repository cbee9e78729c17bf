"""Calls of `current_scale`."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    for wide, q, power_of_two, epsilon in product(WIDE, FP8, (False, True), (0.0, 1e9)):
        yield Call(twin.current_scale, (c.normal(37, 51, dtype=wide), q, power_of_two, epsilon))
    for factor, power_of_two in product((0.0, 1e-38, 1e-44, 1e38, float("inf"), float("nan")), (False, True)):
        yield Call(twin.current_scale, (c.positive(3, 16, dtype=FP32) * factor, E4M3, power_of_two, 0.0))
    for rows, cols, start in ((0, 16, 0), (16, 0, 0), (1, 1, 0), (3, 16, 1), (130, 144, 8), (300, 1024, 0)):
        yield Call(twin.current_scale, (c.x(rows, cols, dtype=BF16, start=start), E5M2, False, 0.0))


def large(c: Inputs) -> Calls:
    yield Call(twin.current_scale, (c.x(1 << 20, 4096), E4M3, False, 0.0))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.current_scale, (c.x(rows, cols), E4M3, False, 0.0))
