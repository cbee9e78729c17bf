"""Calls of `attention_paged`: attention of packed queries with keys in pages."""

from typing import Any

import torch

from optimized.recordings.calls import BF16, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.cases.attention import int32

twin = torch.ops.twin


def _call(c: Inputs, page_size: int, d: int, dtype: torch.dtype = BF16, e: int = 0, **more: Any) -> Call:
    """A step of one token beside a prompt; pages are in no order."""
    columns = -(-150 // page_size)
    pages = 2 * columns + 1
    k, v = (c.normal(pages, page_size, 2, x, dtype=dtype) for x in (d, e or d))
    order = [(7 * n + 3) % pages for n in range(2 * columns)]
    table = int32(c, *order).view(2, columns)
    window, sinks = more.get("window", (-1, -1)), more.get("sinks")
    q, where = c.normal(42, 4, d, dtype=dtype), (int32(c, 1, 40), int32(c, 150, 129), int32(c, 0, 1, 41), 40, 150)
    return Call(twin.attention_paged, (q, k, v, table, 0.125, "causal_bottom_right", *window, *where, sinks))


def calls(c: Inputs) -> Calls:
    for size in (1, 16, 128, 256):
        yield _call(c, size, 64)
    yield _call(c, 128, 128, FP16, window=(50, 0))
    yield _call(c, 128, 40, sinks=c.normal(4, dtype=FP32))
    yield _call(c, 256, 200)
    q, k, v = c.normal(3, 4, 64), c.normal(11, 128, 2, 64), c.normal(11, 128, 2, 64)  # few queries, many keys
    where = (int32(c, 1, 2), int32(c, 1040, 130), int32(c, 0, 1, 3), 2, 1040)
    table = int32(c, *range(10, -1, -1), *[0] * 7).view(2, 9)
    yield Call(twin.attention_paged, (q, k, v, table, 0.125, "causal_bottom_right", -1, -1, *where, None))
    yield _call(c, 48, 72, e=128)
    for d, steps in ((64, (1, 2)), (64, (1, 40)), (200, (1, 40))):  # a text of two segments
        q, k, v = c.normal(sum(steps), 4, d), c.normal(35, 128, 2, d), c.normal(35, 128, 2, d)
        where = (int32(c, *steps), int32(c, 4200, 130), int32(c, 0, steps[0], sum(steps)), steps[1], 4200)
        table = int32(c, *range(34, 1, -1), *[0] * 33).view(2, 33)
        sinks = c.normal(4, dtype=FP32) if d == 200 else None
        yield Call(twin.attention_paged, (q, k, v, table, 0.125, "causal_bottom_right", -1, -1, *where, sinks, 4096))
    q, page = c.normal(0, 2, 16), c.normal(1, 128, 1, 16)  # nobody is there
    where = (int32(c, 0), int32(c, 0), int32(c, 0, 0), 0, 0)
    yield Call(twin.attention_paged, (q, page, page, int32(c, 0)[None], 0.25, "none", -1, -1, *where, None))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    q, k, v = c.normal(rows, 2, 16), c.normal(1 + cols // 128, 128, 1, 16), c.normal(1 + cols // 128, 128, 1, 16)
    table = torch.arange(1 + cols // 128, dtype=torch.int32, device=c.device)[None]
    where = (int32(c, rows), int32(c, cols), int32(c, 0, rows), rows, cols)
    yield Call(twin.attention_paged, (q, k, v, table, 0.25, "none", -1, -1, *where, None))
