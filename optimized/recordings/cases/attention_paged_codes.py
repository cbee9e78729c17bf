"""Calls of `attention_paged_codes`: attention of packed queries with keys in pages of FP8 codes."""

import torch

from optimized.recordings.calls import FP32, Call, Calls, Inputs
from optimized.recordings.cases.attention import int32

twin = torch.ops.twin
CODES = torch.float8_e4m3fn


def _in_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 `[.., d]` as codes, and a scale of each row."""
    codes, scales = twin.cast_rowwise(x.contiguous().view(-1, x.shape[-1]), CODES, True, 1e-12)
    return codes.view(x.shape), scales.view(x.shape[:-1])


def _call(c: Inputs, page_size: int, lengths: tuple[int, int], keys: tuple[int, int], e: int = 64) -> Call:
    """Two sequences; pages are in no order."""
    columns = -(-max(keys) // page_size)
    pages = 2 * columns + 1
    (k, k_scales), (v, v_scales) = (_in_codes(c.normal(pages, page_size, 2, x)) for x in (64, e))
    table = int32(c, *[(7 * n + 3) % pages for n in range(2 * columns)]).view(2, columns)
    q, starts = c.normal(sum(lengths), 4, 64), int32(c, 0, lengths[0], sum(lengths))
    rest = (table, 0.125, "causal_bottom_right", 70, 0, int32(c, *lengths), int32(c, *keys), starts)
    args = (q, k, v, k_scales, v_scales, *rest, max(lengths), max(keys), c.normal(4, dtype=FP32))
    return Call(twin.attention_paged_codes, args)


def calls(c: Inputs) -> Calls:
    for size, e in ((16, 64), (128, 64), (256, 80)):
        yield _call(c, size, (1, 3), (150, 20), e)
    yield _call(c, 128, (1, 7), (150, 7))
    yield _call(c, 128, (1, 40), (150, 129))
    yield _call(c, 128, (0, 0), (0, 0))
    for steps in ((1, 1), (1, 6), (1, 16), (1, 40)):  # a text of two segments
        one = _call(c, 128, steps, (4200, 4150))
        *first, _, right = one.args[:10]
        yield one._replace(args=(*first, 5000, right, *one.args[10:], 4096))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    columns = 1 + cols // 128
    (k, k_scales), (v, v_scales) = (_in_codes(c.normal(columns, 128, 1, 16)) for _ in range(2))
    table = torch.arange(columns, dtype=torch.int32, device=c.device)[None]
    where = (int32(c, rows), int32(c, cols), int32(c, 0, rows), rows, cols)
    args = (c.normal(rows, 2, 16), k, v, k_scales, v_scales, table, 0.25, "none", -1, -1, *where, None)
    yield Call(twin.attention_paged_codes, args)
