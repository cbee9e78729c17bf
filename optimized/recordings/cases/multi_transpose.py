"""Calls of `multi_transpose`: several matrices in one launch."""

from collections.abc import Sequence

import torch

from optimized.recordings.calls import E4M3, Call, Calls, Inputs
from optimized.recordings.case import FP8
from reference.ops.casts.cast_transpose import ceil16

twin = torch.ops.twin


def _call(c: Inputs, shapes: Sequence[tuple[int, int]], dtype: torch.dtype = E4M3) -> Call:
    q = [c.codes(*shape, dtype=dtype) for shape in shapes]
    return Call(twin.multi_transpose, (q, [x.new_empty(x.shape[1], x.shape[0]) for x in q]))


def calls(c: Inputs) -> Calls:
    for dtype in FP8:
        yield _call(c, [(16, 16), (272, 144), (0, 16), (512, 128), (16, 400)], dtype)
    yield _call(c, [(16, 32)] * 17)  # one more than a launch takes


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield _call(c, [(ceil16(rows), ceil16(cols))])
