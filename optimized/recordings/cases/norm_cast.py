"""Calls of `norm_cast`: rows of every width at which another kernel begins. `norm_cast_transpose` has its words."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE
from reference.ops.norms.norm import KINDS

twin = torch.ops.twin


def _call(
    c: Inputs,
    kind: str,
    rows: int,
    hidden: int,
    dtype: torch.dtype = BF16,
    q: torch.dtype = E4M3,
    start: int = 0,
    weights: torch.dtype | None = None,
) -> Call:
    weight, bias = (c.x(hidden, dtype=weights or dtype, start=start) for _ in range(2))
    x = c.x(rows, hidden, dtype=dtype, start=start)
    beta = bias if kind == "layernorm" else None
    return Call(twin.norm_cast, (x, weight, beta, 1e-5, bool(rows % 2), kind, *c.state(), 1, q))


def calls(c: Inputs) -> Calls:
    for kind, dtype, q in product(KINDS, WIDE, FP8):
        yield _call(c, kind, 65, 80, dtype, q)
    for kind, dtype in product(KINDS, WIDE):
        for hidden in (1024, 2560) if dtype == FP16 else (208, 1024, 1040, 2064, 3088, 4096, 5120, 6128, 8192, 12272):
            yield _call(c, kind, 17, hidden, dtype)
        if dtype != FP16:
            for hidden in (16384, 16400):
                yield _call(c, kind, 3, hidden, dtype)
    for rows in (0, 1, 64):
        yield _call(c, "layernorm", rows, 64)
    yield _call(c, "layernorm", 4, 64, start=1)
    yield _call(c, "rmsnorm", 4, 64, weights=FP32)


def large(c: Inputs) -> Calls:
    for kind, dtype, hidden in product(KINDS, WIDE, (1024, 1040, 2560, 4096, 16384, 16400)):
        yield _call(c, kind, 9000, hidden, dtype)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for kind, dtype in product(KINDS, (BF16, FP32)):
        yield _call(c, kind, rows, cols, dtype)
