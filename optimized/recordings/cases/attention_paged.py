"""Cases of `attention_paged`: attention of packed queries with keys in pages."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from optimized.recordings.calls import BF16, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.case import HALVES, Case, Outputs, named, short
from optimized.recordings.cases.attention import int32
from reference.numbers import philox

twin = torch.ops.twin


def _of_lengths(page_size: int, dtype: torch.dtype, device: torch.device) -> Outputs:
    """Three sequences, of which two share their first page; one token, a prompt, and what follows on a prompt."""
    h, hkv, d, pages = 4, 2, 64, 2 + 600 // page_size

    def heads(*shape: int, seed: int) -> torch.Tensor:
        return philox.normal((*shape, d), seed=seed).to(dtype).to(device)

    def table(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    q, k, v = heads(50, h, seed=241), heads(pages, page_size, hkv, seed=242), heads(pages, page_size, hkv, seed=243)
    columns = -(-300 // page_size)
    of_pages = torch.stack([(torch.arange(columns) * step) % pages for step in (1, 3, 5)]).int().to(device)
    where = (table(1, 40, 9), table(300, 40, 129), table(0, 1, 41, 50), 40, 300)
    return named(
        "out m inv", twin.attention_paged(q, k, v, of_pages, d**-0.5, "causal_bottom_right", -1, -1, *where, None)
    )


def cases() -> Iterator[Case]:
    for dtype in HALVES:
        for size in (16, 128, 256):
            run = partial(_of_lengths, size, dtype)
            yield Case("attention_paged", f"{short(dtype)}, pages of {size}", run, live=True)  # not recorded yet


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
