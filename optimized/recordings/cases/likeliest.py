"""Cases of `likeliest`: the first largest logit and its loss."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE, Case, Outputs, numbers, short

twin = torch.ops.twin


def _likeliest(dtype: torch.dtype, tokens: int, device: torch.device) -> Outputs:
    token, loss = twin.likeliest(numbers((20, tokens), dtype, 253).to(device))
    return {"token": token, "loss": loss}


def cases() -> Iterator[Case]:
    for dtype, tokens in product(WIDE, (257, 50304)):
        run = partial(_likeliest, dtype, tokens)
        yield Case("likeliest", f"{short(dtype)}, {tokens} tokens", run, live=True)  # not recorded yet


def calls(c: Inputs) -> Calls:
    for dtype, cols, special in product(WIDE, (1, 33, 2056), (False, True)):
        yield Call(twin.likeliest, (c.x(5, cols, dtype=dtype, special=special),))
    yield Call(twin.likeliest, (c.x(3, 64, start=1),))
    yield Call(twin.likeliest, (c.x(0, 64),))
    equal = c.zeros(4, 70)
    for value in (0.0, -torch.inf, torch.inf, torch.nan):
        yield Call(twin.likeliest, (equal + value,))


def large(c: Inputs) -> Calls:
    yield Call(twin.likeliest, (c.x(70000, 8),))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for dtype in (BF16, FP32):
        yield Call(twin.likeliest, (c.x(rows, cols, dtype=dtype),))
