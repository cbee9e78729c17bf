"""twin::gemm and twin::gemm_fp8 on the CPU: their epilogues, and what they refuse."""

import numpy as np
import pytest
import torch

import reference.ops.gemms.gemm
import reference.ops.gemms.gemm_fp8  # noqa: F401
from reference.numbers import tensor_core

GEMM, GEMM_FP8 = torch.ops.twin.gemm, torch.ops.twin.gemm_fp8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(1)


def fp8(rows: int, depth: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(rows, depth).to(dtype)


def rounded(exact: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values rounded once to `dtype`."""
    return torch.from_numpy(exact.astype(np.float32)).to(dtype)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("accumulate", ["fast", "split"])
def test_gemm_fp8_rounds_where_it_says(dtypes, out_dtype, bias_dtype, accumulate, same_bits):
    a, b = fp8(19, 288, dtypes[0]), fp8(48, 288, dtypes[1])
    a_scale, b_scale = torch.tensor([0.013]), torch.tensor([1.7])
    bias = None if bias_dtype is None else torch.randn(48).to(bias_dtype)
    got = GEMM_FP8(a, b, a_scale, b_scale, bias, out_dtype, accumulate)
    # The same through float64, whose 53 bits make one more rounding harmless (2 * 24 + 2 would do).
    scale = np.float32(a_scale.double().numpy() * b_scale.double().numpy()).astype(np.float64)
    out = np.float32(tensor_core.gemm(a, b, accumulate).double().numpy() * scale).astype(np.float64)
    if bias is not None:
        out = np.float32(out + bias.double().numpy())
    same_bits(got, rounded(out, out_dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gemm_rounds_where_it_says(dtype, out_dtype, with_bias, same_bits):
    a, b = torch.randn(23, 70).to(dtype), torch.randn(11, 70).to(dtype)
    bias = torch.randn(11).to(dtype) if with_bias else None
    got = GEMM(a, b, bias, out_dtype)
    out = tensor_core.gemm(a, b).double().numpy()
    if bias is not None:
        out = out + bias.double().numpy()
    same_bits(got, rounded(out, out_dtype))
    assert torch.allclose(got.float(), (a.float() @ b.float().t() + (0 if bias is None else bias)), atol=0.2)


def test_transposed_views_are_taken(same_bits):
    a, b = torch.randn(40, 24).to(torch.bfloat16), torch.randn(16, 24).to(torch.bfloat16)
    expected = GEMM(a, b, None, torch.float32)
    same_bits(GEMM(a.t().contiguous().t(), b.t().contiguous().t(), None, torch.float32), expected)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 32), (3, 0, 16), (5, 16, 0), (0, 0, 0)])
def test_empty_products(m, n, k):
    bias = torch.randn(n)
    for bits in (bias, None):
        half = GEMM(torch.zeros(m, k).bfloat16(), torch.zeros(n, k).bfloat16(), bits, torch.float32)
        eight = GEMM_FP8(fp8(m, k), fp8(n, k), ONE, ONE, bits, torch.float32, "split")
        for out in (half, eight):
            assert out.shape == (m, n)
            assert torch.equal(out, (torch.zeros(n) if bits is None else bits).expand(m, n))


def test_nan_and_infinity_come_through():
    a, b = fp8(4, 16, E5M2), fp8(16, 16, E4M3)
    a.view(torch.uint8)[1, 3] = 0x7F
    a.view(torch.uint8)[2, 3] = 0x7C
    b.view(torch.uint8)[:, 3] = 0x38  # 1
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = GEMM_FP8(a, b, ONE, ONE, None, dtype, "fast")
        assert out[1].isnan().all()
        assert (out[2] == float("inf")).all()
        assert out[[0, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"a": torch.zeros(4, 32)}, r"a is torch.float32; gemm_fp8 takes float8_e4m3fn or float8_e5m2"),
        ({"b": torch.zeros(32, dtype=E4M3)}, r"b has shape \(32,\); a matrix"),
        ({"a": fp8(32, 4).t()}, r"a has strides \(1, 4\); gemm_fp8 takes contiguous rows"),
        ({"b": fp8(16, 48)}, r"a has K = 32 and b has K = 48"),
        ({"a": fp8(4, 40), "b": fp8(16, 40)}, r"a has K = 40; FP8 GEMMs need a K that is a multiple of 16"),
        ({"b": fp8(24, 32)}, r"b has N = 24 rows; FP8 GEMMs need an N that is a multiple of 16"),
        ({"a_scale_inv": torch.ones(2)}, r"a_scale_inv is torch.float32 \(2,\); one float32 number"),
        ({"b_scale_inv": ONE.double()}, r"b_scale_inv is torch.float64 \(1,\); one float32 number"),
        ({"bias": torch.zeros(4)}, r"bias has shape \(4,\); one number per output column, \(16,\)"),
        ({"bias": torch.zeros(16).double()}, r"bias is torch.float64; bfloat16, float16 or float32"),
        ({"out_dtype": E4M3}, r"out_dtype is torch.float8_e4m3fn; bfloat16, float16 or float32"),
        ({"accumulate": "exact"}, r"accumulate is 'exact'; 'fast' or 'split'"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gemm_fp8_refuses_with_a_sentence(change, sentence, device):
    arguments = {
        "a": fp8(4, 32),
        "b": fp8(16, 32),
        "a_scale_inv": ONE,
        "b_scale_inv": ONE,
        "bias": None,
        "out_dtype": torch.bfloat16,
        "accumulate": "fast",
    } | change
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises((TypeError, ValueError), match=sentence):
        GEMM_FP8(**moved)


@pytest.mark.parametrize(
    ("a", "b", "bias", "out_dtype", "sentence"),
    [
        ("float32", (7, 8), None, torch.float32, r"a is torch.float32; gemm takes bfloat16 or float16"),
        ("float16", (7, 8), None, torch.float32, r"a is torch.float16 and b is torch.bfloat16"),
        ("bfloat16", (7, 9), None, torch.float32, r"a has K = 8 and b has K = 9"),
        ("bfloat16", (8,), None, torch.float32, r"b has shape \(8,\); a matrix"),
        ("bfloat16", (7, 8), (8,), torch.float32, r"bias has shape \(8,\); one number per output column"),
        ("bfloat16", (7, 8), None, torch.int32, r"out_dtype is torch.int32"),
    ],
)
def test_gemm_refuses_with_a_sentence(a, b, bias, out_dtype, sentence):
    left = torch.zeros(4, 8, dtype=getattr(torch, a))
    right = torch.zeros(b, dtype=torch.bfloat16)
    with pytest.raises((TypeError, ValueError), match=sentence):
        GEMM(left, right, None if bias is None else torch.zeros(bias), out_dtype)


def test_gemm_refuses_strides_that_no_kernel_loads():
    wide = torch.zeros(8, 16, dtype=torch.bfloat16)[:, ::2]
    with pytest.raises(ValueError, match=r"a has strides \(16, 2\); gemm takes a row-major matrix or"):
        GEMM(wide, wide, None, torch.float32)


def test_no_gradient_is_lost_in_silence():
    a = torch.zeros(4, 16, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"twin::gemm has no derivative of its own"):
        GEMM(a, a, None, torch.float32)
    with torch.no_grad():
        GEMM(a, a, None, torch.float32)
