"""Calls of `rotary_append`: one token of each sequence, or several; its words are those of `rotary`."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE
from optimized.recordings.cases.attention import int32

twin = torch.ops.twin


def _call(
    c: Inputs,
    t: int,
    groups: int,
    together: int,
    d: int,
    e: int,
    d2: int,
    dtype: torch.dtype = BF16,
    interleaved: bool = False,
    joined: bool = True,
) -> Call:
    """q, k and v are views of a projection, group by group, or each has memory of its own."""
    if joined and d == e:
        mixed = c.x(t, groups, together + 2, d, dtype=dtype)
        q, k, v = mixed[:, :, :together], mixed[:, :, together], mixed[:, :, together + 1]
    else:
        q, k, v = (c.x(*shape, dtype=dtype) for shape in ((t, groups, together, d), (t, groups, d), (t, groups, e)))
    pages, size = 1 + t, 16
    freqs, keys, values = c.x(40, d2, dtype=FP32), *(c.x(pages, size, groups, x, dtype=dtype) for x in (d, e))
    positions = int32(c, *((11 * n + 39) % 40 for n in range(t)))
    rows = int32(c, *((37 * n + 5) % (pages * size) for n in range(t))).long()
    return Call(twin.rotary_append, (q, k, v, freqs, positions, rows, keys, values, interleaved))


def calls(c: Inputs) -> Calls:
    for dtype, interleaved in product(WIDE, (False, True)):
        yield _call(c, 3, 2, 4, 64, 64, 64, dtype, interleaved)
        yield _call(c, 2, 2, 3, 48, 40, 24, dtype, interleaved)
    yield _call(c, 1, 8, 4, 128, 128, 128)
    yield _call(c, 1, 1, 1, 10, 6, 6, joined=False)
    yield _call(c, 2, 2, 1, 256, 256, 64)
    for t, groups in ((0, 2), (2, 0)):
        yield _call(c, t, groups, 2, 16, 16, 16)


def large(c: Inputs) -> Calls:
    yield _call(c, 2000, 8, 4, 128, 128, 128)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield _call(c, rows, 1, 2, cols, cols, cols)
