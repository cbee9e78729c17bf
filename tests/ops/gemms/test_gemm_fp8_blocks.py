"""twin::gemm_fp8_blocks: a loop over blocks that follows the contract, dialects that agree, and refusals."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from shared import scaled_products
from shared.bits import assert_same_bits

from reference.numbers import tensor_core
from reference.ops.casts.cast_blocks import scale_shape

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
SQUARES = [(False, False), (False, True), (True, False)]
twin = torch.ops.twin


def operand(rows: int, k: int, square: bool, seed: int, dtype: torch.dtype = E4M3, power: bool = False) -> Any:
    """Codes and scales; with `power` these are powers of two."""
    draw = torch.Generator().manual_seed(seed)
    scales = torch.randn(scale_shape(rows, k, square), generator=draw) * 4
    return torch.randn(rows, k, generator=draw).to(dtype), torch.exp2(scales.round() if power else scales)


def rounded(exact: Fraction) -> np.float32:
    """To fp32, nearest even; of a double beside it the half that is lost decides."""
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    even = {float(x): not int(np.float32(x).view(np.uint32)) & 1 for x in candidates}
    return min(candidates, key=lambda x: (abs(Fraction(float(x)) - exact), not even[float(x)]))


@pytest.mark.parametrize("squares", SQUARES)
def test_words_follow_the_contract(squares: tuple[bool, bool]) -> None:
    """In exact fractions, rounded where the contract says."""
    m, n, k = 5, 16, 272
    (a, sa), (b, sb) = operand(m, k, squares[0], 1), operand(n, k, squares[1], 2)
    found = twin.gemm_fp8_blocks(a, b, sa, sb, *squares, None, torch.float32)
    for i in range(m):
        for j in range(n):
            acc = np.float32(0)
            for block in range(3):
                part = slice(128 * block, 128 * (block + 1))
                p = tensor_core.gemm(a[i : i + 1, part].contiguous(), b[j : j + 1, part].contiguous()).item()
                of_a = sa[i // 128, block] if squares[0] else sa[block, i]
                of_b = sb[j // 128, block] if squares[1] else sb[block, j]
                p, of_a, of_b = np.float32(p), np.float32(of_a), np.float32(of_b)
                left, right = (p, of_a * of_b) if any(squares) else (p * of_a, of_b)
                acc = rounded(Fraction(float(left)) * Fraction(float(right)) + Fraction(float(acc)))
            assert np.float32(found[i, j]) == acc


@pytest.mark.parametrize("name", scaled_products.FORMS)
def test_words_are_those_of_cublaslt(name: str) -> None:
    squares = scaled_products.FORMS[name]
    (a, sa), (b, sb) = scaled_products.operands(squares)
    with np.load(scaled_products.PATH) as recorded:
        wanted = torch.from_numpy(recorded[name])
    assert_same_bits(twin.gemm_fp8_blocks(a, b, sa, sb, *squares, None, torch.float32), wanted)


@pytest.mark.parametrize("squares", SQUARES)
def test_with_powers_of_two_each_promotion_gives_the_same_words(squares: tuple[bool, bool]) -> None:
    """The scales' product first, then an addition."""
    m, n, k = 130, 144, 400
    (a, sa), (b, sb) = operand(m, k, squares[0], 3, power=True), operand(n, k, squares[1], 4, power=True)
    acc = torch.zeros(m, n)
    for block in range(4):
        part = slice(128 * block, 128 * (block + 1))
        p = tensor_core.gemm(a[:, part].contiguous(), b[:, part].contiguous())
        of_a = sa[:, block].repeat_interleave(128)[:m] if squares[0] else sa[block, :m]
        of_b = sb[:, block].repeat_interleave(128)[:n] if squares[1] else sb[block, :n]
        acc = acc + p * (of_a[:, None] * of_b)
    assert_same_bits(twin.gemm_fp8_blocks(a, b, sa, sb, *squares, None, torch.float32), acc)


def test_scales_of_one_are_split_accumulation() -> None:
    a, b = operand(40, 1040, False, 5)[0], operand(48, 1040, True, 6)[0]
    bias = torch.randn(48, generator=torch.Generator().manual_seed(7)).to(BF16)
    ones = torch.ones(scale_shape(40, 1040, False)), torch.ones(scale_shape(48, 1040, True))
    one = torch.ones(1)
    found = twin.gemm_fp8_blocks(a, b, *ones, False, True, bias, BF16)
    assert_same_bits(found, twin.gemm_fp8(a, b, one, one, bias, BF16, "split"))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_gradient_is_added_to(dtype: torch.dtype) -> None:
    (a, sa), (b, sb) = operand(24, 144, False, 8, E5M2), operand(32, 144, False, 9)
    out = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = (out.float() + twin.gemm_fp8_blocks(a, b, sa, sb, False, False, None, torch.float32)).to(dtype)
    twin.gemm_fp8_blocks_accumulate(a, b, sa, sb, False, False, out)
    assert_same_bits(out, wanted)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"a": torch.zeros(8, 32)}, "a is torch.float32; gemm_fp8_blocks takes float8"),
        ({"a": torch.zeros(8, 48, dtype=E4M3)}, "a has K = 48 and b has K = 32"),
        ({"b": torch.zeros(8, 32, dtype=E4M3)}, "b has N = 8 rows; FP8 GEMMs need an N that is a multiple of 16"),
        (
            {"a_square": True, "a_scale_inv": torch.ones(1, 4), "b_square": True, "b_scale_inv": torch.ones(1, 4)},
            "square",
        ),
        ({"a_scale_inv": torch.ones(1)}, r"a_scale_inv is torch.float32 \(1,\), .* float32 \(1, 8\) is needed"),
        ({"b_square": True}, r"b_scale_inv is torch.float32 \(1, 16\), .* float32 \(1, 4\) is needed"),
        ({"bias": torch.zeros(8)}, r"bias has shape \(8,\)"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    given = {
        **{"a": torch.zeros(8, 32, dtype=E4M3), "b": torch.zeros(16, 32, dtype=E4M3)},
        **{"a_scale_inv": torch.ones(1, 8), "b_scale_inv": torch.ones(1, 16)},
        **{"a_square": False, "b_square": False, "bias": None, "out_dtype": BF16},
    }
    with pytest.raises((TypeError, ValueError), match=sentence):
        twin.gemm_fp8_blocks(*(given | arguments).values())
