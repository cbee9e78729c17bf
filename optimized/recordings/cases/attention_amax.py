"""Calls of `attention_amax` and `attention_backward_amax`: those of `attention` and `attention_backward`."""

import torch

from optimized.recordings.calls import Call, Calls, Inputs
from optimized.recordings.cases import attention

twin = torch.ops.twin


def _both(drawn: attention.Drawn) -> Calls:
    yield Call(twin.attention_amax, (drawn.q, drawn.k, drawn.v, *drawn.options))
    yield Call(twin.attention_backward_amax, (*drawn.saved(), *drawn.options))


def calls(c: Inputs) -> Calls:
    a = attention
    others = (a.with_bias, a.with_more, a.packed, a.placed, a.many_keys, a.segmented)
    for drawn in (*a.plain(c), *(next(several(c)) for several in others)):  # of what is read for it, one each
        yield from _both(drawn)
    for factor in (0.0, torch.inf, torch.nan):
        drawn = next(a.plain(c))
        yield from _both(drawn._replace(v=drawn.v * factor))


def large(c: Inputs) -> Calls:
    for drawn in attention.larger(c):
        yield from _both(drawn)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for drawn in attention.of_sizes(c, rows, cols):
        yield from _both(drawn)
