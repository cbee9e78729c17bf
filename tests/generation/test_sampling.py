"""Sampling does what its docstring says, written again with Python's integers; tokens come as often as they should."""

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA implementations)
from reference.generation.drafts import prompt_lookup
from reference.generation.sampling import Sampling, sample, uniform
from reference.numbers import elementary, philox

twin = torch.ops.twin


def by_hand(x: list[float], s: Sampling, n: int) -> int:
    """One token, from fp32 logits without NaN."""
    top = max(x)
    if s.temperature == 0 or top == -math.inf:
        return x.index(top)
    fp32 = torch.tensor([x, [top] * len(x)], dtype=torch.float32)
    y = (fp32[0] - fp32[1]) / torch.tensor([s.temperature] * len(x), dtype=torch.float32)
    w = [math.floor(Fraction(e) * 2**30) for e in elementary.exp(y).tolist()]
    order = sorted(range(len(w)), key=lambda i: (-w[i], i))
    order = order[: s.top_k or None]
    total, before, stay = sum(w[i] for i in order), 0, set()
    for place, i in enumerate(order):
        if place == 0 or before < float(s.top_p) * float(total):
            stay.add(i)
        before += w[i]
    u = int(philox.element_words(s.seed, n, 1)[0][0]) / 2**32
    height, upto = u * float(sum(w[i] for i in stay)), 0
    for i, weight in enumerate(w):
        upto += weight if i in stay else 0
        if upto > height:
            return i
    raise AssertionError(x)


SETTINGS = [
    Sampling(*values, seed=seed)
    for seed, values in enumerate(itertools.product((0.0, 0.3, 1.0, 40.0), (0, 1, 3, 99), (0.0, 0.4, 0.9, 1.0)))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_a_token_is_the_one_of_the_docstring(tokens: int, dtype: torch.dtype) -> None:
    logits = torch.randn(len(SETTINGS), tokens, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    logits = (logits * 4).round() / 4  # with ties
    positions = [7 * i for i in range(len(SETTINGS))]
    found = sample(logits, SETTINGS, positions)
    rows = zip(logits.float().tolist(), SETTINGS, positions, strict=True)
    assert found.tolist() == [by_hand(*row) for row in rows]


def test_a_token_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(len(SETTINGS), 50, generator=torch.Generator().manual_seed(1))
    together = sample(logits, SETTINGS, list(range(len(SETTINGS)))).tolist()
    order = list(range(len(SETTINGS)))
    random.Random(3).shuffle(order)
    for i in order:
        assert sample(logits[i : i + 1], [SETTINGS[i]], [i]).tolist() == [together[i]]


def test_tokens_come_as_often_as_their_probability() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf])
    count = 4000
    found = sample(x.expand(count, 5).contiguous(), [Sampling(1.0, seed=5)] * count, list(range(count)))
    shares = found.bincount(minlength=5) / count
    p = x.softmax(0)
    assert shares[4] == 0
    # A share of n draws has the deviation sqrt(p (1 - p) / n) <= 0.008; five of them.
    assert float((shares - p).abs().max()) < 5 * 0.008


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_logit_is_a_number_token_0_is_drawn(value: float, temperature: float) -> None:
    logits = torch.full((2, 9), value)
    assert sample(logits, [Sampling(temperature)] * 2, [3, 4]).tolist() == [0, 0]


def test_infinities_and_nan() -> None:
    logits = torch.tensor([[1.0, torch.inf, torch.nan, torch.inf], [torch.nan, 2.0, -torch.inf, 2.0]])
    for seed in range(20):
        for row, draws in zip(
            sample(logits, [Sampling(1.0, seed=seed)] * 2, [0, 1]).tolist(), ({1, 3},) * 2, strict=True
        ):
            assert row in draws
    assert sample(logits, [Sampling()] * 2, [0, 1]).tolist() == [1, 1]


def test_weights_are_as_written() -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    w = twin.token_weights(x, torch.tensor([1.0, 0.5, 0.0]))
    expected = (elementary.exp((x - x.amax(1, True))[:2] / torch.tensor([[1.0], [0.5]])) * 2**30).to(torch.int32)
    assert_same_bits(w[:2], expected)
    assert w[2].nonzero().flatten().tolist() == [int(x[2].argmax())]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature=-1.0; a number from 0 to 1e30 is accepted."),
    ({"temperature": float("nan")}, "temperature=nan; a number from 0 to 1e30 is accepted."),
    ({"top_k": -1}, r"top_k=-1; an int from 0 \(all tokens\) on is accepted."),
    ({"top_k": 1.5}, "top_k=1.5; an int from 0"),
    ({"top_p": 1.1}, r"top_p=1.1; a number from 0 to 1 \(all tokens\) is accepted."),
    ({"seed": -1}, r"seed=-1; an int from 0 to 2\^64 - 1 is accepted."),
    ({"seed": True}, "seed=True; an int from 0"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_settings_that_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^Sampling: {sentence}"):
        Sampling(**given)


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        ([], 3, []),
        ([5], 3, []),
        ([1, 2, 3, 1, 2], 2, [3, 1]),
        ([1, 2, 3, 9, 2, 3], 5, [9, 2, 3]),
        ([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1, [7]),  # the longer end counts
        ([4, 4, 4, 4], 2, [4]),  # the last time
        ([1, 2, 3], 2, []),
    ],
)
def test_a_draft_is_what_followed_the_last_time(text: list[int], count: int, found: list[int]) -> None:
    assert prompt_lookup(text, count) == found


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens(device: torch.device) -> None:
    logits = torch.randn(len(SETTINGS), 5000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    positions = list(range(len(SETTINGS)))
    assert sample(logits.to(device), SETTINGS, positions).tolist() == sample(logits, SETTINGS, positions).tolist()


def test_numbers_of_many_rows_are_those_of_each() -> None:
    """Word 0 of Philox4x32 with the row's seed as its key, and its sequence's length as the counter."""
    seeds, positions = [0, 7, 2**32 + 5, 2**63, 2**64 - 1], [0, 1, 12345, 2**31, 2**33 + 1]
    words = [int(philox.element_words(seed, at, 1)[0][0]) for seed, at in zip(seeds, positions, strict=True)]
    assert uniform(seeds, positions).tolist() == [word / 2**32 for word in words]


def test_the_likeliest_token_is_what_a_draw_gives() -> None:
    """Where all settings are greedy, no sum of weights is made; beside a setting that draws, one is."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[1.0, 3.0, 3.0], [nan, -1.0, -2.0], [-inf, -inf, -inf], [nan, nan, nan], [0.0, inf, inf]])
    greedy = [Sampling(seed=i) for i in range(len(logits))]
    alone = sample(logits, greedy, range(5))
    both = sample(torch.cat([logits, logits[:1]]), [*greedy, Sampling(1.0)], range(6))
    assert alone.tolist() == both[:5].tolist() == [1, 1, 0, 0, 1]
    assert alone.dtype == both.dtype == torch.int64


@pytest.mark.parametrize(("rows", "settings", "positions"), [(5, 1, 1), (1, 5, 1), (2, 2, 1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_row_has_a_setting_and_a_position(temperature: float, rows: int, settings: int, positions: int) -> None:
    sentence = f"^sample: {settings} settings and {positions} positions of {rows} rows; as many are accepted.$"
    with pytest.raises(ValueError, match=sentence):
        sample(torch.zeros(rows, 10), [Sampling(temperature)] * settings, [1] * positions)


@pytest.mark.parametrize(
    ("name", "last", "beyond"),
    [
        ("temperature", 0, -5e-324),
        ("temperature", 1e30, math.nextafter(1e30, math.inf)),
        ("top_k", 0, -1),
        ("top_k", 2**62, 2**62 + 1),
        ("top_p", 0, -5e-324),
        ("top_p", 1, math.nextafter(1.0, 2.0)),
        ("seed", 0, -1),
        ("seed", 2**64 - 1, 2**64),
    ],
)
def test_numbers_are_taken_up_to_their_edge(name: str, last: float, beyond: float) -> None:
    assert getattr(Sampling(**{name: last}), name) == last
    for refused in (beyond, True, None, str(last)):
        with pytest.raises(ValueError, match=rf"^Sampling: {name}=.*; an? (int|number) from 0 .* is accepted\.$"):
            Sampling(**{name: refused})
