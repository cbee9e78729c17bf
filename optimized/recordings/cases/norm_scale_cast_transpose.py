"""Calls of `norm_scale_cast_transpose`."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP16, FP32, Call, Calls, Inputs
from reference.ops.norms.norm import KINDS

twin = torch.ops.twin


def _call(
    c: Inputs, kind: str, rows: int, hidden: int, dtype: torch.dtype = BF16, q: torch.dtype = E4M3, start: int = 0
) -> Call:
    weight, bias = (c.x(hidden, dtype=dtype, start=start) for _ in range(2))
    x = c.x(rows, hidden, dtype=dtype, start=start)
    beta = bias if kind == "layernorm" else None
    how = (q, bool(rows % 2), 0.0)
    return Call(twin.norm_scale_cast_transpose, (x, weight, beta, 1e-5, bool(rows % 2), kind, *how))


def calls(c: Inputs) -> Calls:
    for kind, dtype, q in product(KINDS, (BF16, FP16, FP32), (E4M3, E5M2)):
        yield _call(c, kind, 65, 80, dtype, q)
    for kind, hidden in product(KINDS, (208, 1024, 1040, 2064, 4096, 5120, 8192, 16384, 16400)):
        yield _call(c, kind, 17 if hidden < 9000 else 3, hidden, FP16 if hidden == 4096 else BF16)
    for rows in (0, 1, 64):
        yield _call(c, "layernorm", rows, 64)
    yield _call(c, "layernorm", 4, 64, start=1)


def large(c: Inputs) -> Calls:
    for kind, hidden in product(KINDS, (1024, 4096, 16384)):
        yield _call(c, kind, 9000, hidden)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for kind, dtype in product(KINDS, (BF16, FP32)):
        yield _call(c, kind, rows, cols, dtype)
