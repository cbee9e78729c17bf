"""Calls of `adam_states`: Adam whose state has fewer bits."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE
from optimized.recordings.cases.adam import NUMBERS, SHAPES

twin = torch.ops.twin
U8 = torch.uint8
MOMENTS = (FP32, BF16, FP16, U8)
Shapes = tuple[tuple[int, ...], ...]


def _made(c: Inputs, dtype: torch.dtype, shape: tuple[int, ...], start: int, positive: bool) -> torch.Tensor:
    if dtype == U8:  # codes of FP8
        codes = c.codes(*shape, dtype=E4M3, start=start).view(U8)
        return codes & 127 if positive and c.filled and not start else codes
    if dtype == torch.int16:
        return c.integers(*shape, below=1 << 15, dtype=torch.int16)
    return (c.positive if positive else c.x)(*shape, dtype=dtype, start=start)


def _call(
    c: Inputs,
    dtypes: tuple[torch.dtype, ...],
    shapes: Shapes,
    copies: bool = True,
    start: int = -1,
    decoupled: bool = True,
) -> Call:
    """`dtypes`: of grads, params, both moments and copies; `start`: which list's last tensor is off 16 bytes."""
    *found, rounded = [
        [_made(c, dtype, shape, int(i == start and n == len(shapes) - 1), i == 3) for n, shape in enumerate(shapes)]
        for i, dtype in enumerate(dtypes)
    ]
    _, *of_scales, _ = dtypes
    scales: list[list[torch.Tensor]] = [
        [c.one() for _ in shapes] if dtype in (FP16, U8) and (copies or i) else [] for i, dtype in enumerate(of_scales)
    ]
    return Call(twin.adam_states, (*found, rounded if copies else [], *scales, *NUMBERS, decoupled))


def calls(c: Inputs) -> Calls:
    for wide, moment in product(WIDE, MOMENTS):
        sizes: Shapes = ((2050,), (8,))
        yield _call(c, (wide, wide, moment, moment, wide), sizes, copies=False)
        if wide != FP32:
            yield _call(c, (wide, FP32, moment, moment, wide), sizes)
        if wide != FP16:
            yield _call(c, (wide, FP16, moment, moment, wide), sizes)
        yield _call(c, (wide, torch.int16, moment, moment, BF16), sizes)
    for pair in ((FP32, U8), (FP16, FP32)):
        yield _call(c, (BF16, FP32, *pair, BF16), ((5,), (0,), (2049,), ()), decoupled=False)
    for start in range(5):
        yield _call(c, (BF16, FP32, BF16, BF16, BF16), ((8,), (8,)), start=start)
    yield _call(c, (BF16, FP32, BF16, U8, BF16), ((25,),) * 33)  # one more than the kernel's smallest capacity


def large(c: Inputs) -> Calls:
    for count in (32, 256, 257):  # the capacities of the kernel's arguments
        yield _call(c, (BF16, FP32, BF16, U8, BF16), ((25,),) * count)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for shape, dtype in product((*SHAPES, (rows, cols)), (BF16, FP32)):
        yield _call(c, (dtype, dtype, U8, U8, dtype), (shape,), copies=False)
