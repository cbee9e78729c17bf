"""Calls of attention in FP8, whose backward belongs to them; `drawn` is what the calls of both begin with."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from optimized.recordings.calls import BF16, E4M3, FP16, Call, Calls, Inputs
from optimized.recordings.cases.attention import int32

twin = torch.ops.twin


class Drawn(NamedTuple):
    """Arguments of the forward and, with v as it is, of the backward."""

    forward: tuple[Any, ...]
    v: torch.Tensor
    grad: torch.Tensor

    def backward(self) -> tuple[Any, ...]:
        """What the backward is given."""
        q, k, _, *scale_invs = self.forward[:6]
        *rest, state, dtype = self.forward[6:14]
        entries = self.forward[14:]
        copied = None if state is None else state.clone()
        saved = twin.attention_fp8(*self.forward[:6], *rest, copied, dtype, *entries)
        return (self.grad, q, k, self.v, *scale_invs, *saved, *rest, state, *entries)


def _draw(
    c: Inputs,
    sizes: tuple[int, int, int, int, int, int],
    dtype: torch.dtype = BF16,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    room: int = 0,
    mask_type: str = "causal",
    left: int = 200,
    place: tuple[int, ...] = (),
) -> Drawn:
    """Codes `[s, b, h, d]` seen as `[b, h, s, d]`, as in the layers; `room`: bytes of a row of v_t.

    `place`: of these heads among more, in which dropout draws.
    """
    b, h, heads, sq, skv, d = sizes

    def of(n: int, s: int) -> torch.Tensor:
        return c.codes(s, b, n, d).permute(1, 2, 0, 3)

    q, k, v = of(h, sq), of(heads, skv), of(heads, skv)
    v_t = c.zeros(b, heads, d, room or -(-skv // 16) * 16, dtype=torch.uint8)
    v_t[..., :skv] = v.view(torch.uint8).transpose(2, 3)
    scale_invs = [c.positive(1) / 100 for _ in range(3)]
    state = c.random_state() if dropout else None
    if state is not None and place:
        state = torch.cat([state, torch.tensor(place, device=c.device)])
    rest = (0.125, mask_type, left, -1, mask, dropout, state, dtype)
    grad = c.normal(sq, b, h, d, dtype=dtype).permute(1, 2, 0, 3)
    return Drawn((q, k, v_t[..., :skv].view(E4M3), *scale_invs, *rest), v, grad)


def _with_lengths(c: Inputs) -> Iterator[Drawn]:
    """Entries with lengths, padded."""
    for d, dropout in ((64, 0.1), (128, 0.0), (256, 0.0)):
        one = _draw(c, (2, 4, 2, 130, 160, d), dropout=dropout, mask_type="causal_bottom_right", left=-1)
        yield one._replace(forward=(*one.forward, int32(c, 130, 7), int32(c, 150, 160)))


def _packed(c: Inputs) -> Iterator[Drawn]:
    """Sequences one after the other, with rows between them, and with none; keys begin at every remainder of 4."""
    for d, dropout, room in ((64, 0.0, True), (128, 0.1, True), (256, 0.0, True), (48, 0.1, False)):
        lengths = (int32(c, 130, 0, 5, 1), int32(c, 20, 70, 141, 3))
        places = (*lengths, int32(c, 0, 130, 131, 136, 138), int32(c, 2, 23, 100, 245, 250), 130, 141)
        memory = c.codes(253, 2, d)  # of keys, with room for three more rows
        k = memory[:250] if room else memory[:250].clone()
        q, v = c.codes(139, 4, d), c.codes(250, 2, d)
        v_t = c.zeros(2, d, 256, dtype=torch.uint8)
        v_t[..., :250] = v.view(torch.uint8).permute(1, 2, 0)
        state = c.random_state() if dropout else None
        rest = (0.125, "causal_bottom_right", -1, -1, None, dropout, state, BF16)
        scale_invs = [c.positive(1) / 100 for _ in range(3)]
        forward = (q, k, v_t[..., :250].view(E4M3), *scale_invs, *rest, *places)
        yield Drawn(forward, v, c.normal(139, 4, d, dtype=BF16))


def drawn(c: Inputs) -> Iterator[Drawn]:
    yield _draw(c, (2, 4, 2, 130, 152, 64))
    yield _draw(c, (1, 2, 2, 128, 129, 80), FP16, dropout=0.1)  # 129 keys: a copy with room for 132
    yield _draw(c, (2, 2, 1, 40, 72, 256), mask=c.mask(2, 1, 1, 72))
    yield _draw(c, (2, 2, 2, 40, 0, 32), dropout=0.1)
    yield _draw(c, (2, 2, 2, 40, 72, 32), room=75)  # rows of values off 16 bytes: a copy
    for d, dropout in product((32, 64, 128, 208, 256), (0.0, 0.1)):
        for sq, skv in ((1, 16), (130, 208)):
            yield _draw(c, (1, 2, 1, sq, skv, d), dropout=dropout, mask_type="none" if dropout else "causal", left=-1)
    yield _draw(c, (7, 20, 10, 33, 48, 32))  # more tiles than a GPU has multiprocessors
    yield _draw(c, (1, 2, 1, 260, 600, 64), left=-1, mask_type="causal_bottom_right")
    for d in (64, 128, 256):
        yield _draw(c, (2, 2, 1, 130, 208, d), dropout=0.4, mask_type="none", left=-1, place=(2, 6, 4))
    yield from _with_lengths(c)
    yield from _packed(c)


def calls(c: Inputs) -> Calls:
    for one in drawn(c):
        yield Call(twin.attention_fp8, one.forward)


def large(c: Inputs) -> Calls:
    yield Call(twin.attention_fp8, _draw(c, (1, 48, 24, 400, 300, 128)).forward)
    yield Call(twin.attention_fp8, _draw(c, (1, 40, 20, 520, 256, 256), dropout=0.1).forward)


def of_sizes(c: Inputs, rows: int, cols: int) -> Drawn:
    """Queries and keys of any number."""
    return _draw(c, (1, 2, 2, rows, cols, 16), mask_type="none", left=-1)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.attention_fp8, of_sizes(c, rows, cols).forward)
