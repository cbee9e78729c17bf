"""Calls of `attention_bias_backward`, the gradient of a bias."""

import torch

from optimized.recordings.calls import Call, Calls, Inputs
from optimized.recordings.cases import attention

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    biased = (drawn for drawn in attention.packed(c) if drawn.options.bias is not None)
    for drawn in (*attention.with_bias(c), *biased, *attention.placed_with_bias(c)):
        yield Call(twin.attention_bias_backward, (*drawn.saved(), *drawn.options))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for drawn in attention.of_sizes(c, rows, cols):
        if drawn.options.bias is not None:
            yield Call(twin.attention_bias_backward, (*drawn.saved(), *drawn.options))
