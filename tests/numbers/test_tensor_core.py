"""The model of the tensor core against words that an H200 computed, and against sums of fractions."""

import json
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from optimized import recordings
from optimized.recordings import tensor_core_cases as inputs
from optimized.recordings.tensor_core import DTYPES
from reference.numbers import tensor_core
from reference.numbers.tensor_core import model

FP8_PAIRS = [kind for kind in inputs.KINDS if kind.startswith("e")]


def tensors(kind: str, a: np.ndarray, b: np.ndarray) -> list[torch.Tensor]:
    """Codes as torch tensors of their formats."""
    signed = np.uint8 if a.dtype == np.uint8 else np.int16
    return [torch.from_numpy(x.view(signed)).view(DTYPES[f]) for x, f in zip((a, b), kind.split("."), strict=True)]


def words_of(result: torch.Tensor) -> np.ndarray:
    """fp32 words."""
    return result.numpy().view(np.uint32)


def chain(kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D words of steps chained over K, from C words."""
    depth = inputs.KINDS[kind][2].k
    for k in range(0, a.shape[1], depth):
        left, right = tensors(kind, a[:, k : k + depth].copy(), b[:, k : k + depth].copy())
        c = words_of(tensor_core.step(left, right, torch.from_numpy(c.view(np.float32))))
    return c


def assert_words(got: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Every word equal, or the first difference with its place."""
    wrong = np.argwhere(got != expected)
    if len(wrong):
        place = tuple(int(i) for i in wrong[0])
        pytest.fail(
            f"{name}: {len(wrong)} of {got.size} words differ, the first at {place}: "
            f"{got[place]:08x} computed, {expected[place]:08x} expected."
        )


# -- recorded words ----------------------------------------------------------------------------------------


def test_the_inputs_are_those_of_the_recording():
    recorded = recordings.arrays("tensor_core_h200")
    checksums = json.loads(str(recorded["about"]))["input_crc32"]
    assert {case.name: case.checksum() for case in inputs.cases()} == checksums


def test_every_recorded_step():
    tallies = [(recorded.formats, recorded.compare()) for recorded in recordings.steps()]
    assert len(tallies) == 14 + len(list(inputs.cases()))
    assert {formats: tally.different for formats, tally in tallies} == dict.fromkeys(inputs.KINDS, 0)
    assert sum(tally.different for _, tally in tallies) == 0
    assert sum(tally.compared for _, tally in tallies) == 73728 + 135680


def test_recorded_words_without_c_by_gemm():
    checked, recorded = 0, recordings.arrays("tensor_core_h200")
    for case in inputs.cases():
        kind, name = case.name.rsplit(".", 1)
        if name.startswith("chain") or name in ("no_c", "zeros", "low_edge"):
            for tile in range(len(case.a)):
                got = tensor_core.gemm(*tensors(kind, case.a[tile], case.b[tile]))
                assert_words(words_of(got), recorded[case.name][tile], case.name)
            checked += 1
    assert checked == 33


def test_cublaslt_products():
    """Where few tiles meet a long K, cuBLASLt cuts K into slices for several blocks: only with them the words agree."""
    sliced = 0
    for product in recordings.products():
        assert product.compare().different == 0, product.title
        if product.slices > 1:
            sliced += 1
            whole = tensor_core.gemm(product.a, product.b, product.accumulate)
            assert not torch.equal(whole, product.out), f"{product.title}: sliced no more?"
    assert sliced == 4


# -- other arithmetic --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FP8_PAIRS)
def test_every_product_of_two_fp8_codes(kind):
    codes = np.arange(256, dtype=np.uint8)[:, None]
    got = words_of(tensor_core.gemm(*tensors(kind, codes, codes)))
    wide = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    left, right = (codes.view(wide[name]).astype(np.float64) for name in kind.split("."))
    with np.errstate(invalid="ignore"):
        exact = (left * right.T).astype(np.float32) + np.float32(0)  # a product of -0 gives +0
    exact_words = np.where(np.isnan(exact), np.uint32(model.NAN_WORD), exact.view(np.uint32))
    assert_words(got, exact_words, kind)


def fraction_step(a: np.ndarray, b: np.ndarray, c: np.ndarray, formats, instruction) -> int:
    """One output word of a finite step, in Python's fractions: the rule, said a second time."""
    terms = []
    for x, y in zip(a, b, strict=True):
        pairs = [(int(z), f) for z, f in zip((x, y), formats, strict=True)]
        terms.append([number(code, fmt) for code, fmt in pairs])
    scaled = [(s1 * s2, e1 + e2) for (s1, e1), (s2, e2) in terms if s1 * s2]
    own, own_exponent = number(int(c), model.FP32)
    scaled += [(own, own_exponent)] if own else []
    top = max([e for _, e in scaled], default=-133)
    unit = Fraction(2) ** (max(top, -133) - instruction.aligned_fraction_bits)
    total = sum(int(s * Fraction(2) ** e / unit) for s, e in scaled) * unit  # int() truncates toward zero
    if total == 0:
        return 0
    sign, size = (0x80000000 if total < 0 else 0), abs(total)
    exponent = 0
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    while Fraction(2) ** exponent > size:
        exponent -= 1
    if exponent > 127:
        return sign | model.INF_WORD
    exponent = max(exponent, -126)
    kept = int(size / Fraction(2) ** (exponent - instruction.result_fraction_bits))
    kept <<= 23 - instruction.result_fraction_bits
    if kept == 0:
        return 0
    return sign | (((exponent + 126) << 23) + kept if kept >= 1 << 23 else kept)


def number(code: int, fmt: model.FloatFormat) -> tuple[Fraction, int]:
    """(signed significand, exponent by the field) of a finite code."""
    fraction = code & ((1 << fmt.fraction_bits) - 1)
    field = (code >> fmt.fraction_bits) & ((1 << fmt.exponent_bits) - 1)
    sign = -1 if code >> (fmt.fraction_bits + fmt.exponent_bits) else 1
    significand = Fraction(fraction, 1 << fmt.fraction_bits) + (1 if field else 0)
    return sign * significand, max(field, 1) - fmt.bias


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_the_rule_said_in_fractions(kind):
    *formats, instruction = inputs.KINDS[kind]
    for case in inputs.cases(1, "fractions"):
        own, name = case.name.rsplit(".", 1)
        if own != kind or case.a.shape[2] != instruction.k or "special" in name:
            continue
        got = chain(kind, case.a[0], case.b[0], case.c[0])
        for m, n in ((0, 0), (17, 3), (63, 7)):
            expected = fraction_step(case.a[0, m], case.b[0, n], case.c[0, m, n], formats, instruction)
            assert got[m, n] == expected, f"{case.name}[{m}, {n}]: {got[m, n]:08x}, by fractions {expected:08x}"


# -- the interface -----------------------------------------------------------------------------------------


def test_a_zero_sum_is_plus_zero_and_c_may_be_left_out():
    a = torch.zeros(2, 32).to(torch.float8_e4m3fn)
    for c in (None, torch.full((2, 2), -0.0)):
        assert (words_of(tensor_core.step(a, a, c)) == 0).all()
    assert words_of(tensor_core.step(a[:, :0], a[:, :0])).tolist() == [[0, 0], [0, 0]]


def test_a_step_drops_what_lies_14_bits_below_the_largest_term():
    a = torch.zeros(1, 32)
    a[0, 0], a[0, 1:] = 1.0, 2.0**-7
    a = a.to(torch.float8_e4m3fn)
    b = a.clone().view(torch.uint8).view(torch.float8_e4m3fn)
    # 31 products of 2^-14: below the 13 fraction bits that stand beside 1 * 1.
    assert tensor_core.step(a, b).item() == 1.0
    assert (a.float() @ b.float().T).item() == 1.0 + 31 * 2.0**-14


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (lambda f8, h: (f8, h), r"a is torch.float8_e4m3fn and b torch.bfloat16; both must be FP8"),
        (lambda f8, h: (f8.float(), f8), r"a is torch.float32; float8_e4m3fn"),
        (lambda f8, h: (f8[0], f8), r"a has shape \(8,\); a matrix \[rows, K\]"),
        (lambda f8, h: (f8, f8[:, :4]), r"a has K = 8 and b has K = 4"),
        (lambda f8, h: (f8, f8.to("meta")), r"b is on meta; .* runs on the CPU"),
    ],
)
def test_operands_are_refused_with_a_sentence(arguments, sentence):
    fp8, half = torch.zeros(4, 8).to(torch.float8_e4m3fn), torch.zeros(4, 8, dtype=torch.bfloat16)
    for function in (tensor_core.step, tensor_core.gemm):
        with pytest.raises((TypeError, ValueError), match=sentence):
            function(*arguments(fp8, half))


def test_step_and_gemm_refuse_what_they_do_not_take():
    a, h = torch.zeros(4, 40).to(torch.float8_e5m2), torch.zeros(4, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"a has K = 40; one step of torch.float8_e5m2 takes at most 32"):
        tensor_core.step(a, a)
    with pytest.raises(ValueError, match=r"c is torch.float32 \(4, 3\) on cpu; float32 \(4, 4\)"):
        tensor_core.step(h, h, torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"accumulate is 'slow'; 'fast' or 'split'"):
        tensor_core.gemm(a, a, "slow")
    with pytest.raises(ValueError, match=r"split accumulation is defined for FP8 operands"):
        tensor_core.gemm(h, h, "split")
