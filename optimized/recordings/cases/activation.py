"""Cases of `activation` and of its backward, and of both with the cast to FP8 or with the scale for one."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, Case, Outputs, every_word, named, numbers, short, state
from reference.ops.activations.activation import GATED, KINDS, RECORDED

twin = torch.ops.twin


def _words_through(dtype: torch.dtype, kind: str, device: torch.device) -> Outputs:
    """An activation and its derivative, of all words of a 16-bit dtype."""
    x = every_word(dtype).to(device)
    if kind in GATED:  # the half that is activated has every word
        x = torch.cat([x, numbers((256, 256), dtype, 111).to(device)], 1)
    grad = numbers((256, 256), dtype, 112).to(device)
    return {"y": twin.activation(x, kind), "dx": twin.activation_backward(grad, x, kind)}


def _activation_cast(shape: tuple[int, int], dtype: torch.dtype, kind: str, device: torch.device) -> Outputs:
    rows, width = shape
    x = numbers((rows, 2 * width if kind in GATED else width), dtype, 121).to(device)
    grad = numbers(shape, dtype, 122).to(device)
    found: Outputs = {}
    for target in FP8:
        scales, history = state(device)
        label = short(target)
        forward = twin.activation_cast_transpose(x, kind, scales, history, 1, target)
        backward = twin.activation_backward_cast_transpose_dbias(grad, x, kind, scales, history, 1, target)
        found |= named(f"q.{label} q_t.{label} scale_inv.{label}", forward)
        found |= named(f"dq.{label} dq_t.{label} dscale_inv.{label} dbias.{label}", backward)
        found[f"amax.{label}"] = history
    return found


def cases() -> Iterator[Case]:
    """Activations of every word, and activations with the FP8 cast, forward and backward."""
    for kind, dtype in product(RECORDED, WIDE):
        yield Case(f"{kind}", f"{short(dtype)}, 65,536 words", partial(_words_through, dtype, kind))
        for shape in ((1, 16), (37, 80), (130, 144), (1000, 2048)):
            size = "x".join(map(str, shape))
            run = partial(_activation_cast, shape, dtype, kind)
            yield Case(f"{kind} to FP8", f"{short(dtype)} {size}", run, live=shape[0] > 500)


def _pair(
    c: Inputs, kind: str, rows: int, cols: int, dtype: torch.dtype = BF16, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient, and the numbers that are activated."""
    x = c.x(rows, cols * (2 if kind in GATED else 1), dtype=dtype, start=start)
    return c.x(rows, cols, dtype=dtype), x


def _plain(c: Inputs, kind: str, rows: int, cols: int, dtype: torch.dtype = BF16, start: int = 0) -> Calls:
    grad, x = _pair(c, kind, rows, cols, dtype, start)
    yield Call(twin.activation, (x, kind))
    yield Call(twin.activation_scale, (x, kind, E4M3, False, 0.0))
    yield Call(twin.activation_backward, (grad, x, kind))
    yield Call(twin.activation_backward_scale, (grad, x, kind, E5M2, False, 0.0))


def _casts(c: Inputs, kind: str, rows: int, cols: int, dtype: torch.dtype, q: torch.dtype, start: int = 0) -> Calls:
    grad, x = _pair(c, kind, rows, cols, dtype, start)
    yield Call(twin.activation_cast_transpose, (x, kind, *c.state(), 1, q))
    yield Call(twin.activation_scale_cast_transpose, (x, kind, q, False, 0.0))
    yield Call(twin.activation_backward_cast_transpose_dbias, (grad, x, kind, *c.state(step=2), 2, q))


def calls(c: Inputs) -> Calls:
    for kind, dtype in product(KINDS, WIDE):
        for cols in (48, 51):
            yield from _plain(c, kind, 9, cols, dtype)
        for q in FP8 if kind in RECORDED else FP8[:1]:
            yield from _casts(c, kind, 130, 144, dtype, q)
    for kind, rows, cols, start in (("gelu", 0, 16, 0), ("gelu", 1, 16, 0), ("relu", 3, 16, 1), ("swiglu", 3, 2064, 1)):
        yield from _plain(c, kind, rows, cols, start=start)
        yield from _casts(c, kind, rows, cols, BF16, E4M3, start)
    yield from _casts(c, "srelu", 128, 256, BF16, E5M2)  # whole tiles
    x = c.x(3, 16, start=1)
    yield Call(twin.activation_backward, (x, c.x(3, 16), "relu"))
    yield Call(twin.activation_backward_cast_transpose_dbias, (x, c.x(3, 16), "relu", *c.state(), 0, E5M2))
    yield Call(twin.activation_cast_transpose, (c.x(3, 32), "swiglu", c.state()[0], None, 0, E4M3))


def large(c: Inputs) -> Calls:
    yield from _plain(c, "swiglu", 65536 * 64, 16)
    yield from _casts(c, "swiglu", 65536 * 64, 16, BF16, E4M3)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for kind, dtype in product(("gelu", "swiglu"), (BF16, FP32)):
        yield from _plain(c, kind, rows, cols, dtype)
        yield from _casts(c, kind, rows, cols, dtype, E4M3)
