"""Few queries of many keys: the kernels that share keys among blocks of threads have the definition's words."""

import re
from typing import Any

import numpy as np
import pytest
import simulator
import torch
from shared.attention_cases import Case, inputs, to_cuda
from shared.attention_packed_cases import int32
from shared.bits import assert_same_bits
from simulator import Simulator

import optimized  # noqa: F401  (registers the CUDA implementations)
from optimized.ops.attentions import attention_decode
from reference.nn.attentions.fp8_keys_values import codes_of
from reference.numbers.elementary import powers_of_two
from reference.numbers.tensor_core import gemm
from reference.ops.attentions.attention import LOWEST, factor, softmax_block
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_paged_codes import numbers_of

twin = torch.ops.twin
WHEN = {"at once": simulator.AT_ONCE, "late": simulator.LATE, "at random": simulator.AT_RANDOM}


@pytest.fixture(autouse=True)
def however_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "LEAST_KEYS", 1)
    monkeypatch.setattr(attention_decode, "WAVES", 1000)


def forward(case: Case, given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    rest = (case.softmax_scale, case.mask_type, *case.window, given["mask"], case.dropout, given["rng_state"])
    more = [given[name] for name in ("bias", "slopes", "sinks", "q_lengths", "kv_lengths")]
    return twin.attention(given["q"], given["k"], given["v"], *rest, *more)  # type: ignore[no-any-return]


def compare(case: Case, when: int = simulator.LATE) -> None:
    given = inputs(case)
    expected = forward(case, given)
    with Simulator(3, when) as gpu:
        found = forward(case, given)
    assert gpu.launches == ["attention_decode.attention_scores", "attention_decode.attention_chain"]
    for name, one, other in zip(("out", "m", "inv"), expected, found, strict=True):
        assert_same_bits(one, other, f"{name} of {case}")


@pytest.mark.simulated
@pytest.mark.sample(3)
@pytest.mark.parametrize("when", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize(
    "case",
    [
        Case(sq=1, skv=1, d=8),
        Case(b=2, hkv=2, group=4, sq=1, skv=1100, d=128),
        Case(group=3, sq=5, skv=700, d=64, mask_type="causal_bottom_right", dtype=torch.float16),
        Case(hkv=2, group=2, sq=4, skv=515, d=72, e=40, window=(130, 60), layout="sbhd"),
        Case(b=2, group=8, sq=4, skv=300, d=200, e=256, sinks=True, mask_type="causal"),
        Case(b=3, hkv=2, group=2, sq=2, skv=400, d=64, lengths="both", sinks=True, mask_type="causal_bottom_right"),
        Case(b=3, group=2, sq=3, skv=260, d=64, lengths="keys", window=(7, 3), layout="bshd"),
        Case(sq=8, skv=900, d=64, window=(40, 0), scale=30.0),
        Case(b=2, hkv=2, group=4, sq=1, skv=300, d=64, mask="padding"),
        Case(b=2, hkv=2, group=2, sq=3, skv=300, d=64, mask="arbitrary", mask_type="causal_bottom_right"),
        Case(group=2, sq=3, skv=200, d=64, mask="everything", dtype=torch.float16),
    ],
    ids=str,
)
def test_every_bit(case: Case, when: int) -> None:
    compare(case, when)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8, 9, 16, 17, 32])
def test_every_bit_on_a_gpu(rows: int, device: torch.device) -> None:
    case = Case(b=3, hkv=2, group=1, sq=rows, skv=5000, d=128, mask_type="causal_bottom_right", seed=rows)
    given = inputs(case)
    found = forward(case, {name: to_cuda(x) for name, x in given.items()})
    for name, one, other in zip(("out", "m", "inv"), forward(case, given), found, strict=True):
        assert_same_bits(one, other.cpu(), f"{name} of {rows} rows")


QUERIES, LENGTHS = (1, 3, 0, 2, 1), (261, 3, 0, 128, 130)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_pages(group: int, d: int, e: int, page_size: int, mask: str, window: tuple[int, int], sinks: bool) -> list[Any]:
    """Arguments of `attention_paged`; pages are in no order, and NaN lies where no key does."""
    columns = -(-max(LENGTHS) // page_size)
    table = torch.randperm(columns * len(LENGTHS), generator=torch.Generator().manual_seed(5)).int()
    table = table.view(len(LENGTHS), columns)
    k, v = (numbers(seed, table.numel(), page_size, 2, x) for seed, x in ((2, d), (3, e)))
    for pages, length in zip(table.tolist(), LENGTHS, strict=True):
        for n, page in enumerate(pages):
            for x in (k, v):
                x[page, max(length - n * page_size, 0) :] = torch.nan
    starts = int32(0, *torch.tensor(QUERIES).cumsum(0).tolist())
    q = numbers(1, int(starts[-1]) + 2, 2 * group, d)  # two rows are of no sequence
    where = (int32(*QUERIES), int32(*LENGTHS), starts, max(QUERIES), max(LENGTHS))
    return [q, k, v, table, 0.125, mask, *window, *where, numbers(4, 2 * group, dtype=torch.float32) if sinks else None]


PAGES: list[Any] = [
    (2, 128, 128, 128, "causal_bottom_right", (-1, -1), False),
    (4, 64, 64, 256, "causal_bottom_right", (40, 0), True),
    (1, 192, 128, 128, "none", (-1, -1), False),
    (2, 64, 80, 48, "causal_bottom_right", (-1, -1), False),
]


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("case", PAGES, ids=str)
def test_pages(case: Any, device: torch.device) -> None:
    given = in_pages(*case)
    expected = twin.attention_paged(*given)
    found = twin.attention_paged(*[x.to(device) if isinstance(x, torch.Tensor) else x for x in given])
    for name, one, other in zip(("out", "m", "inv"), expected, found, strict=True):
        assert_same_bits(one, other.cpu(), name)


def of_codes(given: list[Any]) -> list[Any]:
    """The same arguments of `attention_paged_codes`, but for the casts; NaN rows have NaN codes, or NaN scales."""
    (k, k_scales), (v, v_scales) = (codes_of(x) for x in given[1:3])
    return [given[0], k, v, k_scales, v_scales, *given[3:]]


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("case", [*PAGES[:2], (3, 16, 144, 384, "none", (-1, -1), True), PAGES[3]], ids=str)
def test_codes_in_pages(case: Any, device: torch.device) -> None:
    given = of_codes(in_pages(*case))
    numbers = [numbers_of(codes, scales) for codes, scales in zip(given[1:3], given[3:5], strict=True)]
    expected = twin.attention_paged(given[0], *numbers, *given[5:])
    there = [x.to(device) if isinstance(x, torch.Tensor) else x for x in given]
    for found in (twin.attention_paged_codes(*given), twin.attention_paged_codes(*there)):
        for name, one, other in zip(("out", "m", "inv"), expected, found, strict=True):
            assert_same_bits(one, other.cpu(), name)


@pytest.mark.simulated
@pytest.mark.parametrize("when", WHEN.values(), ids=WHEN)
def test_codes_are_read_where_they_lie(when: int) -> None:
    """With any scales, those of a far smaller or larger row among them."""
    given = of_codes(in_pages(2, 128, 128, 128, "causal_bottom_right", (-1, -1), False))
    for scales in given[3:5]:
        scales[:, ::3] *= 2.0**-20
        scales[:, 1::7] *= 2.0**9
    expected = twin.attention_paged_codes(*given)
    with Simulator(2, when) as gpu:
        found = twin.attention_paged_codes(*given)
    assert gpu.launches == ["attention_decode.attention_scores", "attention_decode.attention_chain"]
    for name, one, other in zip(("out", "m", "inv"), expected, found, strict=True):
        assert_same_bits(one, other, name)


@pytest.mark.simulated
def test_a_page_that_the_cache_does_not_have_is_one_of_zeros() -> None:
    """A GPU's page numbers are not looked at before the launch, so that no scale may be read outside the cache."""
    given = of_codes(in_pages(2, 128, 128, 128, "causal_bottom_right", (-1, -1), False))
    table, pages = given[5], len(given[1])
    for codes, scales in ((given[1], given[3]), (given[2], given[4])):
        codes.view(torch.uint8)[table[0, 0]] = 0
        scales[table[0, 0]] = 1
        scales[[0, pages - 1]] = scales[[0, pages - 1]].nan_to_num(1.0)
    for outside in (pages, -1, 2**24 - 1, -(2**24)):
        wrong = table.clone()
        wrong[0, 0] = outside
        with Simulator(2):
            expected, found = (twin.attention_paged_codes(*given[:5], one, *given[6:]) for one in (table, wrong))
        for name, one, other in zip(("out", "m", "inv"), expected, found, strict=True):
            assert_same_bits(one, other, f"{name} with page {outside}")


@pytest.mark.parametrize(
    ("place", "wrong", "sentence"),
    [
        (0, torch.zeros(9, 4, 64, dtype=torch.float16), "q must be torch.bfloat16, which holds what codes stand for"),
        (1, numbers(1, 15, 128, 2, 64), "k must be torch.float8_e4m3fn [pages, page_size, key heads, head_dim]"),
        (3, torch.ones(15, 128), "k_scales must be contiguous torch.float32 [15, 128, 2] on cpu; got"),
        (4, torch.ones(15, 128, 2, dtype=torch.float64), "v_scales must be contiguous torch.float32 [15, 128, 2]"),
        (5, int32(0, 1), "page_table must be contiguous torch.int32 [5, 3 or more] on cpu, with pages for longest_kv="),
        (5, torch.full((5, 3), 15, dtype=torch.int32), "page_table[0, 0] is 15; 0 to 14 are accepted."),
    ],
)
def test_what_is_refused(place: int, wrong: torch.Tensor, sentence: str) -> None:
    given = of_codes(in_pages(2, 64, 64, 128, "none", (-1, -1), False))
    given[place] = wrong
    with pytest.raises((ValueError, IndexError), match="^twin::attention_paged_codes: " + re.escape(sentence)):
        twin.attention_paged_codes(*given)


@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        ((slice(14), slice(None)), "k and v must have the same pages and page_size; got [15, 128] and [14, 128]."),
        ((slice(None), slice(64)), "k and v must have the same pages and page_size; got [15, 128] and [15, 64]."),
        ((slice(0), slice(None)), "k and v must have the same pages and page_size; got [15, 128] and [0, 128]."),
    ],
)
def test_pages_of_keys_and_of_values_are_as_many(kept: tuple[slice, slice], sentence: str) -> None:
    given = of_codes(in_pages(2, 64, 64, 128, "none", (-1, -1), False))
    given[2], given[4] = given[2][kept].contiguous(), given[4][kept].contiguous()
    with pytest.raises(ValueError, match="^twin::attention_paged_codes: " + re.escape(sentence)):
        twin.attention_paged_codes(*given)
    given[1], given[3] = given[1][:0], given[3][:0]
    if not given[2].numel():
        with pytest.raises(ValueError, match=r"^twin::attention_paged_codes: k must be contiguous .* a page at least"):
            twin.attention_paged_codes(*given)


@pytest.mark.simulated
def test_no_number_hides_what_is_infinite() -> None:
    case = Case(b=2, hkv=2, group=2, sq=2, skv=300, d=64)
    given: dict[str, Any] = inputs(case)
    given["q"][0, 0, 0, 3] = torch.inf
    given["k"][0, 1, 290], given["v"][1, 0, 140, 7] = torch.nan, -torch.inf
    expected = forward(case, given)
    with Simulator():
        found = forward(case, given)
    assert expected[0].isnan().any()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert_same_bits(one.nan_to_num(), other.nan_to_num())


def fused(a: Any, b: Any, c: Any) -> np.float32:
    """a · b + c, of fp32, in numbers of 64 bits of significand."""
    return np.float32(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))


def test_what_the_written_order_leaves_free() -> None:
    """Scores, maxima and weights of key blocks can be had in any order, channels apart, products transposed. O's chain
    cannot be cut: a block's product by itself, added afterwards, has other words."""
    q, k, v = numbers(1, 4, 64), numbers(2, 512, 64), numbers(3, 512, 64)
    blocks = range(0, 512, 128)
    expected, m, _ = twin.attention(q[None, None], k[None, None], v[None, None], 0.125, "none", -1, -1, None, 0.0, None)
    c = np.float32(factor(0.125))

    scores = {j: gemm(k[j : j + 128], q).T.contiguous() for j in reversed(blocks)}  # transposed, the last one first
    own = {j: [384 - fused(-top, c, 384) for top in s.amax(1).numpy()] for j, s in scores.items()}
    tops = {j: np.array(x, np.float32) for j, x in own.items()}
    largest = {j: np.maximum.reduce([tops[i] for i in blocks if i <= j]) for j in blocks}
    assert_same_bits(torch.from_numpy(largest[384]), m[0, 0])
    weights, alphas, sums = {}, {}, {}
    for j in reversed(blocks):
        before = largest[j - 128] if j else np.full(4, LOWEST)
        state, l = before.copy(), np.zeros((4, 4), np.float32)  # noqa: E741
        alpha, p, unseen = np.empty(4, np.float32), np.empty((4, 128), np.float32), np.zeros((4, 128), bool)
        softmax_block(scores[j].numpy(), unseen, c, state, l, alpha, p, powers_of_two(), np.float32(0))
        assert (state == largest[j]).all()
        weights[j], alphas[j], sums[j] = torch.from_numpy(p).bfloat16(), torch.from_numpy(alpha)[:, None], l

    lanes = np.zeros((4, 4), np.float32)
    for j in blocks:
        for row, lane in np.ndindex(4, 4):
            lanes[row, lane] = fused(lanes[row, lane], alphas[j][row, 0].numpy(), sums[j][row, lane])
    total = (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])
    inverse = torch.from_numpy(np.float32(1) / total)[:, None]

    def chain(channels: slice) -> torch.Tensor:
        o = torch.zeros(4, 64)[:, channels]
        for j in blocks:
            o = gemm(
                v[j : j + 128, channels].T.contiguous(), weights[j], c=(o * alphas[j]).T.contiguous()
            ).T.contiguous()
        return o

    apart = torch.cat([chain(slice(n, n + 16)) for n in range(0, 64, 16)], 1)
    assert_same_bits((apart * inverse).bfloat16(), expected[0, 0])
    cut = torch.zeros(4, 64)
    for j in blocks:
        cut = cut * alphas[j] + gemm(weights[j], v[j : j + 128].T.contiguous())
    assert (cut != apart).float().mean() > 0.25


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries of many keys, where heads leave multiprocessors idle."""

    def takes(**more: Any) -> bool:
        given: dict[str, Any] = inputs(case := Case(**{"b": 2, "hkv": 2, "sq": 1, "skv": 128} | more))
        options = Options(case.softmax_scale, "none", -1, -1, given["mask"], case.dropout, bias=given["bias"])
        return attention_decode.takes(given["q"], given["k"], options, 4)

    assert takes()
    assert takes(sq=32)
    assert takes(mask="arbitrary")
    assert not takes(sq=33)
    assert not takes(group=8, sq=5)
    assert not takes(dropout=0.5)
    assert not takes(bias="11ss")
    monkeypatch.setattr(attention_decode, "WAVES", 1)
    assert takes(group=4)  # key heads count
    assert not takes(b=3)
    monkeypatch.setattr(attention_decode, "LEAST_KEYS", 129)
    assert not takes()
    monkeypatch.setattr(attention_decode, "MOST_BYTES", 2 * 2 * 3 * 4 * 516)  # b · hkv · blocks · rows
    assert takes(sq=4, skv=384)
    assert takes(group=2, sq=2, skv=257)
    assert not takes(sq=4, skv=385)
    assert not takes(sq=5, skv=384)


def test_scores_of_a_whole_gpu_stay_below_the_limit() -> None:
    """Of 132 key heads with 32 rows, up to 15 Ki keys."""
    q, k = (torch.empty(132, 1, n, 64, dtype=torch.bfloat16, device="meta") for n in (32, 15 * 1024))
    options = Options(0.125, "none", -1, -1, None, 0.0)
    assert attention_decode.takes(q, k, options, 132)
    k = torch.empty(132, 1, 16 * 1024, 64, dtype=torch.bfloat16, device="meta")
    assert not attention_decode.takes(q, k, options, 132)


@pytest.mark.simulated
def test_beyond_the_limit_another_kernel_has_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(b=2, hkv=2, group=2, sq=2, skv=300, d=64)
    given = inputs(case)
    monkeypatch.setattr(attention_decode, "MOST_BYTES", 2 * 2 * 3 * 4 * 516 - 1)
    expected = forward(case, given)
    with Simulator() as gpu:
        found = forward(case, given)
    assert gpu.launches
    assert not any("attention_decode" in name for name in gpu.launches)
    for one, other in zip(expected, found, strict=True):
        assert_same_bits(one, other)
