"""Cases of `adafactor`. They have not been recorded yet."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE, Case, Outputs, named, numbers, short
from optimized.recordings.cases.adam import SHAPES

twin = torch.ops.twin


def _adafactor(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Outputs:
    count = torch.Size(shape).numel()
    grad, param = (numbers((1, count), dtype, 203 + i).view(shape).to(device) for i in range(2))
    matrix = len(shape) > 1
    row = torch.zeros((*shape[:-1], 1) if matrix else shape, device=device)
    col = torch.zeros((*shape[:-2], 1, shape[-1]), device=device) if matrix else None
    for weight in (1.0, 0.6, 0.4):
        twin.adafactor(grad, param, row, col, 0.01, weight, 0.999, 1e-7, 1e-14, 1e-3, 1.0, False)
    if col is None:
        return named("param variance", (param, row))
    return named("param row_var col_var", (param, row, col))


def cases() -> Iterator[Case]:
    for dtype, shape in product(WIDE, ((65, 300), (2, 70, 5), (700,))):
        size = "x".join(map(str, shape))
        yield Case("adafactor", f"{short(dtype)} {size}", partial(_adafactor, dtype, shape), live=True)


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
