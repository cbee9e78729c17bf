"""Calls of `sgd`."""

from collections.abc import Sequence
from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE
from optimized.recordings.cases.adam import SHAPES

twin = torch.ops.twin


def _call(
    c: Inputs,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype = BF16,
    master: bool = False,
    start: int = -1,
    momentum: float = 0.9,
    nesterov: bool = False,
    first: bool = False,
    last: bool = False,
) -> Call:
    """`start`: which of the three lists' last tensor begins off a multiple of 16 bytes."""
    param_dtype, end = FP32 if master else dtype, len(shapes) - 1
    grads, params, momenta = [
        [c.x(*shape, dtype=one, start=int(i == start and n == end)) for n, shape in enumerate(shapes)]
        for i, one in enumerate((dtype, param_dtype, param_dtype))
    ]
    dampening = 0.0 if nesterov else 0.25
    rest = (1e-2, momentum, dampening, 0.1, nesterov, first, last)
    return Call(twin.sgd, (grads, params, momenta if momentum else [], *rest))


def calls(c: Inputs) -> Calls:
    for dtype, master, first in product(WIDE, (False, True), (False, True)):
        if not (master and dtype == FP32):
            yield _call(c, [(3, 7), (41, 100)], dtype, master, first=first)
            yield _call(c, [(2050,), (8,)], dtype, master, nesterov=True, last=not first)
    yield _call(c, [(3, 7), (0, 4), (16,), ()], momentum=0.0)
    for start in range(3):
        yield _call(c, [(8,), (8,)], start=start)
    yield _call(c, [(5, 5)] * 33)  # one more than the kernel's smallest capacity


def large(c: Inputs) -> Calls:
    for count in (32, 513):  # the capacities of the kernel's arguments
        yield _call(c, [(5, 5)] * count)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for shape, momentum in product((*SHAPES, (rows, cols)), (0.0, 0.9)):
        yield _call(c, [shape], momentum=momentum)
