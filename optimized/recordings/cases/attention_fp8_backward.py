"""Calls of `attention_fp8_backward`; `attention_fp8` has its recorded cases."""

import torch

from optimized.recordings.calls import Call, Calls, Inputs
from optimized.recordings.cases import attention_fp8

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    for drawn in attention_fp8.drawn(c):
        yield Call(twin.attention_fp8_backward, drawn.backward())


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.attention_fp8_backward, attention_fp8.of_sizes(c, rows, cols).backward())
