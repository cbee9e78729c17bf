"""Calls of `activation_cast_blocks_transpose` and of its backward."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE
from reference.ops.activations.activation import GATED, KINDS, RECORDED
from reference.ops.casts.cast_blocks import DIALECTS

twin = torch.ops.twin


def _pair(
    c: Inputs, kind: str, rows: int, cols: int, dtype: torch.dtype, q: torch.dtype, dialect: str, start: int = 0
) -> Calls:
    x = c.x(rows, cols * (2 if kind in GATED else 1), dtype=dtype, start=start, special=rows > 100)
    yield Call(twin.activation_cast_blocks_transpose, (x, kind, q, dialect, 0.0))
    yield Call(
        twin.activation_backward_cast_blocks_transpose_dbias, (c.x(rows, cols, dtype=dtype), x, kind, q, dialect, 0.0)
    )


def calls(c: Inputs) -> Calls:
    for kind, dtype in product(KINDS, WIDE):
        for q in FP8 if kind in RECORDED else FP8[:1]:
            yield from _pair(c, kind, 130, 144, dtype, q, "power_of_two")
    for dialect in DIALECTS:
        yield from _pair(c, "geglu", 9, 48, BF16, E4M3, dialect)
    for kind, rows, cols, start in (("gelu", 0, 16, 0), ("gelu", 1, 16, 0), ("relu", 3, 16, 1), ("swiglu", 3, 1040, 1)):
        yield from _pair(c, kind, rows, cols, BF16, E4M3, "power_of_two", start)
    yield from _pair(c, "srelu", 128, 256, BF16, E5M2, "power_of_two")  # whole tiles
    yield Call(
        twin.activation_backward_cast_blocks_transpose_dbias,
        (c.x(3, 8), c.x(3, 16), "swiglu", E4M3, "power_of_two", 0.0),
    )  # halves of half a tile's step


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for kind, dtype in product(("gelu", "swiglu"), (BF16, FP32)):
        yield from _pair(c, kind, rows, cols, dtype, E4M3, "power_of_two")
