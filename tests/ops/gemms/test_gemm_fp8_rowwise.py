"""twin::gemm_fp8_rowwise: a loop that follows the contract, orders that agree, and refusals."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits

from reference.numbers import tensor_core

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


def operand(rows: int, k: int, seed: int, dtype: torch.dtype = E4M3, power: bool = False) -> Any:
    """Codes and scales; with `power` these are powers of two."""
    draw = torch.Generator().manual_seed(seed)
    scales = torch.randn(rows, generator=draw) * 4
    return torch.randn(rows, k, generator=draw).to(dtype), torch.exp2(scales.round() if power else scales)


@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("bias", [False, True])
def test_words_follow_the_contract(accumulate: str, bias: bool) -> None:
    (a, sa), (b, sb) = operand(5, 272, 1), operand(16, 272, 2)
    vector = torch.randn(16, generator=torch.Generator().manual_seed(3)) if bias else None
    found = twin.gemm_fp8_rowwise(a, b, sa, sb, vector, torch.float32, accumulate)
    acc = tensor_core.gemm(a, b, accumulate).numpy()
    for i, j in itertools.product(range(5), range(16)):
        wanted = np.float32(np.float32(acc[i, j] * np.float32(sb[j])) * np.float32(sa[i]))
        wanted = wanted if vector is None else np.float32(wanted + np.float32(vector[j]))
        assert found[i, j].item() == wanted
    other = torch.from_numpy(acc) * sa[:, None] * sb
    assert bias or not torch.equal(found, other), "the order of the scales shows"
    for dtype in (BF16, torch.float16):
        assert_same_bits(twin.gemm_fp8_rowwise(a, b, sa, sb, vector, dtype, accumulate), found.to(dtype))


def test_powers_of_two_agree_in_every_order() -> None:
    """torchao multiplies the rounded product of its gradients by the scales' product, in bf16."""
    (a, sa), (b, sb) = operand(40, 1040, 4, power=True), operand(48, 1040, 5, power=True)
    acc = tensor_core.gemm(a, b, "split")
    wide = twin.gemm_fp8_rowwise(a, b, sa, sb, None, torch.float32, "split")
    for one in (acc * sa[:, None] * sb, acc * (sa[:, None] * sb)):
        assert_same_bits(wide, one)
    found = twin.gemm_fp8_rowwise(a, b, sa, sb, None, BF16, "split")
    assert_same_bits(found, acc.to(BF16).mul_(sa[:, None] * sb))


def test_one_scale_for_all_rows() -> None:
    (a, sa), (b, sb) = operand(7, 144, 6), operand(32, 144, 7)
    for of_a, of_b in ((sa, sb[:1]), (sa[:1], sb), (sa[:1], sb[:1])):
        found = twin.gemm_fp8_rowwise(a, b, of_a, of_b, None, BF16, "fast")
        each = of_a.expand(7).contiguous(), of_b.expand(32).contiguous()
        assert_same_bits(found, twin.gemm_fp8_rowwise(a, b, *each, None, BF16, "fast"))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_gradient_is_added_to(dtype: torch.dtype) -> None:
    (a, sa), (b, sb) = operand(24, 144, 8, E5M2), operand(32, 144, 9)
    out = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = (out.float() + twin.gemm_fp8_rowwise(a, b, sa, sb, None, torch.float32, "split")).to(dtype)
    twin.gemm_fp8_rowwise_accumulate(a, b, sa, sb, out)
    assert_same_bits(out, wanted)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (70, 48, 272), (33, 96, 144)])
def test_odd_sizes_have_the_words_of_the_cpu(device: torch.device, m: int, n: int, k: int) -> None:
    """NaN among the codes, an infinite and a NaN scale, one scale for all rows."""
    for (x, y), many, accumulate in itertools.product(((E4M3, E4M3), (E5M2, E4M3)), (True, False), ("fast", "split")):
        (a, sa), (b, sb) = operand(m, k, 1, x), operand(n, k, 2, y)
        a.view(torch.uint8)[m // 2, 3] = 0x7F
        sa[-1], sb[4] = float("inf"), float("nan")
        sb = sb if many else sb[:1]
        here = (a, b, sa, sb)
        there = [t.to(device) for t in here]
        bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(BF16)
        for out in (BF16, torch.float32):
            found = twin.gemm_fp8_rowwise(*there, bias.to(device), out, accumulate)
            assert_same_bits(found.cpu(), twin.gemm_fp8_rowwise(*here, bias, out, accumulate))
            added = torch.ones(m, n, dtype=out), torch.ones(m, n, dtype=out, device=device)
            for args, to in zip((here, there), added, strict=True):
                twin.gemm_fp8_rowwise_accumulate(*args, to)
            assert_same_bits(added[1].cpu(), added[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"a": torch.zeros(8, 32)}, "a is torch.float32; gemm_fp8_rowwise takes float8"),
        ({"a": torch.zeros(8, 48, dtype=E4M3)}, "a has K = 48 and b has K = 32"),
        ({"b": torch.zeros(8, 32, dtype=E4M3)}, "b has N = 8 rows; FP8 GEMMs need an N that is a multiple of 16"),
        ({"a_scale_inv": torch.ones(4)}, r"a_scale_inv is torch.float32 \(4,\), .* \(8,\), a number for each row of a"),
        ({"b_scale_inv": torch.ones(16, 1)}, r"b_scale_inv is torch.float32 \(16, 1\), .* \(16,\), a number for each"),
        ({"b_scale_inv": torch.ones(32)[::2]}, r"b_scale_inv is .*strides \(2,\); contiguous"),
        ({"b_scale_inv": torch.ones(16).double()}, r"b_scale_inv is torch.float64"),
        ({"bias": torch.zeros(8)}, r"bias has shape \(8,\)"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
        ({"accumulate": "slow"}, "accumulate is 'slow'; 'fast' or 'split' is accepted"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    given = {
        **{"a": torch.zeros(8, 32, dtype=E4M3), "b": torch.zeros(16, 32, dtype=E4M3)},
        **{"a_scale_inv": torch.ones(8), "b_scale_inv": torch.ones(16)},
        **{"bias": None, "out_dtype": BF16, "accumulate": "split"},
    }
    with pytest.raises((TypeError, ValueError), match=sentence):
        twin.gemm_fp8_rowwise(*(given | arguments).values())
