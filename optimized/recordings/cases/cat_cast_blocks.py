"""Cases of `cat_cast_blocks_transpose_dbias`: gradients side by side, cast in blocks."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, Case, Outputs, named, numbers, short
from reference.ops.casts.cast_blocks import DIALECTS

twin = torch.ops.twin


def _side_by_side(
    widths: tuple[int, ...], wide: torch.dtype, dtype: torch.dtype, groups: int, device: torch.device
) -> Outputs:
    xs = [numbers((300, groups * width), wide, 31 + i).to(device) for i, width in enumerate(widths)]
    found = twin.cat_cast_blocks_transpose_dbias(xs, groups, dtype, "power_of_two", 0.0)
    return named("codes codes_t scale_inv scale_inv_t dbias", found)


def cases() -> Iterator[Case]:
    for wide, dtype, groups, widths in product(WIDE, FP8, (1, 3), ((272,), (64, 24, 24))):
        title = f"{short(wide)} to {short(dtype)}, {len(widths)} parts in {groups} groups"
        run = partial(_side_by_side, widths, wide, dtype, groups)
        yield Case("cat_cast_blocks_transpose_dbias", title, run, live=True)


def calls(c: Inputs) -> Calls:
    op = twin.cat_cast_blocks_transpose_dbias
    for dtype, q, groups in product(WIDE, FP8, (1, 3)):
        xs = [c.x(130, groups * width, dtype=dtype, special=True) for width in (32, 16, 16)]
        yield Call(op, (xs, groups, q, "power_of_two", 0.0))
    for dialect in DIALECTS:
        yield Call(op, ([c.x(65, 144, dtype=BF16)], 1, E5M2, dialect, 1e-4))
    yield Call(op, ([c.x(7, 16, start=1), c.x(7, 16)], 1, E4M3, "power_of_two", 0.0))
    yield Call(op, ([c.x(129, 2400)], 1, E4M3, "fp32", 0.0))
    yield Call(op, ([c.x(0, 16), c.x(0, 16)], 1, E4M3, "power_of_two", 0.0))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    op = twin.cat_cast_blocks_transpose_dbias
    yield Call(op, ([c.x(rows, cols), c.x(rows, cols)], 1, E4M3, "power_of_two", 0.0))
