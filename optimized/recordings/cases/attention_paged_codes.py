"""Cases of `attention_paged_codes`: attention of packed queries with keys in pages of FP8 codes."""

from collections.abc import Iterator
from functools import partial

import torch

from optimized.recordings.calls import FP32, Call, Calls, Inputs
from optimized.recordings.case import Case, Outputs, named
from optimized.recordings.cases.attention import int32
from reference.numbers import philox

twin = torch.ops.twin
CODES = torch.float8_e4m3fn


def _in_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 `[.., d]` as codes, and a scale of each row."""
    codes, scales = twin.cast_rowwise(x.contiguous().view(-1, x.shape[-1]), CODES, True, 1e-12)
    return codes.view(x.shape), scales.view(x.shape[:-1])


def _of_pages(page_size: int, device: torch.device) -> Outputs:
    """Three sequences: some tokens, one, and none."""
    pages, columns = 2 + 2000 // page_size, -(-1300 // page_size)

    def heads(*shape: int, seed: int) -> torch.Tensor:
        return philox.normal((*shape, 64), seed=seed).to(torch.bfloat16).to(device)

    def table(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    (k, k_scales), (v, v_scales) = (_in_codes(heads(pages, page_size, 2, seed=seed)) for seed in (252, 253))
    of_pages = torch.stack([(torch.arange(columns) * step) % pages for step in (1, 3, 5)]).int().to(device)
    rest = (of_pages, 0.125, "causal_bottom_right", -1, -1, table(4, 1, 0), table(1300, 129, 0), table(0, 4, 5, 5))
    found = twin.attention_paged_codes(heads(5, 4, seed=251), k, v, k_scales, v_scales, *rest, 4, 1300, None)
    return named("out m inv", found)


def cases() -> Iterator[Case]:
    for size in (16, 128, 256):
        yield Case("attention_paged_codes", f"pages of {size}", partial(_of_pages, size), live=True)  # not recorded yet


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
