"""Calls of cross-entropy: rows, their mean, and the backward."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE

twin = torch.ops.twin
IGNORED = -100


def _target(c: Inputs, rows: int, classes: int, ignored: int = 1) -> torch.Tensor:
    """Classes; the first rows are ignored."""
    target = c.integers(rows, below=classes)
    target[:ignored] = IGNORED
    return target


def _calls(c: Inputs, rows: int, cols: int, dtype: torch.dtype = BF16, smoothing: float = 0.0, start: int = 0) -> Calls:
    """The rows, their mean, and both forms of the gradient: of a mean, and of each row."""
    x, target = c.normal(rows, cols, dtype=dtype, start=start), _target(c, rows, cols)
    yield Call(twin.cross_entropy, (x, target, IGNORED, smoothing))
    loss, *stats = twin.cross_entropy(x, target, IGNORED, smoothing)
    yield Call(twin.cross_entropy_mean, (loss, target, IGNORED, "mean_or_zero"))
    _, divisor = twin.cross_entropy_mean(loss, target, IGNORED, "mean_or_zero")
    for grad, divided in ((c.positive(), divisor), (c.normal(rows, dtype=FP32), None)):
        yield Call(twin.cross_entropy_backward, (grad, divided, x, target, *stats, IGNORED, smoothing))


def calls(c: Inputs) -> Calls:
    for (rows, cols), dtype, smoothing in product(
        ((1, 1), (3, 250), (5, 2056), (4, 8193), (3, 16400)), WIDE, (0.0, 0.1)
    ):
        yield from _calls(c, rows, cols, dtype, smoothing)
    for rows, cols, start in ((7, 64, 1), (7, 64, 8), (0, 64, 0), (3, 2056, 1)):
        yield from _calls(c, rows, cols, start=start)
    for kind, rows in product(("sum", "mean", "mean_or_zero"), (5, 1100)):
        yield Call(twin.cross_entropy_mean, (c.normal(rows, dtype=FP32), _target(c, rows, 9), 7, kind))
    yield Call(twin.cross_entropy_mean, (c.normal(0, dtype=FP32), _target(c, 0, 9), 7, "sum"))
    yield from _calls(c, 2, 50304)


def large(c: Inputs) -> Calls:
    for cols, smoothing in ((50304, 0.25), (50257, 0.0), (128256, 0.0)):
        yield from _calls(c, 33, cols, smoothing=smoothing)
    yield from _calls(c, 70000, 1024)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for dtype, smoothing in product((BF16, FP32), (0.0, 0.5, 1.0)):
        x, loss = c.normal(rows, cols, dtype=dtype), c.positive(rows)
        for target in (_target(c, rows, cols), _target(c, rows, cols, rows)):
            yield Call(twin.cross_entropy, (x, target, IGNORED, smoothing))
            for kind in ("sum", "mean_or_zero"):
                yield Call(twin.cross_entropy_mean, (loss * (target != IGNORED), target, IGNORED, kind))
        # All of them are ignored, so the divisor of their mean is 0.
        one = c.positive()
        for divisor, grad in ((one - one, one), (one - one, -one), (one, -one)):
            given = (grad, divisor, x, _target(c, rows, cols, rows), loss, loss, IGNORED, smoothing)
            yield Call(twin.cross_entropy_backward, given)
