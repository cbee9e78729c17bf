"""Calls of `attention_sink_backward`, the gradient of sinks."""

import torch

from optimized.recordings.calls import BF16, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.cases import attention

twin = torch.ops.twin


def _call(c: Inputs, b: int, h: int, sq: int, d: int, dtype: torch.dtype = BF16) -> Call:
    grad, out = (c.normal(b, h, sq, d, dtype=dtype) for _ in range(2))
    m, inv = c.normal(b, h, sq, dtype=FP32), c.positive(b, h, sq)
    return Call(twin.attention_sink_backward, (grad, out, m, inv, c.normal(h, dtype=FP32)))


def calls(c: Inputs) -> Calls:
    for sizes in ((2, 4, 130, 64), (0, 2, 40, 64), (1, 1, 1, 8)):
        yield _call(c, *sizes)
    yield _call(c, 1, 2, 40, 200, FP16)
    # Seen as [b, h, s, d], as in the layers.
    grad, out = (c.normal(40, 2, 3, 128).permute(1, 2, 0, 3) for _ in range(2))
    m, inv = c.normal(2, 3, 40, dtype=FP32), c.positive(2, 3, 40)
    yield Call(twin.attention_sink_backward, (grad, out, m, inv, c.normal(3, dtype=FP32)))

    # Packed sequences, rows between them.
    grad, out = (c.normal(140, 3, 64) for _ in range(2))
    where = attention.int32(c, 40, 0, 90), attention.int32(c, 1, 41, 45, 140)
    m, inv = c.normal(3, 3, 90, dtype=FP32), c.positive(3, 3, 90)
    yield Call(twin.attention_sink_backward, (grad, out, m, inv, c.normal(3, dtype=FP32), *where))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield _call(c, cols, 2, rows, 16)
