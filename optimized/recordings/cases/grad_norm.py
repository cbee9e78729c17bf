"""Calls of `grad_norm`; `clip_grads` has its recorded cases."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE
from optimized.recordings.cases.adam import SHAPES

twin = torch.ops.twin
KINDS = ("l2", "max")


def mixed(c: Inputs) -> list[torch.Tensor]:
    """Gradients of every dtype, sizes around a chunk of the kernel, and none."""
    return [c.x(5), c.x(32769, dtype=FP32), c.x(0, 4), c.x(32768), c.x(9, dtype=FP16), c.x(3, start=1)]


def calls(c: Inputs) -> Calls:
    for dtype, kind in product(WIDE, KINDS):
        yield Call(twin.grad_norm, ([c.x(3, 7, dtype=dtype), c.x(41, 1000, dtype=dtype)], kind))
    for kind in KINDS:
        yield Call(twin.grad_norm, (mixed(c), kind))
        yield Call(twin.grad_norm, ([c.x(0, 3)], kind))
        yield Call(twin.grad_norm, ([c.x(5, 5)] * 65, kind))  # one more than the kernel's smallest capacity


def large(c: Inputs) -> Calls:
    for count, kind in product((64, 512, 513), KINDS):  # the capacities of the kernel's arguments
        yield Call(twin.grad_norm, ([c.x(5, 5)] * count, kind))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for shape, dtype, kind in product((*SHAPES, (rows, cols)), (BF16, FP32), KINDS):
        x = c.x(*shape, dtype=dtype)
        yield Call(twin.grad_norm, ([x, x], kind))
