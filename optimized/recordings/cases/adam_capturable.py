"""Calls of `adam_capturable` and `adam_control`: Adam whose step and rate are on the device."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE
from optimized.recordings.cases.adam import SHAPES

twin = torch.ops.twin


def _control(c: Inputs, skipped: bool = False) -> torch.Tensor:
    """What `adam_control` tells a step; a skipped one does nothing."""
    step, rate = c.zeros(1, dtype=torch.int32), c.positive(1) / 100
    found = c.zeros(1) + 1 if skipped else None
    return torch.ops.twin.adam_control(step, rate, c.one(), found, 0.9, 0.999, True)  # type: ignore[no-any-return]


def _step(
    c: Inputs,
    shapes: tuple[tuple[int, ...], ...],
    wide: torch.dtype,
    master: bool,
    moment: torch.dtype,
    unscale: bool,
    skipped: bool = False,
) -> Call:
    def of(kind: torch.dtype, positive: bool = False) -> list[torch.Tensor]:
        return [(c.positive if positive else c.x)(*shape, dtype=kind) for shape in shapes]

    given = (of(wide), of(FP32 if master else wide), of(moment), of(moment, True), of(wide) if master else [])
    rest = (_control(c, skipped), 0.9, 0.999, 1e-8, 0.1, not unscale, unscale)
    return Call(twin.adam_capturable, (*given, *rest))


def calls(c: Inputs) -> Calls:
    for which, corrected in (("", True), ("scale", False), ("found", True), ("scale, found", True)):
        scale, found = c.one() if "scale" in which else None, c.zeros(1) if "found" in which else None
        step, rate = c.integers(1, below=100, dtype=torch.int32), c.positive(1)
        yield Call(twin.adam_control, (step, rate, scale, found, 0.9, 0.999, corrected))
    yield Call(twin.adam_control, (c.zeros(1, dtype=torch.int32), c.one(), None, c.zeros(1) + 1, 0.9, 0.999, True))
    for wide, master, moment, unscale in product(WIDE, (False, True), (FP32, BF16), (False, True)):
        if not (master and wide == FP32):
            yield _step(c, ((2100,), (8,)), wide, master, moment, unscale)
    yield _step(c, ((30, 7),), BF16, True, FP32, True, skipped=True)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.adam_control, (c.zeros(1, dtype=torch.int32), c.one(), c.one(), c.zeros(1), 0.9, 0.99, True))
    for shape in (*SHAPES, (rows, cols)):
        yield _step(c, (shape,), BF16, False, FP32, False)
