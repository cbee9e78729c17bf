"""Calls of `grad_norm` and `clip_grads`."""

from itertools import product

import torch

from optimized.recordings.calls import FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE
from optimized.recordings.cases.adam import SHAPES
from optimized.recordings.cases.grad_norm import mixed

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    for dtype in WIDE:
        yield Call(twin.clip_grads, ([c.x(3, 7, dtype=dtype), c.x(41, 100, dtype=dtype)], c.positive(), 0.05))
    yield Call(twin.clip_grads, (mixed(c), c.positive(), 1e9))  # within the limit
    some = [c.x(5, 5) for _ in range(65)]  # one more than the kernel's smallest capacity
    yield Call(twin.clip_grads, (some, c.positive(), 0.1))
    yield Call(twin.clip_grads, ([c.x(0, 5)], c.positive(), 1.0))
    yield Call(twin.clip_grads, ([], c.zeros(), 1.0))


def large(c: Inputs) -> Calls:
    for count in (64, 512, 513):  # the capacities of the kernel's arguments
        yield Call(twin.clip_grads, ([c.x(5, 5) for _ in range(count)], c.positive(), 0.1))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for shape, norm, most in product((*SHAPES, (rows, cols)), (c.zeros(), c.zeros() + 1), (0.0, 1.0)):
        yield Call(twin.clip_grads, ([c.x(*shape, dtype=FP32)], norm, most))
