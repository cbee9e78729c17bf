"""Cases of `cat_cast_transpose_dbias`: matrices side by side."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import E4M3, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, Case, Outputs, named, numbers, short

twin = torch.ops.twin


def _side_by_side(wide: torch.dtype, dtype: torch.dtype, groups: int, device: torch.device) -> Outputs:
    """Three parts of 16, 8 and 8 columns in each group."""
    xs = [numbers((130, groups * width), wide, 31 + i).to(device) for i, width in enumerate((16, 8, 8))]
    scales, history = torch.tensor([1.0, 3.0], device=device), torch.zeros(4, 2, device=device)
    results = twin.cat_cast_transpose_dbias(xs, groups, scales, history, 1, dtype)
    return {**named("q q_t scale_inv dbias", results), "amax_history": history}


def cases() -> Iterator[Case]:
    for wide, dtype, groups in product(WIDE, FP8, (1, 3)):
        title = f"{short(wide)} to {short(dtype)}, three parts in {groups} groups"
        yield Case("cat_cast_transpose_dbias", title, partial(_side_by_side, wide, dtype, groups))


def calls(c: Inputs) -> Calls:
    op = twin.cat_cast_transpose_dbias
    for dtype, q, groups in product(WIDE, FP8, (1, 3)):
        xs = [c.x(130, groups * width, dtype=dtype) for width in (32, 16, 16)]
        yield Call(op, (xs, groups, *c.state(), 1, q))
    yield Call(op, ([c.x(7, 16, start=1), c.x(7, 16)], 1, *c.state(step=2), 2, E4M3))
    yield Call(op, ([c.x(7, 2400)], 1, c.state()[0], None, 0, E4M3))
    yield Call(op, ([c.x(0, 16), c.x(0, 16)], 1, *c.state(), 0, E4M3))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.cat_cast_transpose_dbias, ([c.x(rows, cols), c.x(rows, cols)], 1, *c.state(), 1, E4M3))
