"""`twin::gemm_mxfp8`, `twin::gemm_nvfp4`: Transformer Engine's words, exact sums of blocks in order, refusals."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits
from shared.block_vectors import NOT_FINITE, VECTORS, Vector, made, recorded

from reference.numbers import block_formats, formats

twin = torch.ops.twin
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16


def pairs(*casts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """(a, b), (a's scales, b's), ... in one list, as the GEMMs take them."""
    return [x for both in zip(*casts, strict=True) for x in both]


@pytest.mark.parametrize("vector", VECTORS + NOT_FINITE, ids=str)
def test_nvfp4_has_the_words_of_transformer_engine(vector: Vector) -> None:
    expected = recorded()[f"nvfp4 product {vector}"]
    a, b = (twin.cast_nvfp4(made(vector, seed=seed), False, None) for seed in (0, 1))
    found = twin.gemm_nvfp4(*pairs(a, b), None, torch.float32)
    assert_same_bits(found.nan_to_num(12345.0), expected.nan_to_num(12345.0))
    assert torch.equal(found.isnan(), expected.isnan())


def rounded(exact: Fraction) -> np.float32:
    """An exact number in fp32, to nearest even, without a rounding to float64 on the way."""
    if not exact:
        return np.float32(0)
    exponent = max(math.frexp(float(exact))[1] - 24, -149)
    return np.float32(math.ldexp(round(exact / Fraction(2) ** exponent), exponent))  # Python rounds halves to even


def slow(a: np.ndarray, b: np.ndarray, sa: np.ndarray, sb: np.ndarray, block: int) -> np.float32:
    """One number of the chain, of rows of numbers and of scales: float64 that holds them exactly."""
    acc = np.float32(0)
    for i in range(len(sa)):
        here = slice(block * i, block * (i + 1))
        p = rounded(sum((Fraction(x) * Fraction(y) for x, y in zip(a[here], b[here], strict=True)), Fraction(0)))
        acc = acc + p * (np.float32(sa[i]) * np.float32(sb[i]))
    return acc


def wide_mxfp8(codes: torch.Tensor, scales: torch.Tensor) -> list[np.ndarray]:
    return [formats.decode(codes).double().numpy(), block_formats.decode_e8m0(scales).double().numpy()]


@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_mxfp8_is_a_chain_of_exact_blocks(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """Random codes, in which a block's numbers are of all sizes, and scales that are near each other."""
    g = torch.Generator().manual_seed(4)
    operands = []
    for rows, kind in zip((6, 5), kinds, strict=True):
        largest = formats.format_of(kind).largest_code
        codes = (
            torch.randint(0, largest + 1, (rows, 96), generator=g) | torch.randint(0, 2, (rows, 96), generator=g) << 7
        )
        scales = torch.randint(120, 130, (rows, 3), generator=g)
        operands.append((codes.to(torch.uint8).view(kind), scales.to(torch.uint8)))
    found = twin.gemm_mxfp8(*pairs(*operands), None, torch.float32)
    (a, sa), (b, sb) = (wide_mxfp8(*one) for one in operands)
    expected = [[slow(a[m], b[n], sa[m], sb[n], 32) for n in range(5)] for m in range(6)]
    assert_same_bits(found, torch.tensor(np.array(expected)))


def test_nvfp4_is_a_chain_of_exact_blocks() -> None:
    g = torch.Generator().manual_seed(4)
    a, b = (twin.cast_nvfp4(torch.randn(rows, 80, generator=g), False, None) for rows in (6, 5))
    found = twin.gemm_nvfp4(*pairs(a, b), None, torch.float32)
    wide = [(block_formats.decode_e2m1(c).double().numpy(), formats.decode(s).double().numpy()) for c, s, _ in (a, b)]
    (x, sx), (y, sy) = wide
    alpha = (a[2] * b[2]).numpy()[0] / np.float32(2688**2)
    expected = [[slow(x[m], y[n], sx[m], sy[n], 16) * alpha for n in range(5)] for m in range(6)]
    assert_same_bits(found, torch.tensor(np.array(expected)))


def operands(kind: str, rows: int, cols: int, seed: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    found: Any = twin.cast_mxfp8(x, E4M3, False) if kind == "mxfp8" else twin.cast_nvfp4(x, False, None)
    return tuple(found)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_the_epilogue_rounds_once(kind: str) -> None:
    multiply, add = getattr(twin, f"gemm_{kind}"), getattr(twin, f"gemm_{kind}_accumulate")
    args = pairs(operands(kind, 9, 70, 1), operands(kind, 11, 70, 2))
    plain, bias = multiply(*args, None, torch.float32), torch.randn(11).to(BF16)
    assert plain.shape == (9, 11)
    for dtype in formats.WIDE_DTYPES:
        assert_same_bits(multiply(*args, None, dtype), plain.to(dtype))
        assert_same_bits(multiply(*args, bias, dtype), (plain + bias.float()).to(dtype))
        out = torch.randn(9, 11).to(dtype)
        expected = (out.float() + plain).to(dtype)
        add(*args, out)
        assert_same_bits(out, expected)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 32), (3, 0, 32), (3, 4, 0)])
def test_nothing_is_zero(kind: str, m: int, n: int, k: int) -> None:
    multiply = getattr(twin, f"gemm_{kind}")
    found = multiply(*pairs(operands(kind, m, k, 1), operands(kind, n, k, 2)), None, torch.float32)
    assert torch.equal(found, torch.zeros(m, n))


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_refusals(kind: str) -> None:
    multiply = getattr(twin, f"gemm_{kind}")
    a, b, *rest = pairs(operands(kind, 4, 64, 1), operands(kind, 4, 64, 2))
    shorter = pairs(operands(kind, 4, 64, 1), operands(kind, 4, 32, 2))
    with pytest.raises(ValueError, match=rf"^twin::gemm_{kind}: b has .*and a .*; .* multiple of"):
        multiply(*shorter, None, BF16)
    with pytest.raises(TypeError, match=rf"^twin::gemm_{kind}: a is torch\.bfloat16; .* is accepted"):
        multiply(torch.ones(4, 64, dtype=BF16), b, *rest, None, BF16)
    with pytest.raises(ValueError, match=rf"^twin::gemm_{kind}: a_scales must be contiguous"):
        multiply(a, b, rest[0][:2], *rest[1:], None, BF16)
    with pytest.raises(ValueError, match="bias has shape"):
        multiply(a, b, *rest, torch.ones(3), BF16)
    with pytest.raises(ValueError, match="out has shape"):
        getattr(twin, f"gemm_{kind}_accumulate")(a, b, *rest, torch.ones(3, 4))
