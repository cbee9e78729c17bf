"""Cases of `norm`, with its scale too, and of its backward; those of `twin parity` have the cast to FP8, too."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP16, FP32, Call, Calls, Inputs, ahead
from optimized.recordings.case import FP8, WIDE, Case, Outputs, named, numbers, short, state
from reference.numbers import philox
from reference.ops.norms.norm import KINDS

twin = torch.ops.twin
EPSILON = 1e-5


def _norm(shape: tuple[int, int], dtype: torch.dtype, kind: str, device: torch.device) -> Outputs:
    """Forward, backward with and without the residual's gradient, and the FP8 cast where the width allows it."""
    x, grad, residual = (numbers(shape, dtype, 101 + n).to(device) for n in range(3))
    zero_centered = shape[0] % 2 == 0
    weight, bias = (philox.normal((shape[1],), 1.0 - n, 0.3, seed=104 + n).to(dtype).to(device) for n in range(2))
    beta = bias if kind == "layernorm" else None
    y, mean, rstd = twin.norm(x, weight, beta, EPSILON, zero_centered, kind, dtype)
    found = named("y mean rstd", (y, mean, rstd))
    for name, extra in (("", None), (" + residual", residual)):
        results = twin.norm_backward(grad, x, weight, mean, rstd, zero_centered, kind, extra)
        found |= named(f"dx{name} dweight{name} dbias{name}".replace(" + ", "+"), results)
    if shape[1] % 16 == 0:
        for target in FP8:
            scales, history = state(device)
            cast = twin.norm_cast_transpose(x, weight, beta, EPSILON, zero_centered, kind, scales, history, 1, target)
            found |= named(" ".join(f"{n}.{short(target)}" for n in ("q", "q_t", "scale_inv", "m", "r")), cast)
            found[f"amax.{short(target)}"] = history
    return found


def cases() -> Iterator[Case]:
    """Norms: forward, backward, and forward to FP8."""
    for kind, dtype in product(KINDS, WIDE):
        for shape in ((1, 16), (7, 80), (34, 201), (66, 1040), (5, 4096), (1000, 2048)):
            size = "x".join(map(str, shape))
            yield Case(kind, f"{short(dtype)} {size}", partial(_norm, shape, dtype, kind), live=shape[0] > 500)


def _both(
    c: Inputs,
    kind: str,
    rows: int,
    hidden: int,
    dtype: torch.dtype = BF16,
    out: torch.dtype | None = None,
    zero_centered: bool = False,
    starts: int = 0,
) -> Calls:
    """Forward and backward; `starts`: bits, which of x, weight, bias, gradient and residual begin off 16 bytes."""
    weights = dtype if out is None else FP32
    (x, grad, residual), (weight, bias) = (
        [c.x(*shape, dtype=one, start=starts >> i & 1) for i in which]
        for shape, one, which in (((rows, hidden), dtype, (0, 3, 4)), ((hidden,), weights, (1, 2)))
    )
    forward = (x, weight, bias if kind == "layernorm" else None, EPSILON, zero_centered, kind, out or dtype)
    yield Call(twin.norm, forward)
    yield Call(twin.norm_scale, (*forward, E5M2 if zero_centered else E4M3, zero_centered, 0.0))
    _, mean, rstd = twin.norm(*forward)
    rest = (zero_centered, kind, residual if zero_centered else None)
    yield Call(twin.norm_backward, (grad, x, weight, mean, rstd, *rest))


def _parts(c: Inputs) -> Calls:
    """Some of the rows: blocks that are full and one that is not, rows of each kernel; sums of as many blocks."""
    for kind, dtype, hidden, (rows, count) in product(
        KINDS, (BF16, FP32), (33, 1024, 4096, 16384), ((24, 8), (21, 2), (5, 5), (0, 3))
    ):
        x, weight = c.x(rows, hidden, dtype=dtype), c.x(hidden, dtype=dtype)
        mean, rstd = c.x(rows if kind == "layernorm" else 0, dtype=FP32), c.positive(rows)
        rest = (count == 8, kind, x if count == 2 else None, count)
        yield Call(twin.norm_backward_part, (c.x(rows, hidden, dtype=dtype), x, weight, mean, rstd, *rest))
    for blocks, hidden, dtype in product((0, 1, 37, 256), (33, 1024), WIDE):
        yield Call(twin.norm_total, (c.x(blocks, hidden, dtype=FP32), dtype))


def calls(c: Inputs) -> Calls:
    """Rows of every width at which another kernel begins."""
    yield from _parts(c)
    for kind, dtype in product(KINDS, WIDE):
        for hidden in (
            (1024, 3080) if dtype == FP16 else (16, 201, 1024, 1032, 2064, 3080, 4080, 5104, 6128, 8192, 12272)
        ):
            yield from _both(c, kind, 7, hidden, dtype, zero_centered=hidden in (1024, 6128))
        if dtype != FP16:
            for hidden in (16384, 16392):
                yield from _both(c, kind, 3, hidden, dtype)
    for kind, rows, hidden in product(KINDS, (0, 1, 4, 35), (33, 1024)):
        yield from _both(c, kind, rows, hidden)
    yield from _both(c, "rmsnorm", 700, 33)
    for i in range(5):
        yield from _both(c, "layernorm", 3, 64, zero_centered=True, starts=1 << i)
    for out in WIDE:
        yield from _both(c, "rmsnorm", 5, 64, out=out)
    yield Call(twin.norm, (c.x(2, 4096), c.x(4096), None, 1e-5, False, "rmsnorm", BF16), ahead(twin.norm))


def large(c: Inputs) -> Calls:
    """As many rows as fill the GPU once, a few more or less, and many."""
    for rows in (264 * 4, 132 * 6 * 4, 132 * 6 * 4 + 1, 132 * 6 * 8 - 30, 132 * 6 * 8 - 900, 20000):
        yield from _both(c, "layernorm", rows, 1024)
    for rows, hidden in ((3000, 5000), (3000, 6016)):
        yield from _both(c, "rmsnorm", rows, hidden)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for kind, dtype in product(KINDS, (BF16, FP32)):
        x, weight = c.x(rows, cols, dtype=dtype), c.x(cols, dtype=dtype)
        bias, means = (weight, rows) if kind == "layernorm" else (None, 0)
        yield Call(twin.norm, (x, weight, bias, EPSILON, False, kind, dtype))
        yield Call(twin.norm_scale, (x, weight, bias, EPSILON, False, kind, dtype, E4M3, False, 0.0))
        saved = c.x(means, dtype=FP32), c.positive(rows)
        yield Call(twin.norm_backward, (x, x, weight, *saved, False, kind, None))
        yield Call(twin.norm_backward_part, (x, x, weight, *saved, False, kind, None, max(1, rows)))
        yield Call(twin.norm_total, (c.x(min(rows, 256), cols, dtype=FP32), dtype))
