"""Keys in pages: the words of packed attention, whatever the pages' size and order, and whoever else is in them."""

import re
from typing import Any

import pytest
import torch
from shared.attention_packed_cases import int32
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA implementations)
from reference.ops.attentions.attention_options import Options

twin = torch.ops.twin
LENGTHS = (150, 1, 0, 128, 257)
QUERIES = (1, 1, 0, 128, 140)
SHAPE = {"d": 64, "e": 64, "dtype": torch.bfloat16, "mask": "causal_bottom_right", "window": (-1, -1), "sinks": False}


def numbers(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return int32(0, *torch.tensor(lengths).cumsum(0).tolist())


def both(page_size: int, device: Any = "cpu", shared: int = 0, **more: Any) -> tuple[Any, Any]:
    """Packed attention on the CPU, and paged attention on `device`; NaN is wherever no key of a sequence lies.

    `shared`: so many of the first keys of all long sequences are the first one's, in its pages.
    """
    s: dict[str, Any] = {**SHAPE, **more}
    q = numbers(1, sum(QUERIES), 4, s["d"], dtype=s["dtype"])
    k, v = (numbers(seed, sum(LENGTHS), 2, s[x], dtype=s["dtype"]) for seed, x in ((2, "d"), (3, "e")))
    first = starts(LENGTHS).tolist()
    for at, n in zip(first, LENGTHS, strict=False):
        if n >= shared:
            k[at : at + shared], v[at : at + shared] = k[:shared].clone(), v[:shared].clone()
    sinks = numbers(4, 4, dtype=torch.float32) if s["sinks"] else None
    longest = (max(QUERIES), max(LENGTHS))
    lengths = (int32(*QUERIES), int32(*LENGTHS))
    rest = (0.125, s["mask"], *s["window"])
    options = Options(*rest, None, 0.0, None, None, None, sinks, *lengths, starts(QUERIES), starts(LENGTHS), *longest)
    expected = twin.attention(q, k, v, *options)

    columns = -(-max(LENGTHS) // page_size) + 1
    order = torch.randperm(columns * len(LENGTHS), generator=torch.Generator().manual_seed(5))
    table = order.view(len(LENGTHS), columns).int()
    whole = shared // page_size
    for n, length in enumerate(LENGTHS):
        if length >= shared:
            table[n, :whole] = table[0, :whole]
    pages = [torch.full((len(order) + 1, page_size, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (k, v)]
    for n, (at, length) in enumerate(zip(first, LENGTHS, strict=False)):
        for j in range(length):
            for page, x in zip(pages, (k, v), strict=True):
                page[int(table[n, j // page_size]), j % page_size] = x[at + j]
    given = (q, *pages, table, *rest, *lengths, starts(QUERIES), *longest, sinks)
    there = [x.to(device) if isinstance(x, torch.Tensor) else x for x in given]
    return expected, twin.attention_paged(*there)


def check(*arguments: Any, **more: Any) -> None:
    for expected, found in zip(*both(*arguments, **more), strict=True):
        assert_same_bits(expected, found.cpu())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"shared": 100, "mask": "causal_bottom_right", "window": (40, 0)},
    {"d": 24, "e": 40, "mask": "none", "sinks": True},
    {"dtype": torch.float16, "mask": "none", "window": (7, 3)},
]


@pytest.mark.parametrize("more", OPTIONS, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 100, 128, 384])
def test_pages_change_no_word(page_size: int, more: dict[str, Any]) -> None:
    check(page_size, **more)


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.sample(4)
@pytest.mark.parametrize("more", [*OPTIONS, {"d": 128, "e": 128}, {"d": 200, "e": 256}], ids=str)
@pytest.mark.parametrize("page_size", [16, 128, 256])
def test_kernels_read_pages(page_size: int, more: dict[str, Any], device: torch.device) -> None:
    check(page_size, device, **more)


def arguments(**change: Any) -> tuple[Any, ...]:
    """A small call: two sequences, pages of 4 keys."""
    page = torch.zeros(3, 4, 1, 16, dtype=torch.bfloat16)
    given: dict[str, Any] = {"q": torch.zeros(2, 2, 16, dtype=torch.bfloat16), "k": page, "v": page}
    given |= {"page_table": int32(0, 1, 2, 0).view(2, 2), "scale": 0.25, "mask_type": "none", "left": -1, "right": -1}
    given |= {"q_lengths": int32(1, 1), "kv_lengths": int32(5, 3), "q_starts": int32(0, 1, 2)}
    given |= {"longest_q": 1, "longest_kv": 5, "sinks": None}
    return tuple({**given, **change}.values())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k": torch.zeros(3, 4, 16, dtype=torch.bfloat16)}, "k must be contiguous [pages, page_size, key heads, head"),
        (
            {"v": torch.zeros(2, 4, 1, 16, dtype=torch.bfloat16)},
            "k and v must have the same pages and page_size; got [3, 4] and [2",
        ),
        (
            {"page_table": int32(0, 1)},
            "page_table must be contiguous torch.int32 [2, 2 or more] on cpu, with pages for",
        ),
        ({"page_table": int32(0, 1).view(2, 1)}, "page_table must be contiguous torch.int32 [2, 2 or more] on cpu"),
        ({"page_table": int32(0, 3, 2, 0).view(2, 2)}, "page_table[0, 1] is 3; 0 to 2 are accepted."),
        ({"page_table": int32(0, 1, -1, 0).view(2, 2)}, "page_table[1, 0] is -1; 0 to 2 are accepted."),
    ],
)
def test_what_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, IndexError), match="^twin::attention_paged: " + re.escape(sentence)):
        twin.attention_paged(*arguments(**change))


def test_a_page_that_no_key_lies_in_may_be_any() -> None:
    twin.attention_paged(*arguments(page_table=int32(0, 1, 2, 99).view(2, 2)))
