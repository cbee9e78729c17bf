"""Cases of `softmax` and of its backward."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import HALVES, WIDE, Case, Outputs, short
from optimized.recordings.cases.attention import hidden_of
from reference.numbers import philox

twin = torch.ops.twin


def _softmax(dtype: torch.dtype, mask_type: str, mask: str, device: torch.device) -> Outputs:
    shape = (2, 3, 40, 150)
    x, grad = (philox.normal(shape, std=4.0 - 3 * n, seed=141 + n).to(dtype).to(device) for n in range(2))
    hidden = hidden_of(mask, *shape)
    y = twin.softmax(x, 0.3, mask_type, None if hidden is None else hidden.to(device))
    return {"y": y, "dx": twin.softmax_backward(grad, y, 0.3)}


def cases() -> Iterator[Case]:
    for dtype, (mask_type, mask) in product(
        HALVES, (("none", ""), ("causal", ""), ("causal_bottom_right", "padding"), ("none", "arbitrary"))
    ):
        yield Case("softmax", f"{short(dtype)} {mask_type} {mask}".strip(), partial(_softmax, dtype, mask_type, mask))


def _backward(c: Inputs, *shape: int, dtype: torch.dtype = BF16, starts: tuple[int, int] = (0, 0)) -> Call:
    grad, x = (c.normal(*shape, dtype=dtype, start=start) for start in starts)
    return Call(twin.softmax_backward, (grad, x, 0.5))


def calls(c: Inputs) -> Calls:
    for dtype, mask_type, shape in product(
        WIDE, ("none", "causal", "causal_bottom_right"), ((), (2, 1, 1, 150), (2, 3, 40, 150))
    ):
        mask = c.mask(*shape) if shape else None
        yield Call(twin.softmax, (c.x(2, 3, 40, 150, dtype=dtype), 0.3, mask_type, mask))
    for dtype, cols in product(WIDE, (7, 256, 257, 512, 520, 1024, 1025, 2048, 2056)):
        yield Call(twin.softmax, (c.x(1, 2, 5, cols, dtype=dtype), 0.5, "none", None))
        yield _backward(c, 1, 2, 5, cols, dtype=dtype)
    yield Call(twin.softmax, (c.x(2, 3, 0, 16), 0.5, "none", None))
    yield _backward(c, 2, 3, 0, 16)
    yield Call(twin.softmax, (c.x(1, 2, 3, 16, start=1), 0.5, "none", c.mask(1, 2, 3, 16)))
    for starts in ((1, 0), (0, 1)):
        yield _backward(c, 1, 2, 3, 16, starts=starts)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for dtype in (BF16, FP32):
        for mask in (None, c.mask(1, 1, rows, cols)):
            yield Call(twin.softmax, (c.x(1, 2, rows, cols, dtype=dtype), 0.5, "none", mask))
        yield _backward(c, 1, 2, rows, cols, dtype=dtype)
