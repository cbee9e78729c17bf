"""Cases of `cast_transpose`, and of it with a gradient's column sums."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import E4M3, E5M2, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, Case, numbers, short
from optimized.recordings.cases.cast import cast, places

twin = torch.ops.twin
_OPS = (twin.cast_transpose, twin.cast_transpose_dbias)


def cases() -> Iterator[Case]:
    for wide, dtype in product(WIDE, FP8):
        for op, rows in product(("cast_transpose", "cast_transpose_dbias"), (1, 7, 130, 2048)):
            run = partial(cast, op, partial(numbers, (rows, 80), wide, 21), dtype, 3.0)
            yield Case(op, f"{short(wide)} to {short(dtype)}, [{rows}, 80]", run, live=rows > 1000)


def calls(c: Inputs) -> Calls:
    for dtype, q, op in product(WIDE, FP8, _OPS):
        for shape in ((1, 16), (130, 272), (128, 256)):
            yield Call(op, (c.x(*shape, dtype=dtype, special=op is _OPS[0]), *c.state(), 1, q))
    for op in _OPS:
        for shape, start in (((1, 16), 0), ((0, 16), 0), ((65, 16), 4)):
            yield Call(op, (c.x(*shape, start=start), *c.state(step=2), 2, E4M3))
    for dtype, q in product(WIDE, FP8):
        for rows, cols in ((150, 272), (384, 256), (70, 16)):
            x = c.x(rows, cols, dtype=dtype, special=True)
            yield Call(twin.cast_transpose, (x, *c.state(), 1, q, *places(c, rows)))


def large(c: Inputs) -> Calls:
    for op in _OPS:
        for rows in (128 * 65535, 128 * 65536):
            yield Call(op, (c.x(rows, 16), *c.state(step=2), 2, E4M3))
        # Three times as many columns as processors.
        yield Call(op, (c.x(64, 128 * 300), c.state()[0], None, 0, E5M2))
    # Blocks that share a multiprocessor: their sums need shared memory, the less the more of them there are.
    for cols in (32 * 132, 32 * 132 + 16, 32 * 132 * 7, 32 * 132 * 14):
        yield Call(twin.cast_transpose_dbias, (c.x(64, cols), *c.state(), 0, E4M3))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for op in _OPS:
        yield Call(op, (c.x(rows, cols), *c.state(), 1, E4M3))
