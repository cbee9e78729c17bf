"""Attention with keys in segments: the written order, what it leaves as it was, and the kernels' words.

Most cases have segments of 256 keys, which the tests let the ops accept, so that short texts have several.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import simulator
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.attention_cases import Case, check_against_float64, inputs, run, to_cuda
from shared.attention_packed_cases import int32, packed_inputs, packed_run
from shared.bits import assert_same_bits
from simulator import Simulator

import optimized  # noqa: F401  (registers the CUDA implementations)
from optimized.ops.attentions import attention_decode
from reference.nn.attentions.fp8_keys_values import codes_of
from reference.numbers.elementary import powers_of_two
from reference.numbers.tensor_core import gemm
from reference.ops.attentions import attention_options
from reference.ops.attentions.attention import LOWEST, factor, softmax_block
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_segments import check_key_segment, join, segments

twin = torch.ops.twin
WHEN = {"at once": simulator.AT_ONCE, "late": simulator.LATE, "at random": simulator.AT_RANDOM}
BF16, FP16 = torch.bfloat16, torch.float16
SHORT = 256


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_options, "KEY_SEGMENTS", (SHORT, *attention_options.KEY_SEGMENTS))


@pytest.fixture
def however_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "LEAST_KEYS", 1)
    monkeypatch.setattr(attention_decode, "WAVES", 1000)


def numbers(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_chain(case: Case) -> Case:
    return dataclasses.replace(case, key_segment=None)


# --- the definition ----------------------------------------------------------------------------------


def fused(a: Any, b: Any, c: Any) -> np.ndarray:
    """a · b + c, of fp32, in numbers of 64 bits of significand."""
    return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(np.float32)


def power(x: np.ndarray) -> np.ndarray:
    """2^x on the grid, by a block of softmax whose only key has the score x and whose m stays 0."""
    state, l = np.zeros(1, np.float32), np.zeros((1, 4), np.float32)  # noqa: E741
    found = np.empty_like(x)
    for n, one in enumerate(x):
        alpha, p = np.empty(1, np.float32), np.empty((1, 1), np.float32)
        score, seen = np.full((1, 1), one), np.zeros((1, 1), bool)
        softmax_block(score, seen, np.float32(1), state, l, alpha, p, powers_of_two(), np.float32(0))
        found[n] = p[0, 0]
    return found


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [0.125, 3.0])  # segments have like shares, and unlike ones
def test_the_order_is_the_written_one(dtype: torch.dtype, scale: float) -> None:
    q, k, v = numbers(1, 5, 64, dtype=dtype), numbers(2, 700, 64, dtype=dtype), numbers(3, 700, 64, dtype=dtype)
    sinks = torch.tensor([0.7])
    rest = (scale, "none", -1, -1, None, 0.0, None, None, None, sinks, *[None] * 6, SHORT)
    out, m, inv = (x[0, 0] for x in twin.attention(q[None, None], k[None, None], v[None, None], *rest))
    c, found = np.float32(factor(scale)), []
    for first in range(0, 700, SHORT):
        own_m, own_l, o = np.full(5, LOWEST), np.zeros((5, 4), np.float32), torch.zeros(5, 64)
        for start in range(first, min(first + SHORT, 700), 128):
            keys = slice(start, min(start + 128, first + SHORT, 700))
            s = gemm(q, k[keys]).numpy()
            alpha, p = np.empty(5, np.float32), np.empty_like(s)
            unseen = np.zeros(s.shape, bool)
            softmax_block(s, unseen, c, own_m, own_l, alpha, p, powers_of_two(), np.float32(0))
            weights, chain = torch.from_numpy(p).to(dtype), o * torch.from_numpy(alpha)[:, None]
            o = gemm(weights, v[keys].T.contiguous(), c=chain)
        found.append((own_m, own_l, o.numpy()))
    total_m, total_l, total = found[0]
    for own_m, own_l, o in found[1:]:
        largest = np.maximum(total_m, own_m)
        a, b = (power(x - largest)[:, None] for x in (total_m, own_m))
        total, total_l, total_m = fused(total, a, o * b), fused(total_l, a, own_l * b), largest
    sums = (total_l[:, 0] + total_l[:, 1]) + (total_l[:, 2] + total_l[:, 3])
    z = sinks.numpy() * np.float32(1.4426950408889634)
    inverse = np.float32(1) / (sums + power(z - total_m))
    assert_same_bits(torch.from_numpy(total_m), m, "m")
    assert_same_bits(torch.from_numpy(inverse), inv, "inv")
    assert_same_bits(torch.from_numpy(total * inverse[:, None]).to(dtype), out, "out")


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 2, 150, 600, 48, BF16, "causal_bottom_right", dropout=0.1),
        Case(1, 1, 2, 300, 530, 72, FP16, "none", window=(140, 60), sinks=True),
        Case(2, 1, 2, 40, 700, 136, BF16, "none", "arbitrary", bias="b1ss", scale=1.0),
        Case(3, 1, 1, 40, 600, 64, BF16, "causal", lengths="both", bias="h slopes"),
    ],
    ids=str,
)
def test_against_float64(case: Case) -> None:
    """The bound counts roundings of a sum over all keys; those of a segment's are as many, and of adding them a few."""
    check_against_float64(dataclasses.replace(case, key_segment=SHORT))


def test_what_differs_from_one_chain() -> None:
    """out and 1 / l of queries that see a second segment; not m. A text of one segment has all words."""
    case = Case(hkv=2, sq=700, skv=700, d=64, mask_type="causal", key_segment=SHORT)
    given = inputs(case)
    found, chain = run(case, given), run(one_chain(case), given)
    assert_same_bits(found["m"], chain["m"])
    for name in ("out", "inv"):
        assert_same_bits(found[name][:, :, :SHORT], chain[name][:, :, :SHORT], name)
        assert (found[name][:, :, SHORT:] != chain[name][:, :, SHORT:]).any(), name
    for name, x in run(dataclasses.replace(case, key_segment=4096), given).items():
        assert_same_bits(x, chain[name], name)


def test_4096_keys_are_one_segment_and_more_begin_the_next() -> None:
    case = Case(sq=32, skv=6000, d=8, key_segment=4096)
    given = inputs(case)
    found, chain = run(case, given), run(one_chain(case), given)
    assert (found["inv"] != chain["inv"]).any()
    given |= {"k": given["k"][:, :, :4096], "v": given["v"][:, :, :4096]}  # type: ignore[index]
    case = dataclasses.replace(case, skv=4096)
    for name, x in run(one_chain(case), given).items():
        assert_same_bits(x, run(case, given)[name], name)


def test_the_backward_reads_m_and_the_inverse_alone() -> None:
    case = Case(sq=300, skv=600, d=32, mask_type="causal_bottom_right", dropout=0.2, key_segment=SHORT)
    given: Any = inputs(case)
    before = given["rng_state"].clone()
    found = run(case, given)
    rest = (case.softmax_scale, case.mask_type, -1, -1, None, 0.2, before)
    results = [found[name] for name in ("out", "m", "inv")]
    grads = twin.attention_backward(given["grad"], given["q"], given["k"], given["v"], *results, *rest)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_same_bits(grad, found[name], name)


def test_blocks_belong_to_segments_by_their_first_key() -> None:
    blocks = [slice(start, start + 128) for start in range(128, 900, 128)]
    assert segments(blocks, None) == [slice(7)]
    assert segments(blocks, 256) == [slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 7)]
    assert segments(blocks, 4096) == [slice(0, 7)]
    assert segments([], 256) == segments([], None) == []


SIDES = st.sampled_from((-1, 0, 5, 127, 128, 200, 300))
PROMPTS = st.lists(st.integers(1, 300), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(cuts=PROMPTS, left=SIDES, sinks=st.booleans(), scale=st.sampled_from((0.25, 4.0)), seed=st.integers(0, 2**31))
def test_pieces_of_a_text_have_the_words_of_one_forward(
    cuts: list[int], left: int, sinks: bool, scale: float, seed: int
) -> None:
    """A prompt in pieces, and then one token after the other: a query's words depend on the keys that it sees alone."""
    size = sum(cuts) + 3
    case = Case(hkv=2, group=2, sq=size, skv=size, d=32, seed=seed, sinks=sinks)
    q, k, v, of_heads = (inputs(case)[name] for name in ("q", "k", "v", "sinks"))
    more = (left, -1, None, 0.0, None, None, None, of_heads, *[None] * 6, SHORT)
    whole = twin.attention(q, k, v, scale, "causal", *more)
    ends = list(itertools.accumulate([*cuts, 1, 1, 1]))
    for first, end in itertools.pairwise([0, *ends]):
        part = twin.attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], scale, "causal_bottom_right", *more)
        for name, one, other in zip(("out", "m", "inv"), whole, part, strict=True):
            assert_same_bits(one[:, :, first:end], other, f"{name} of {first} to {end}")


def test_a_hidden_segment_changes_no_bit() -> None:
    """Before, between and after those that a query sees, whether the query's block visits it or not."""
    q, k, v = numbers(1, 1, 1, 4, 32), numbers(2, 1, 1, 4 * SHORT, 32), numbers(3, 1, 1, 4 * SHORT, 32)
    for seen in itertools.product((False, True), repeat=4):
        hidden = ~torch.tensor(seen).repeat_interleave(SHORT).view(1, 1, 1, -1)
        chosen = ~hidden.flatten()
        rest = (0.25, "none", -1, -1)
        masked = twin.attention(q, k, v, *rest, hidden, 0.0, None, *[None] * 9, SHORT)
        packed = (x[:, :, chosen] for x in (k, v))
        alone = twin.attention(q, *packed, *rest, None, 0.0, None, *[None] * 9, SHORT)
        for one, other in zip(masked, alone, strict=True):
            assert_same_bits(one, other, str(seen))


def test_no_output_is_a_negative_zero() -> None:
    """A segment's O that rescaling makes too small is +0, as a later segment, which may be hidden, would make it."""
    rows = np.float32([-(2.0**-100), 2.0**-100, -1.0, 1.0])
    before = torch.from_numpy(rows.copy()).view(1, 4, 1), np.zeros(4, np.float32), np.ones((4, 4), np.float32)
    own = torch.zeros(1, 4, 1), np.full(4, np.float32(100)), np.ones((4, 4), np.float32)
    total, m, _ = join(before, own)
    assert (m == 100).all()
    assert (total.flatten()[:2].view(torch.int32) == 0).all()
    assert (total.flatten()[2:].abs() == 2.0**-100).all()


def test_an_infinite_score_or_nan_makes_its_row_nan() -> None:
    for place, wrong in itertools.product((3, 300, 600), (torch.inf, -torch.inf, torch.nan)):
        q, k, v = numbers(1, 1, 1, 4, 32), numbers(2, 1, 1, 700, 32), numbers(3, 1, 1, 700, 32)
        k[0, 0, place, 0] = wrong
        out, _, inv = twin.attention(q, k, v, 0.25, "none", -1, -1, None, 0.0, None, *[None] * 9, SHORT)
        of_chain, _, inv_of_chain = twin.attention(q, k, v, 0.25, "none", -1, -1, None, 0.0, None)
        assert out.isnan().any()
        assert torch.equal(out.isnan(), of_chain.isnan())
        assert torch.equal(inv.isnan(), inv_of_chain.isnan())


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 128, 4095, 8192])
def test_segments_of_another_size_are_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q = numbers(1, 1, 1, 4, 32)
    rest = (0.25, "none", -1, -1, None, 0.0, None, *[None] * 9, size)
    with pytest.raises(ValueError, match=rf"^twin::attention: key_segment={size}; None and 4096 are accepted\.$"):
        twin.attention(q, q, q, *rest)
    out = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match=rf"^twin::attention_backward: key_segment={size}; None and 4096 are accepted"):
        twin.attention_backward(q, q, q, q, q, out, out, *rest)
    pages = numbers(1, 1, 128, 1, 32)
    where = (int32(0)[None], 0.25, "none", -1, -1, int32(4), int32(4), int32(0, 4), 4, 4, None, size)
    with pytest.raises(ValueError, match=rf"key_segment={size}; None and 4096 are accepted\.$"):
        twin.attention_paged(numbers(2, 4, 1, 32), pages, pages, *where)
    check_key_segment("twin::attention", 4096)
    check_key_segment("twin::attention", None)


# --- the kernels -------------------------------------------------------------------------------------


def compare(case: Case, when: int = simulator.LATE, processors: int = 4) -> list[str]:
    given = inputs(case)
    expected = run(case, {name: None if x is None else x.clone() for name, x in given.items()})
    with Simulator(processors, when) as gpu:
        found = run(case, given)
    for name, value in expected.items():
        assert_same_bits(value, found[name], f"{name} of {case}")
    return gpu.launches


@pytest.mark.simulated
@pytest.mark.parametrize(
    "case",
    [
        Case(group=2, sq=400, skv=600, d=128, mask_type="causal_bottom_right"),  # tiles of one segment, and of three
        Case(sq=200, skv=900, d=64, window=(150, 20), mask_type="causal_bottom_right", dropout=0.1, dtype=FP16),
        Case(b=2, sq=70, skv=700, d=40, mask="arbitrary", bias="b1ss"),
        Case(b=3, group=2, sq=300, skv=600, d=64, lengths="both", sinks=True, mask_type="causal", scale=3.0),
        Case(sq=200, skv=600, d=200, mask_type="causal_bottom_right", sinks=True),
        Case(sq=300, skv=600, d=256),  # in clusters
    ],
    ids=str,
)
def test_every_bit(case: Case) -> None:
    launches = compare(dataclasses.replace(case, key_segment=SHORT), processors=3)
    assert {"attention.attention", "attention_wide.attention"} & set(launches)


@pytest.mark.simulated
def test_packed() -> None:
    case = Case(b=3, group=2, sq=150, skv=600, d=64, lengths="both", mask_type="causal_bottom_right", key_segment=SHORT)
    cpu, _ = packed_inputs(case, [2, 0, 3, 1], 2)
    expected = packed_run(case, {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in cpu.items()})
    with Simulator(3):
        found = packed_run(case, cpu)
    for name, value in expected.items():
        assert_same_bits(value, found[name], name)


@pytest.mark.simulated
@pytest.mark.usefixtures("however_few_keys")
@pytest.mark.parametrize("when", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize(
    "case",
    [
        Case(b=2, hkv=2, group=4, sq=1, skv=1100, d=128),
        Case(group=3, sq=5, skv=700, d=64, mask_type="causal_bottom_right", dtype=FP16, scale=3.0),
        Case(hkv=2, group=2, sq=4, skv=915, d=72, e=40, window=(300, 60)),
        Case(b=3, hkv=2, group=2, sq=2, skv=600, d=64, lengths="both", sinks=True, mask_type="causal_bottom_right"),
        Case(b=2, group=8, sq=4, skv=520, d=200, e=256, sinks=True, mask="arbitrary"),
    ],
    ids=str,
)
def test_few_queries(case: Case, when: int) -> None:
    case = dataclasses.replace(case, key_segment=SHORT)
    given, options = inputs(case), (case.softmax_scale, case.mask_type, *case.window)
    more = [given[name] for name in ("bias", "slopes", "sinks", "q_lengths", "kv_lengths")]
    q, k, v = (given[name] for name in ("q", "k", "v"))
    rest = (*options, given["mask"], 0.0, None, *more, *[None] * 4, SHORT)
    expected = twin.attention(q, k, v, *rest)
    with Simulator(3, when) as gpu:
        found = twin.attention(q, k, v, *rest)
    assert gpu.launches == ["attention_decode.attention_scores", "attention_decode.attention_chain"]
    for name, one, other in zip(("out", "m", "inv"), expected, found, strict=True):
        assert_same_bits(one, other, f"{name} of {case}")


LENGTHS = (700, 3, 0, 256, 300)


def in_pages(d: int, keys: int = SHORT, longest: int = 1, page_size: int = 128, sinks: bool = False) -> list[Any]:
    """Arguments of `attention_paged`; `longest` queries of each sequence, `keys` of a segment."""
    scale = keys // SHORT
    lengths = [n * scale for n in LENGTHS]
    columns = -(-max(lengths) // page_size)
    table = torch.randperm(columns * len(lengths), generator=torch.Generator().manual_seed(5)).int()
    k, v = (numbers(seed, table.numel(), page_size, 2, d) for seed in (2, 3))
    queries = [min(longest, n) for n in lengths]
    starts = int32(0, *itertools.accumulate(queries))
    q = numbers(1, int(starts[-1]) + 2, 4, d)
    where = (int32(*queries), int32(*lengths), starts, longest, max(lengths))
    more = (numbers(4, 4, dtype=torch.float32) if sinks else None, keys)
    return [q, k, v, table.view(len(lengths), columns), 0.125, "causal_bottom_right", -1, -1, *where, *more]


def of_codes(given: list[Any]) -> list[Any]:
    (k, k_scales), (v, v_scales) = (codes_of(x) for x in given[1:3])
    return [given[0], k, v, k_scales, v_scales, *given[3:]]


@pytest.mark.simulated
@pytest.mark.usefixtures("however_few_keys")
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("longest", [1, 150])
@pytest.mark.parametrize("page_size", [128, 48])
def test_pages(page_size: int, longest: int, codes: bool) -> None:
    given = in_pages(64, longest=longest, page_size=page_size, sinks=longest > 1)
    given, op = (of_codes(given), twin.attention_paged_codes) if codes else (given, twin.attention_paged)
    expected = op(*given)
    with Simulator(3):
        found = op(*given)
    for name, one, other in zip(("out", "m", "inv"), expected, found, strict=True):
        assert_same_bits(one, other, name)


def test_one_segment_takes_the_kernels_of_one_chain() -> None:
    options = Options(0.125, "none", -1, -1)
    assert attention_decode.segment_of(options, 5000) == 0
    options = options._replace(key_segment=4096)
    assert attention_decode.segment_of(options, 4096) == 0
    assert attention_decode.segment_of(options, 4097) == 4096


# --- on a GPU, with the segments that users have ------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(sq=4200, skv=4200, d=128, mask_type="causal"),
        Case(b=2, sq=1, skv=4097, d=64, group=2, mask="padding"),
        Case(sq=200, skv=5000, d=64, mask_type="causal_bottom_right", dropout=0.1, dtype=FP16),
        Case(sq=300, skv=9000, d=128, window=(3000, 0), mask_type="causal_bottom_right", sinks=True),
        Case(sq=130, skv=5000, d=72, mask="arbitrary", bias="11ss", dropout=0.1),
        Case(b=3, group=2, sq=300, skv=9000, d=128, lengths="both", mask_type="causal_bottom_right"),
        Case(sq=140, skv=9000, d=256, dropout=0.1),
        Case(sq=300, skv=5000, d=192, e=128),  # in clusters
    ],
    ids=str,
)
def test_every_bit_on_a_gpu(case: Case) -> None:
    case = dataclasses.replace(case, key_segment=4096)
    cpu = inputs(case)
    cuda = {name: to_cuda(x) for name, x in cpu.items()}
    expected = run(case, cpu)
    for name, value in run(case, cuda).items():
        assert_same_bits(expected[name], value, f"{name} of {case}")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("keys", [4097, 9000, 20000])
def test_few_queries_on_a_gpu(rows: int, keys: int) -> None:
    case = Case(b=2, hkv=2, sq=rows, skv=keys, d=128, mask_type="causal_bottom_right", seed=rows)
    cpu = inputs(case)
    rest = (case.softmax_scale, case.mask_type, -1, -1, None, 0.0, None, *[None] * 9, 4096)
    expected = twin.attention(cpu["q"], cpu["k"], cpu["v"], *rest)
    for _ in range(3):  # whichever segment ends last
        found = twin.attention(*(to_cuda(cpu[name]) for name in ("q", "k", "v")), *rest)
        for name, one, other in zip(("out", "m", "inv"), expected, found, strict=True):
            assert_same_bits(one, other.cpu(), f"{name} of {rows} rows")


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("longest", [1, 150])
def test_pages_on_a_gpu(longest: int, codes: bool, device: torch.device) -> None:
    given = in_pages(128, keys=4096, longest=longest, sinks=longest == 1)
    given, op = (of_codes(given), twin.attention_paged_codes) if codes else (given, twin.attention_paged)
    found = op(*[x.to(device) if isinstance(x, torch.Tensor) else x for x in given])
    for name, one, other in zip(("out", "m", "inv"), op(*given), found, strict=True):
        assert_same_bits(one, other.cpu(), name)


@pytest.mark.gpu
def test_packed_on_a_gpu(device: torch.device) -> None:
    case = Case(b=3, group=2, sq=150, skv=9000, d=64, lengths="both", mask_type="causal_bottom_right", key_segment=4096)
    cpu, _ = packed_inputs(case, [2, 0, 3, 1], 2)
    expected = packed_run(case, {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in cpu.items()})
    for name, value in packed_run(case, cpu, device).items():
        assert_same_bits(expected[name], value, name)
