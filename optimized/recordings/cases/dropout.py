"""Cases of bias + dropout + residual, and of the backward."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE, Case, Outputs, numbers, random_state, short
from reference.numbers import philox

twin = torch.ops.twin


def _dropout(dtype: torch.dtype, p: float, parts: str, device: torch.device) -> Outputs:
    """`parts`: bias, residual, and depth of nine entries."""
    x, residual = (numbers((45, 100), dtype, 161 + n).to(device) for n in range(2))
    bias = philox.normal((100,), seed=163).to(dtype).to(device)
    kept = ((torch.arange(9) % 3 > 0) * 1.25).to(device) if "d" in parts else None
    drawn = random_state(device) if p else None
    before = None if drawn is None else drawn.clone()
    out = twin.bias_dropout_add(x, bias if "b" in parts else None, residual if "r" in parts else None, p, drawn, kept)
    found = {"out": out, "dx": twin.dropout_backward(x, p, before, kept)}
    return found if drawn is None else {**found, "rng_state": drawn}


def cases() -> Iterator[Case]:
    for dtype, p, parts in product(WIDE, (0.0, 0.1), ("br", "b", "r", "-", "brd", "d")):
        made = partial(_dropout, dtype, p, parts)
        yield Case("bias_dropout_add", f"{short(dtype)} p={p} {parts}", made, live="d" in parts)


def _calls(
    c: Inputs,
    shape: tuple[int, int],
    p: float,
    dtype: torch.dtype = BF16,
    parts: str = "br",
    starts: tuple[int, ...] = (0, 0, 0),
    entries: int | None = None,
    place: int | None = None,
) -> Calls:
    """`starts`: of x, bias and residual; `entries`: of stochastic depth; `place`: of x in a larger tensor."""
    x, bias, residual = (
        c.x(*one, dtype=dtype, start=start) for one, start in zip((shape, shape[1:], shape), starts, strict=True)
    )
    drawn = c.random_state() if p else None
    if drawn is not None and place is not None:
        drawn = torch.cat([drawn, torch.tensor([place], device=c.device)])
    kept = None if entries is None else c.x(1, entries, dtype=FP32)[0]
    addends = (bias if "b" in parts else None, residual if "r" in parts else None)
    yield Call(twin.bias_dropout_add, (x, *addends, p, drawn, kept))
    yield Call(twin.dropout_backward, (x, p, None if drawn is None else drawn.clone(), kept))


def calls(c: Inputs) -> Calls:
    for dtype, p in product(WIDE, (0.0, 0.1)):
        yield from _calls(c, (45, 100), p, dtype)
        yield from _calls(c, (3, 2056), p, dtype)
        yield from _calls(c, (45, 100), p, dtype, entries=9)
    for shape, p, parts in (
        ((41, 50), 0.5, ""),  # one element more than a block's
        ((41, 50), 0.0, "r"),
        ((41, 50), 1.0, "br"),
        ((0, 50), 0.5, "b"),
        ((3, 7), 0.1, "br"),
    ):
        yield from _calls(c, shape, p, parts=parts)
    for shape, entries in (((41, 50), 41), ((40, 3), 40), ((21, 1), 21), ((21, 1), 1), ((0, 50), 3), ((0, 50), 0)):
        yield from _calls(c, shape, 0.25, parts="r", entries=entries)
    for starts in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        yield from _calls(c, (4, 64), 0.25, starts=starts)
    for dtype in WIDE:
        yield from _calls(c, (45, 100), 0.1, dtype, place=1007)
        yield from _calls(c, (45, 100), 0.1, dtype, entries=9, place=1007)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for dtype, p in product((BF16, FP32), (0.0, 0.5, 1.0)):
        yield from _calls(c, (rows, cols), p, dtype)
