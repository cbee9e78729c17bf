"""FP8 codecs and the saturating cast: every code, every 16-bit word, and (slow) every fp32 word.

The oracle is built from ml_dtypes' value tables alone: a positive code k is right from the midpoint below it to
the midpoint above it, ties going to the even code. Midpoints are exact in float64 and in fp32.
"""

import math
import time
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch

from reference.numbers import formats
from reference.numbers.formats import E4M3, E5M2

BOTH = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["E4M3", "E5M2"])
ORACLE_DTYPES = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
CODES = np.arange(256, dtype=np.uint8)

# Powers of two, numbers with full mantissas, and scales that overflow and underflow the product.
SCALES = [1.0, 0.5, 56.0, 448.0 / 3.0, 1.0 / 3.0, 2.0**-120, 3.0e38, 1.1754944e-38, 1e-44]


def positive_values(fmt: formats.Format8) -> np.ndarray:
    """The finite values of the codes 0, 1, 2, ... as ml_dtypes has them, float64."""
    values = CODES[:128].view(ORACLE_DTYPES[fmt.name]).astype(np.float64)
    return values[np.isfinite(values)]


def oracle(products: np.ndarray, fmt: formats.Format8) -> np.ndarray:
    """The codes of fp32 `products`, by search among the midpoints."""
    values = positive_values(fmt)
    midpoints = (values[1:] + values[:-1]) / 2
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        magnitude = np.abs(products.astype(np.float64))
    low = np.searchsorted(midpoints, magnitude, side="left")
    high = np.searchsorted(midpoints, magnitude, side="right")
    code = np.where(low % 2 == 0, low, high) | np.where(np.signbit(products), 0x80, 0)
    return np.where(np.isnan(products), 0x7F, code).astype(np.uint8)


def product(x: torch.Tensor, scale: float) -> np.ndarray:
    """What is converted: fp32(x) · fp32(scale), rounded once (the float64 product is exact); NaN of an infinite x."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = (x.double().numpy() * np.float64(np.float32(scale))).astype(np.float32)
    return np.where(x.isinf().numpy(), np.float32(np.nan), found)


def codes_of(x: torch.Tensor, fmt: formats.Format8, scale: float = 1.0) -> np.ndarray:
    return formats.cast(x, fmt, scale).view(torch.uint8).numpy()


def every_word(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


# The formats themselves


@BOTH
def test_decode_gives_the_value_of_all_256_codes(fmt):
    decoded = formats.decode(torch.from_numpy(CODES), fmt)
    expected = CODES.view(ORACLE_DTYPES[fmt.name]).astype(np.float32)
    assert np.array_equal(decoded.numpy(), expected, equal_nan=True)
    assert np.array_equal(np.signbit(decoded.numpy()), CODES >= 0x80)
    native = torch.from_numpy(CODES).view(fmt.dtype)
    assert torch.equal(formats.decode(native).nan_to_num(7.0), native.float().nan_to_num(7.0))
    assert formats.decode(native.view(8, 4, 8)).shape == (8, 4, 8)


@BOTH
def test_constants_agree_with_torch_and_ml_dtypes(fmt):
    info, other = torch.finfo(fmt.dtype), ml_dtypes.finfo(ORACLE_DTYPES[fmt.name])
    assert fmt.largest == info.max == float(other.max)
    assert fmt.smallest_normal == info.smallest_normal == float(other.smallest_normal)
    assert fmt.value(1) == float(other.smallest_subnormal)
    assert fmt.mantissa_bits == other.nmant
    assert fmt.exponent_bits == other.nexp
    expected = CODES.view(ORACLE_DTYPES[fmt.name]).astype(np.float32)
    assert fmt.nan_codes == tuple(np.flatnonzero(np.isnan(expected)))
    assert fmt.infinity_codes == tuple(np.flatnonzero(np.isinf(expected)))
    assert fmt.values() == sorted(set(expected[np.isfinite(expected)].tolist()))
    assert formats.format_of(fmt.dtype) is fmt


def test_the_numbers_of_the_two_formats_as_published():
    assert (E4M3.largest, E4M3.smallest_normal, E4M3.value(1)) == (448, 2**-6, 2**-9)
    assert (E5M2.largest, E5M2.smallest_normal, E5M2.value(1)) == (57344, 2**-14, 2**-16)
    assert (E4M3.bias, E5M2.bias) == (7, 15)
    assert (len(E4M3.values()), len(E5M2.values())) == (253, 247)


@BOTH
def test_fields_put_together_again_give_the_code_and_the_value(fmt):
    for code in range(256):
        field = fmt.fields(code)
        assert field.sign << 7 | field.exponent << fmt.mantissa_bits | field.mantissa == code
        fraction = field.mantissa / 2**fmt.mantissa_bits
        if field.kind == "normal":
            assert abs(field.value) == (1 + fraction) * 2.0 ** (field.exponent - fmt.bias)
        elif field.kind in ("subnormal", "zero"):
            assert abs(field.value) == fraction * 2.0 ** (1 - fmt.bias)
        else:
            assert not math.isfinite(field.value)
    assert str(fmt.fields(fmt.largest_code)) == f"0x{fmt.largest_code:02X} = normal: {fmt.largest:g}"


@BOTH
def test_spacing_is_the_distance_to_the_next_value(fmt):
    values = positive_values(fmt)
    for low, high in pairwise(values):
        assert fmt.spacing(low) == fmt.spacing(-low) == fmt.spacing((low + high) / 2) == high - low
    assert fmt.spacing(math.inf) == fmt.spacing(fmt.largest) == values[-1] - values[-2]


# The cast


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scale", SCALES)
def test_cast_of_every_16_bit_word(fmt, dtype, scale):
    x = every_word(dtype)
    products = product(x, scale)
    expected = oracle(products, fmt)
    assert np.array_equal(codes_of(x, fmt, scale), expected)
    assert np.array_equal(formats.encode_by_integers(torch.from_numpy(products), fmt).numpy(), expected)
    # The widened words are the same numbers: fp32 input gives the same codes.
    assert np.array_equal(codes_of(x.float(), fmt, scale), expected)
    # And ml_dtypes after the clamp, its NaN apart.
    clamped = np.clip(products, -fmt.largest, fmt.largest).astype(ORACLE_DTYPES[fmt.name])
    assert np.array_equal(np.where(np.isnan(products), 0x7F, clamped.view(np.uint8)), expected)


@BOTH
def test_cast_beside_every_rounding_boundary(fmt):
    values = positive_values(fmt)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    near = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
    x = np.concatenate([*near, *(-p for p in near)])
    assert np.array_equal(codes_of(torch.from_numpy(x), fmt), oracle(x, fmt))


@BOTH
def test_ties_go_to_the_even_code_and_codes_come_back_as_themselves(fmt):
    values = positive_values(fmt)
    tied = codes_of(torch.from_numpy((values[1:] + values[:-1]) / 2).float(), fmt)
    assert np.array_equal(tied, [k + k % 2 for k in range(len(values) - 1)])
    own = CODES[[code not in fmt.nan_codes + fmt.infinity_codes for code in range(256)]]
    assert np.array_equal(codes_of(formats.decode(torch.from_numpy(own), fmt), fmt), own)


@pytest.mark.parametrize(
    ("fmt", "x", "code"),
    [
        (E4M3, 448.0, 0x7E),
        (E4M3, 464.0, 0x7E),  # half way to 480, which does not exist
        (E4M3, 3.4e38, 0x7E),
        (E4M3, 2.0**-10, 0x00),  # half the smallest subnormal: a tie, to even
        (E4M3, 2.0**-10 * (1 + 2.0**-23), 0x01),
        (E4M3, -(2.0**-11), 0x80),
        (E4M3, 2.0**-149, 0x00),
        (E4M3, -0.0, 0x80),
        (E5M2, 57344.0, 0x7B),
        (E5M2, 61440.0, 0x7B),
        (E5M2, -3.4e38, 0xFB),
        (E5M2, 2.0**-17, 0x00),
        (E5M2, -(2.0**-16), 0x81),
        (E5M2, -0.0, 0x80),
    ],
)
def test_special_values(fmt, x, code):
    assert codes_of(torch.tensor([x]), fmt)[0] == code
    assert formats.encode_by_integers(torch.tensor([x]), fmt)[0] == code


@BOTH
def test_the_cast_makes_nan_of_an_infinity_and_the_conversion_the_largest_number(fmt):
    infinities = torch.tensor([math.inf, -math.inf])
    largest = [fmt.largest_code, 0x80 | fmt.largest_code]
    assert formats.encode_by_integers(infinities, fmt).tolist() == largest
    for dtype in formats.WIDE_DTYPES:
        for scale in (1.0, 3.0, 2.0**-149, 3.4e38, 0.0, math.inf):
            for repeat in (1, 3, 40, 20_000):  # scalar loops, tails, vectors, pieces
                x = infinities.to(dtype).repeat(repeat)
                assert (codes_of(x, fmt, scale) == 0x7F).all(), (dtype, scale, repeat)
    for x, scale in ((3e38, 3e38), (-3e38, 2.0), (1.0, math.inf)):  # a product that overflows
        assert codes_of(torch.tensor([x]), fmt, scale)[0] == largest[x < 0]


@BOTH
def test_every_nan_becomes_0x7f_whatever_its_sign_and_payload(fmt):
    words = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -0x400000, -1, 0x7FABCDEF, -0x123456]
    x = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    assert x.isnan().all()
    for repeat in (1, 3, 40):  # scalar loops, tails and vectors
        assert (codes_of(x.repeat(repeat), fmt) == 0x7F).all()
    alone = torch.ones(70, 70)
    alone.fill_diagonal_(-math.nan)
    for row in alone:
        assert np.array_equal(codes_of(row, fmt) == 0x7F, row.isnan().numpy())
    # A NaN that the scaling makes: infinity times zero.
    assert codes_of(torch.tensor([math.inf, -math.inf]), fmt, 0.0).tolist() == [0x7F, 0x7F]


def test_cast_rounds_once_from_fp32_and_not_through_bf16():
    # 1.0625 + 2^-12 is beyond the middle between 1 and 1.125; bf16 would first round it onto the middle.
    x = torch.tensor([1.0625 + 2.0**-12])
    assert formats.decode(formats.cast(x, E4M3)).item() == 1.125
    assert formats.decode(formats.cast(x.bfloat16(), E4M3)).item() == 1.0


def test_cast_leaves_its_input_alone_and_takes_views():
    x = torch.randn(48, 33) * 300
    before = x.clone()
    q = formats.cast(x.t(), E4M3, 2.0)
    assert torch.equal(x, before)
    assert q.shape == (33, 48)
    assert q.is_contiguous()
    assert torch.equal(q.view(torch.uint8), formats.cast(x, E4M3, 2.0).view(torch.uint8).t())
    assert formats.cast(torch.empty(0, 16), E5M2).shape == (0, 16)


def test_tensors_that_require_gradients_are_read_as_they_are():
    x = torch.randn(5, 16, requires_grad=True)
    assert not formats.cast(x, E4M3).requires_grad
    assert not formats.amax(x).requires_grad
    assert formats.amax(x).item() == x.abs().max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widen_is_exact_for_every_word(dtype):
    x = every_word(dtype)
    wide = formats.widen(x.view(256, 256))
    assert wide.shape == (256, 256)
    assert np.array_equal(wide.view(-1).double().numpy(), x.double().numpy(), equal_nan=True)


def test_cast_does_not_depend_on_how_it_is_cut(monkeypatch):
    x = torch.randn(3000, generator=torch.Generator().manual_seed(5)) * 100
    whole = codes_of(x, E4M3, 1.7)
    monkeypatch.setattr(formats, "_CHUNK", 257)
    assert np.array_equal(codes_of(x, E4M3, 1.7), whole)


@BOTH
def test_a_torch_that_converts_otherwise_is_found_out_and_not_used(fmt, monkeypatch):
    assert formats.torch_conversion_is_exact(fmt), "on this machine the slow definition is in use"

    def truncating(values, fmt, out):
        values = values.clamp_(-fmt.largest, fmt.largest)
        words = values.view(torch.int32) & (-1 << (23 - fmt.mantissa_bits))
        out.copy_(words.view(torch.float32))

    def without_the_nan_sign(values, fmt, out):
        out.copy_(values.clamp_(-fmt.largest, fmt.largest))

    def without_clamp(values, fmt, out):
        out.copy_(values)
        out.view(torch.uint8).masked_fill_(out.view(torch.uint8) == 0xFF, 0x7F)

    # torch 2.13 saturates E4M3 by itself, other versions do not; E5M2 overflows to infinity in all of them.
    for wrong in (truncating, without_the_nan_sign, *([without_clamp] if fmt is E5M2 else [])):
        monkeypatch.setattr(formats, "_encode_by_torch", wrong)
        formats.torch_conversion_is_exact.cache_clear()
        assert not formats.torch_conversion_is_exact(fmt), wrong.__name__
    x = every_word(torch.bfloat16)
    assert np.array_equal(codes_of(x, fmt, 3.0), oracle(product(x, 3.0), fmt))
    formats.torch_conversion_is_exact.cache_clear()


@BOTH
def test_a_conversion_that_is_wrong_at_one_number_of_either_sign_is_found_out(fmt, monkeypatch):
    """At the ends of fp32's ranges, an infinity, a NaN, or where a code ends and another begins."""
    right = formats._encode_by_torch
    info = torch.finfo(torch.float32)
    numbers = [info.max, info.tiny, info.smallest_normal - info.smallest_normal * info.eps, 2.0**-149]
    numbers += [math.inf, math.nan, 0.0, fmt.value(1), fmt.value(1) / 2, fmt.largest, math.nextafter(fmt.largest, 0.0)]
    for number in numbers:
        word = torch.tensor([number]).view(torch.int32) & 0x7FFFFFFF
        for sign in (0, -(2**31)):

            def wrong(values, fmt, out, word=word | sign):
                there = values.view(torch.int32) == word
                right(values, fmt, out)
                out.view(torch.uint8)[there] ^= 1

            monkeypatch.setattr(formats, "_encode_by_torch", wrong)
            formats.torch_conversion_is_exact.cache_clear()
            assert not formats.torch_conversion_is_exact(fmt), (number, sign)
    formats.torch_conversion_is_exact.cache_clear()


# amax


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
def test_amax_ignores_nan_and_counts_infinity(dtype):
    def amax(*values):
        result = formats.amax(torch.tensor(values, dtype=dtype))
        assert result.dtype == torch.float32
        assert result.shape == ()
        return result.item()

    nan, inf = math.nan, math.inf
    assert amax(1.0, -3.0, 2.0) == 3.0
    assert amax(nan, -3.0, 2.0, nan) == 3.0
    assert amax(2.0, -inf, nan) == inf
    assert math.copysign(1, amax(nan)) == 1
    assert amax(nan, nan) == 0.0
    assert amax() == 0.0
    assert math.copysign(1, amax(-0.0, -0.0)) == 1


def test_amax_of_the_smallest_numbers():
    assert formats.amax(torch.tensor([-(2.0**-149), 0.0])).item() == 2.0**-149
    assert formats.amax(torch.tensor([2.0**-24], dtype=torch.float16)).item() == 2.0**-24


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 100_003])
def test_amax_finds_the_one_large_element_among_nan(size):
    generator = torch.Generator().manual_seed(size)
    for place in {0, size // 3, size - 1}:
        x = torch.randn(size, generator=generator)
        x[torch.rand(size, generator=generator) < 0.3] = -math.nan
        x[place] = -1000.0
        assert formats.amax(x).item() == 1000.0


# Refusals


def test_refusals():
    with pytest.raises(ValueError, match=r"x must be torch.float32.*got torch.float64"):
        formats.cast(torch.zeros(1, dtype=torch.float64), E4M3)
    with pytest.raises(ValueError, match=r"x must be torch.float32.*got torch.int32"):
        formats.amax(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"values must be torch.float32; got torch.bfloat16"):
        formats.encode_by_integers(torch.zeros(1, dtype=torch.bfloat16), E4M3)
    with pytest.raises(ValueError, match=r"dtype must be torch.float8_e4m3fn or .*; got torch.float16"):
        formats.format_of(torch.float16)
    with pytest.raises(ValueError, match=r"codes of dtype torch.uint8 need fmt"):
        formats.decode(torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"codes are E4M3 .*, but fmt says E5M2"):
        formats.decode(torch.zeros(1).to(E4M3.dtype), E5M2)
    with pytest.raises(ValueError, match=r"code must be an integer from 0 to 255; got 256"):
        E4M3.fields(256)
    with pytest.raises(ValueError, match=r"value must be a number; got nan"):
        E4M3.spacing(math.nan)
    with pytest.raises(ValueError, match=r"exponent_bits \+ mantissa_bits must be 7.*got 5 \+ 3"):
        formats.Format8("E5M3", torch.float8_e5m2, 5, 3, 15, True)


# Every fp32 word


def expected_codes(first: int, count: int, fmt: formats.Format8) -> np.ndarray:
    """The codes of the fp32 words first .. first + count - 1 (one sign): long runs between the midpoints."""
    values = positive_values(fmt)
    midpoints = ((values[1:] + values[:-1]) / 2).astype(np.float32).view(np.uint32).astype(np.int64)
    # A midpoint itself belongs to the even neighbour: to the run that starts with it, if that is the one.
    starts = midpoints + [k % 2 == 0 for k in range(len(midpoints))]
    edges = np.concatenate([[0], starts, [0x7F800001, 0x80000000]]) - (first & 0x7FFFFFFF)
    lengths = np.diff(np.clip(edges, 0, count))
    codes = np.arange(len(lengths)) | (0x80 if first >> 31 else 0)
    codes[-1] = 0x7F
    return np.repeat(codes.astype(np.uint8), lengths)


def test_expected_codes_is_the_oracle():
    for fmt in formats.FORMATS:
        for first in (0x3B800000, 0x43E00000, 0x47600000, 0x7F7FFF00, 0xC3DF0000, 0xFF7FFF00, 0x80000000):
            x = np.arange(first, first + 0x1000, dtype=np.uint32).view(np.float32)
            assert np.array_equal(expected_codes(first, x.size, fmt), oracle(x, fmt)), hex(first)


@pytest.mark.slow
@BOTH
@pytest.mark.usefixtures("one_thread")
def test_cast_of_all_2_to_the_32_fp32_words(fmt, capsys):
    # 4 MiB of fp32 at a time, on one thread: fresh pages and waiting threads cost more than the arithmetic.
    chunk, begun, compared = 1 << 20, time.perf_counter(), 0
    for first in range(0, 1 << 32, chunk):
        word = torch.arange(first, first + chunk, dtype=torch.int64).to(torch.int32)
        x = word.view(torch.float32)
        expected = expected_codes(first, chunk, fmt)
        of_cast = np.where(np.isinf(x.numpy()), np.uint8(0x7F), expected)
        assert np.array_equal(codes_of(x, fmt), of_cast), f"cast, words from 0x{first:08X}"
        by_integers = formats.encode_by_integers(x, fmt).numpy()
        assert np.array_equal(by_integers, expected), f"integers, words from 0x{first:08X}"
        compared += chunk
        if compared % (1 << 26):
            continue
        with capsys.disabled():
            elapsed = time.perf_counter() - begun
            print(f"\r{fmt.name}: {compared / 2**32:6.1%} of 2^32 words, {elapsed:.0f} s", end="", flush=True)
    assert compared == 1 << 32


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_a_conversion_is_tried_at_each_value_and_between_each_two(fmt: formats.Format8) -> None:
    """On both sides, of both signs, and beyond the largest: a monotone one that is right there is right everywhere."""
    pairs = formats._boundaries(fmt).view(torch.int32)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    tried = set(pairs[:, 0].tolist())
    values = [fmt.value(code) for code in range(fmt.largest_code + 1)]
    values.append(2 * values[-1] - values[-2])
    numbers = [*values, *((a + b) / 2 for a, b in pairwise(values)), math.inf]
    words = np.array(numbers, np.float32).view(np.int32)
    assert np.array_equal(words.view(np.float32), numbers)  # exactly
    for word in words.tolist():
        for near in {max(word - 1, 0), word, word + 1}:
            assert near in tried, (fmt, word)
            assert near - 2**31 in tried, (fmt, word)
