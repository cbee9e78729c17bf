"""Calls of `embedding` and of its backward."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE

twin = torch.ops.twin


def _calls(
    c: Inputs, rows: int, width: int, count: int, dtype: torch.dtype = BF16, padding: int = -1, start: int = 0
) -> Calls:
    """Half of the numbers are 0."""
    ids = c.integers(count, below=rows)
    ids[: count // 2] = 0
    yield Call(twin.embedding, (c.x(rows, width, dtype=dtype, start=start), ids))
    yield Call(twin.embedding_backward, (c.x(count, width, dtype=dtype, start=start), ids, rows, padding))


def calls(c: Inputs) -> Calls:
    for dtype, (rows, width), count in product(WIDE, ((1, 1), (7, 264), (500, 1100)), (1, 65, 300)):
        yield from _calls(c, rows, width, count, dtype, padding=-1 if count == 65 else 0)
    for count in (0, 63, 64):
        yield from _calls(c, 9, 64, count, padding=3)
    for sizes in ((0, 64, 0), (9, 0, 5)):
        yield from _calls(c, *sizes)
    for start in (1, 8):
        yield from _calls(c, 9, 64, 100, start=start)


def large(c: Inputs) -> Calls:
    yield from _calls(c, 128256, 4096, 8192)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for dtype, count in product((BF16, FP32), (0, 2 * rows)):
        yield from _calls(c, rows, cols, count, dtype)
