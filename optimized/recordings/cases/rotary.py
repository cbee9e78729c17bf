"""Cases of `rotary`, which is its own backward."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE, Case, Outputs, short
from reference.numbers import philox

twin = torch.ops.twin


def _rotary(dtype: torch.dtype, interleaved: bool, device: torch.device) -> Outputs:
    x, grad = (philox.normal((33, 2, 3, 48), seed=151 + n).to(dtype).to(device) for n in range(2))
    positions = torch.arange(40.0)[:, None]
    freqs = (positions * philox.uniform((1, 32), seed=153) * 7).to(device)
    return {"y": twin.rotary(x, freqs, interleaved, False), "dx": twin.rotary(grad, freqs, interleaved, True)}


def cases() -> Iterator[Case]:
    for dtype, interleaved in product(WIDE, (False, True)):
        label = f"{short(dtype)}{', interleaved' * interleaved}"
        yield Case("rotary", label, partial(_rotary, dtype, interleaved))


def calls(c: Inputs) -> Calls:
    freqs = c.x(40, 32, dtype=FP32)
    for dtype, interleaved, backward in product(WIDE, (False, True), (False, True)):
        yield Call(twin.rotary, (c.x(33, 2, 3, 48, dtype=dtype), freqs, interleaved, backward))
    for x in (
        c.x(33, 2, 3, 48, start=1),
        c.x(33, 2, 3, 52),  # heads off 16 bytes
        c.x(33, 2, 3, 44)[..., :40],
        c.x(33, 1, 1, 32)[:, :, :, :32].transpose(0, 1),
        c.x(0, 2, 3, 48),
        c.x(33, 2, 9, 48)[:, :, 3:6],
    ):
        yield Call(twin.rotary, (x, freqs, False, False))
    for dtype, (head, turned), interleaved in product(
        WIDE, ((48, 24), (64, 64), (64, 32), (10, 6), (4096, 4096)), (False, True)
    ):
        given = c.x(5, 2, 3 if head < 99 else 1, head, dtype=dtype), c.x(5, turned, dtype=FP32)
        yield Call(twin.rotary, (*given, interleaved, False))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.rotary, (c.x(rows, 1, 2, cols), c.x(rows, cols, dtype=FP32), False, False))
