"""Calls of `norm_cast_blocks_transpose`."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE
from reference.ops.casts.cast_blocks import DIALECTS
from reference.ops.norms.norm import KINDS

twin = torch.ops.twin


def _call(
    c: Inputs,
    kind: str,
    rows: int,
    hidden: int,
    dtype: torch.dtype = BF16,
    q: torch.dtype = E4M3,
    dialect: str = "power_of_two",
    start: int = 0,
    weights: torch.dtype | None = None,
    eps: float = 1e-5,
    epsilon: float = 0.0,
) -> Call:
    weight, bias = (c.x(hidden, dtype=weights or dtype, start=start) for _ in range(2))
    x = c.x(rows, hidden, dtype=dtype, start=start, special=rows > 100)
    beta = bias if kind == "layernorm" and rows % 4 else None
    return Call(twin.norm_cast_blocks_transpose, (x, weight, beta, eps, bool(rows % 2), kind, q, dialect, epsilon))


def calls(c: Inputs) -> Calls:
    for kind, dtype, q in product(KINDS, WIDE, FP8):
        yield _call(c, kind, 131, 144, dtype, q)
    for kind, dtype, warps in product(KINDS, WIDE, (1, 2, 3, 4, 5, 6, 8, 12, 16)):
        yield _call(c, kind, 3, 1024 * warps - 16 * (warps % 2), dtype)
    for dialect in DIALECTS:
        yield _call(c, "layernorm", 9, 48, dialect=dialect)
        yield _call(c, "rmsnorm", 9, 48, dialect=dialect, eps=1.0, epsilon=2.0)
    for rows, hidden, start in ((0, 16, 0), (1, 16, 0), (3, 16400, 0), (3, 1040, 1), (128, 256, 0), (57, 80, 0)):
        yield _call(c, "layernorm", rows, hidden, start=start)
    for weights in WIDE:
        yield _call(c, "rmsnorm", 5, 64, weights=weights)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for kind, dtype in product(KINDS, (BF16, FP32)):
        yield _call(c, kind, rows, cols, dtype)
