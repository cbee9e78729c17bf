"""reference.numbers.elementary: its bits, its errors against float64, and what the kernels of it cost in
instructions."""

import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import record_elementary as digest
from numba import njit
from shared import sass

from reference.numbers import elementary
from reference.support import numba_jit

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "elementary_h200.npz"
NAN = math.nan
# Special values of what grows like x, and of its derivative.
GROWING = [(0.0, 0.0), (-0.0, -0.0), (3e38, 3e38), (-3e38, -0.0), (math.inf, math.inf)]
LEVEL = [(0.0, 0.5), (-0.0, 0.5), (3e38, 1.0), (-3e38, 0.0)]
# Machine instructions of one evaluation.
INSTRUCTIONS = {
    "exp": 7,
    "exp2_grid": 3,
    "gelu": 7,
    "dgelu": 11,
    "silu": 5,
    "dsilu": 6,
    "gelu_f32": 18,
    "dgelu_f32": 22,
    "silu_f32": 16,
    "dsilu_f32": 17,
}


def words(x: np.ndarray | torch.Tensor) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def every_nth_word(first: int, last: int, step: int) -> torch.Tensor:
    return torch.from_numpy(np.arange(first, last, step, dtype=np.uint32).view(np.float32))


def truth_of(name: str, x: torch.Tensor) -> torch.Tensor:
    """The function in float64."""
    x = x.double()
    if name == "exp":
        return torch.exp(x)
    if name == "rsqrt":
        return 1 / torch.sqrt(x)
    z, slope = x, torch.ones_like(x)
    if name.endswith("gelu"):
        both = 2 * (2 / torch.pi) ** 0.5
        z, slope = both * (x + 0.044715 * x**3), both * (1 + 3 * 0.044715 * x * x)
    e = torch.exp(-z.abs())
    sigmoid = torch.where(z < 0, e, 1.0) / (1 + e)
    return sigmoid + x * (e / (1 + e) ** 2) * slope if name.startswith("d") else x * sigmoid


def ulps(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Errors of fp32 `y` against float64 `t`, in ulp of `t`, |y - t| / 2^(floor(log2|t|) - 23)."""
    _, exponent = torch.frexp(t)
    return (y.double() - t).abs() * torch.exp2(24.0 - exponent.clamp(min=-125).double())


def sixteen_bit_values(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of bf16 or fp16, in order of their words, as fp32."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return x[x.isfinite()]


def e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The E4M3 values of fp32(x) · scale, saturated (as values: -0 equals 0)."""
    return (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


def to_fp32(exact: Fraction) -> float:
    """Round a rational in fp32's normal range to nearest even, by integers."""
    if exact == 0:
        return 0.0
    exponent = math.frexp(float(exact))[1] - 24
    scaled = abs(exact) / Fraction(2) ** exponent
    while scaled >= 1 << 24:
        scaled, exponent = scaled / 2, exponent + 1
    while scaled < 1 << 23:
        scaled, exponent = scaled * 2, exponent - 1
    return math.copysign(round(scaled) * 2.0**exponent, exact)  # Python's round is to nearest even


class TestArithmetic:
    def test_fma_rounds_once(self) -> None:
        @njit
        def fma(a, b, c):  # type: ignore[no-untyped-def]
            return numba_jit.fma(a, b, c)

        rng = np.random.default_rng(0)
        for _ in range(2000):
            a, b = rng.standard_normal(2).astype(np.float32)
            # c close to -a b: the case in which two roundings, or one through float64, go wrong.
            c = np.float32(-a * b * rng.choice([1.0, 1.0, 0.5, 2.0**-24, 2.0**-29, 2.0**24]))
            exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
            assert fma(a, b, c) == to_fp32(exact), (a, b, c)

    @pytest.mark.parametrize("name", [*elementary.SCALARS, *elementary.SIGMOIDS])
    def test_no_float64_in_the_machine_code(self, name: str) -> None:
        elementary.evaluate(name, np.ones(1, dtype=np.float32))
        (ir,) = elementary._loop(name).inspect_llvm().values()
        assert "double" not in ir
        assert not re.search(r"\b(fast|contract|reassoc|afn|arcp)\b", ir), "an operation may be rewritten"

    def test_rsqrt_is_two_correct_roundings(self) -> None:
        x = every_nth_word(0x00000001, 0x7F800000, 1009)
        # sqrt and division of fp32 values through float64 are correctly rounded (53 >= 2 * 24 + 2 bits).
        root = x.double().sqrt().float()
        assert np.array_equal(words(elementary.rsqrt(x)), words((1.0 / root.double()).float()))


class TestSpecialValues:
    @pytest.mark.parametrize(
        ("function", "cases"),
        [
            ("exp", [(0.0, 1.0), (-0.0, 1.0), (-math.inf, 0.0), (NAN, NAN), (-88.0, 0.0), (-1e30, 0.0)]),
            ("exp2_grid", [(0.0, 1.0), (-126.0, 2.0**-126), (-126.5, 0.0), (-math.inf, 0.0), (NAN, NAN)]),
            ("exp2_grid", [(5.0, 32.0), (-5.0, 2.0**-5), (128.0, math.inf), (math.inf, math.inf)]),
            ("rsqrt", [(4.0, 0.5), (0.0, math.inf), (-0.0, -math.inf), (math.inf, 0.0), (-1.0, NAN), (NAN, NAN)]),
            ("log", [(1.0, 0.0), (0.0, -math.inf), (-0.0, -math.inf), (math.inf, math.inf), (-1.0, NAN), (NAN, NAN)]),
            ("log", [(-math.inf, NAN), (2.0**-149, -103.27892990343184), (2.0**-126, -87.33654475055310)]),
            ("gelu", [*GROWING, (-math.inf, NAN), (NAN, NAN)]),
            ("dgelu", [*LEVEL, (math.inf, NAN), (NAN, NAN)]),
            ("silu", [*GROWING, (-math.inf, NAN), (NAN, NAN)]),
            ("dsilu", [*LEVEL, (math.inf, NAN), (NAN, NAN)]),
            ("qgelu", [*GROWING, (-math.inf, NAN), (NAN, NAN)]),
            ("dqgelu", [*LEVEL, (math.inf, NAN), (NAN, NAN)]),
            ("sigmoid", [*LEVEL, (math.inf, 1.0), (-math.inf, 0.0), (NAN, NAN)]),
            ("dsigmoid", [(0.0, 0.25), (-0.0, 0.25), (100.0, 0.0), (-1e30, 0.0), (math.inf, 0.0), (NAN, NAN)]),
        ],
    )
    def test_values(self, function: str, cases: list[tuple[float, float]]) -> None:
        sixteen = function in elementary.ACTIVATIONS or function in elementary.SIGMOIDS
        for dtype in (torch.float32, torch.bfloat16) if sixteen else (torch.float32,):
            x = torch.tensor([case[0] for case in cases], dtype=dtype)
            # What grows like x gives x itself back: rounded to the input's type.
            expected = torch.tensor([case[1] for case in cases]).to(dtype).float()
            y = getattr(elementary, function)(x)
            assert y.dtype == torch.float32
            same = (words(y) == words(expected)) | (y.isnan() & expected.isnan()).numpy()
            assert same.all(), (dtype, list(zip(x.tolist(), y.tolist(), expected.tolist(), strict=True)))

    def test_shapes_and_strides_are_kept(self) -> None:
        x = torch.randn(6, 4).t()[:, ::2]
        assert torch.equal(elementary.gelu(x), elementary.gelu(x.contiguous()))
        assert elementary.silu(x.to(torch.bfloat16)).shape == x.shape
        assert elementary.exp(torch.empty(0, 3)).shape == (0, 3)

    @pytest.mark.parametrize("name", ["exp", "exp2_grid", "rsqrt", "gelu"])
    def test_other_dtypes_are_refused(self, name: str) -> None:
        with pytest.raises(TypeError, match=rf"{name}: x.dtype is torch.float64; the function is defined for"):
            getattr(elementary, name)(torch.zeros(2, dtype=torch.float64))


class TestErrors:
    """Against float64. The bounds are measured ones (docs/elementary.md), so that a changed bit shows."""

    def test_exp(self) -> None:
        x = every_nth_word(0x80000000, 0xC2AEAC50, 257)
        truth = truth_of("exp", x)
        normal = truth >= 2.0**-126
        # f²/2 left out: 0.24 ulp at most; the recorded power of two: below 2; the last rounding: 0.5.
        assert ulps(elementary.exp(x), truth)[normal].max() <= 2.7

    def test_exp_never_decreases(self) -> None:
        x = every_nth_word(0x80000000, 0xC2B00000, 509)
        y = elementary.exp(x)
        assert (y[1:] <= y[:-1]).all()

    def test_exp2_grid(self) -> None:
        y = torch.cat([every_nth_word(0x80000000, 0xC2FC0000, 257), every_nth_word(0, 0x42FE0000, 257)])
        truth = torch.exp2(y.double())
        # Half a grid step is ln(2) 2^-16 = 1.058e-5; the recorded word adds at most 2^-23.
        relative = (elementary.exp2_grid(y).double() - truth).abs() / truth
        assert relative.max() <= math.log(2) * 2.0**-16 + 2.0**-22

    def test_rsqrt(self) -> None:
        x = every_nth_word(0x00800000, 0x7F800000, 509)
        assert ulps(elementary.rsqrt(x), truth_of("rsqrt", x)).max() <= 1.5

    def test_log(self) -> None:
        """Below one ulp of positive numbers, and most of all where cross-entropy asks: from 1 to a vocabulary."""
        x = torch.cat([every_nth_word(1, 0x7F800000, 1009), every_nth_word(0x3F700000, 0x48800000, 61)])
        x = x[x != 1]
        truth = torch.log(x.double())
        assert ulps(elementary.log(x), truth).max() <= 0.85

    @pytest.mark.slow
    def test_log_of_every_positive_number(self) -> None:
        for start in range(1, 0x7F800000, 1 << 24):
            x = every_nth_word(start, min(start + (1 << 24), 0x7F800000), 1)
            x = x[x != 1]
            assert ulps(elementary.log(x), torch.log(x.double())).max() <= 0.9

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("name", elementary.ACTIVATIONS)
    def test_activations(self, name: str, dtype: torch.dtype) -> None:
        if dtype == torch.float32:
            x = torch.cat([every_nth_word(s | 0x38000000, s | 0x41800000, 97) for s in (0, 0x80000000)])
        else:
            x = sixteen_bit_values(dtype)
        y = getattr(elementary, name)(x.to(dtype))
        truth = truth_of(name, x)
        difference = (y.double() - truth).abs()
        if name.startswith("d"):
            # s + x s (1 - s) z': the rounding of s, at most 2^-23, is multiplied by x z', about 20 where s still
            # differs from 1. The terms cancel where the derivative crosses zero, so the bound is absolute.
            assert difference.max() <= 20 * 2.0**-23
        else:
            # z has a relative error of about 2^-24, so e^-|z| one of |z| times that: |z| < 10 above 2^-14.
            assert (difference / truth.abs().clamp(min=2.0**-14)).max() <= 14 * 2.0**-23
        assert y.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", elementary.ACTIVATIONS)
    def test_fp8_codes_are_float64s(self, name: str, dtype: torch.dtype) -> None:
        x = sixteen_bit_values(dtype)
        y, truth = getattr(elementary, name)(x.to(dtype)), truth_of(name, x)
        for scale in (1.0, 16.0, 64.0, 256.0):
            assert torch.equal(e4m3(y, scale), e4m3(truth, scale))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", elementary.ACTIVATIONS)
    def test_the_fp32_form_is_close_to_the_recorded_one(self, name: str, dtype: torch.dtype) -> None:
        x = sixteen_bit_values(dtype)
        recorded, computed = getattr(elementary, name)(x.to(dtype)), getattr(elementary, name)(x)
        # Both are within the bounds of test_activations of the same truth.
        bound = 20 * 2.0**-23 if name.startswith("d") else 14 * 2.0**-23 * recorded.abs().clamp(min=2.0**-14)
        assert ((recorded - computed).abs() <= 2 * bound).all()


class TestRecorded:
    def test_ex2_periods_rise_and_are_close_to_powers_of_two(self) -> None:
        truth = np.exp2(np.arange(32768) / 32768)
        for table in elementary.powers_of_two().view(np.float32).reshape(2, 32768):
            assert table[0] == 1.0
            assert (np.diff(table) > 0).all()
            # Two words from the nearest at most (counted when they were recorded).
            assert (np.abs(table - truth) <= 2.5 * 2.0**-23).all()

    @pytest.mark.parametrize("name", digest.KERNEL_NAMES)
    def test_digests_of_some_words(self, name: str) -> None:
        """Around ±1, ±2^-20, ±100, infinity and NaN: 4 of the 256 blocks of 2^24 words."""
        with np.load(GOLDEN) as golden:
            for index in (0x35, 0x7F, 0xBF, 0xC1):
                assert digest.block(name, index) == int(golden[name][index]), f"block {index:#x}"

    def test_a_single_wrong_bit_changes_a_digest(self) -> None:
        def wrong(name: str, x: np.ndarray) -> np.ndarray:
            y = elementary.evaluate(name, x)
            if x.view(np.uint32)[0] == 0x3F000000:
                y.view(np.uint32)[77] ^= 1
            return y

        assert digest.block("exp", 0x3F, wrong) != digest.block("exp", 0x3F)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", digest.KERNEL_NAMES)
    def test_digests_of_all_words(self, name: str) -> None:
        with np.load(GOLDEN) as golden:
            assert np.array_equal(digest.reference_digest(name, 2), golden[name])


class TestInstructions:
    """NUMERICS' budget: exp about 10 fp32 instructions, gelu and dgelu 40, no slow path."""

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("function", INSTRUCTIONS)
    def test_the_chosen_forms(self, function: str) -> None:
        counts = sass.per_element(function)
        assert sum(counts.values()) == INSTRUCTIONS[function], counts
        assert not sass.has_slow_path(counts)
        assert sum(counts.values()) <= (10 if function.startswith("exp") else 40)

    def test_an_ieee_division_is_seen(self) -> None:
        assert sass.has_slow_path(sass.per_element("rsqrt"))

    def test_the_page_states_these_counts(self) -> None:
        page = (ROOT / "docs" / "log" / "elementary.md").read_text("utf-8")
        for function, count in (INSTRUCTIONS | {"exp_grid15": INSTRUCTIONS["exp2_grid"]}).items():
            if function != "exp2_grid":
                assert re.search(rf"^\| \*?\*?`{function}`\*?\*? \|[^|]*\| {count}\b", page, re.MULTILINE), function


@pytest.mark.gpu
class TestOnHopper:
    @pytest.mark.parametrize("name", digest.KERNEL_NAMES)
    def test_every_fp32_word(self, name: str) -> None:
        with np.load(GOLDEN) as golden:
            differ = np.flatnonzero(digest.kernel_digest(name) != golden[name])
        assert not differ.size, digest.first_differences(name, int(differ[0]))

    def test_log(self) -> None:
        """Every 101st word, and all around 1; the digests were recorded before there was a logarithm."""
        for first, last, step in ((0, (1 << 32) - 1, 101), (0x3F000000, 0x40000000, 1)):
            for start in range(first, last, step << 24):
                x = every_nth_word(start, min(start + (step << 24), last), step)
                expected, y = elementary.log(x), digest.apply("log", x.cuda()).cpu()
                same = (words(expected) == words(y)) | (expected.isnan() & y.isnan()).numpy()
                assert same.all(), x[int(np.flatnonzero(~same)[0])]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", elementary.ACTIVATIONS)
    def test_every_16_bit_word(self, name: str, dtype: torch.dtype) -> None:
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        expected, y = getattr(elementary, name)(x), digest.apply(name, x.float().cuda()).cpu()
        same = (words(expected) == words(y)) | (expected.isnan() & y.isnan()).numpy()
        assert same.all()
