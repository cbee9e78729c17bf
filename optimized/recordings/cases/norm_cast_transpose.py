"""Calls of `norm_cast_transpose`; `norm` has its recorded cases."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from optimized.recordings.calls import BF16, E4M3, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE
from reference.ops.norms.norm import KINDS

twin = torch.ops.twin


def casting(
    c: Inputs,
    op: Callable[..., Any],
    kind: str,
    rows: int,
    hidden: int,
    dtype: torch.dtype = BF16,
    q: torch.dtype = E4M3,
    start: int = 0,
    weights: torch.dtype | None = None,
) -> Call:
    """A call of `op`, which is this one or `norm_cast`."""
    weight, bias = (c.x(hidden, dtype=weights or dtype, start=start) for _ in range(2))
    x = c.x(rows, hidden, dtype=dtype, start=start)
    beta = bias if kind == "layernorm" else None
    return Call(op, (x, weight, beta, 1e-5, bool(rows % 2), kind, *c.state(), 1, q))


def calls(c: Inputs) -> Calls:
    for kind, dtype, q in product(KINDS, WIDE, FP8):
        yield casting(c, twin.norm_cast_transpose, kind, 65, 80, dtype, q)
    for kind, dtype in product(KINDS, WIDE):
        for hidden in (1024, 2560) if dtype == FP16 else (208, 1040, 2064, 4096, 5120, 6144, 8192, 12288):
            yield casting(c, twin.norm_cast_transpose, kind, 17, hidden, dtype)
        if dtype != FP16:
            for hidden in (16384, 16400):
                yield casting(c, twin.norm_cast_transpose, kind, 3, hidden, dtype)
    for rows in (0, 1, 64):
        yield casting(c, twin.norm_cast_transpose, "layernorm", rows, 64)
    yield casting(c, twin.norm_cast_transpose, "layernorm", 4, 64, start=1)
    yield casting(c, twin.norm_cast_transpose, "rmsnorm", 4, 64, weights=FP32)


def large(c: Inputs) -> Calls:
    yield casting(c, twin.norm_cast_transpose, "layernorm", 64 * 132 + 1, 64)  # one tile more than processors
    for kind, dtype, hidden in product(KINDS, WIDE, (1024, 1040, 2560, 4096, 16384, 16400)):
        yield casting(c, twin.norm_cast_transpose, kind, 9000, hidden, dtype)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for kind, dtype in product(KINDS, (BF16, FP32)):
        yield casting(c, twin.norm_cast_transpose, kind, rows, cols, dtype)
