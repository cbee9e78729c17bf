"""Calls of `attention_backward`; `attention` has its recorded cases."""

import torch

from optimized.recordings.calls import Call, Calls, Inputs
from optimized.recordings.cases import attention

twin = torch.ops.twin


def _backward(drawn: attention.Drawn) -> Call:
    return Call(twin.attention_backward, (*drawn.saved(), *drawn.options))


def calls(c: Inputs) -> Calls:
    a = attention
    for drawn in (*a.plain(c), *a.with_bias(c), *a.with_more(c), *a.packed(c), *a.placed(c)):
        yield _backward(drawn)


def large(c: Inputs) -> Calls:
    for drawn in attention.larger(c):
        yield _backward(drawn)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for drawn in attention.of_sizes(c, rows, cols):
        yield _backward(drawn)
