"""The fused FP8 GEMMs on the CPU: each is the ops that it names, and refuses what they refuse."""

from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.gemm_codes import E4M3, E5M2, draw, normal, one

import reference  # noqa: F401  (declares the ops)
from reference.ops.activations.activation import GATED, KINDS

twin = torch.ops.twin
M, K, COLS = 37, 48, 32
# Not `test_schema`: it compares inputs with `allclose`, which FP8 has not.
TESTS = ("test_autograd_registration", "test_faketensor")


def state() -> tuple[torch.Tensor, torch.Tensor, int]:
    return torch.tensor([1.0, 3.0, 1.0]), torch.zeros(4, 3), 1


def forward(kind: str) -> tuple[Any, ...]:
    n = COLS * (2 if kind in GATED else 1)
    return draw(1, M, K, E4M3), draw(2, n, K, E4M3), one(0.3), one(1.7)


def backward(kind: str, dtype: torch.dtype) -> tuple[Any, ...]:
    x = normal(5, M, COLS * (2 if kind in GATED else 1)).to(dtype)
    return draw(3, M, K, E5M2), draw(4, COLS, K, E4M3), one(0.3), one(1.7), x, kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_after_a_product_is_the_two_ops(kind: str, dtype: torch.dtype) -> None:
    product = forward(kind)
    for bias in (None, normal(6, product[1].shape[0]).to(dtype)):
        fused, apart = state(), state()
        found = twin.gemm_fp8_activation(*product, bias, dtype, kind, *fused, E4M3)
        h = twin.gemm_fp8(*product, bias, dtype, "fast")
        expected = (h, *twin.activation_cast_transpose(h, kind, *apart, E4M3))
        for a, b in zip((*found, fused[1]), (*expected, apart[1]), strict=True):
            assert_same_bits(a, b)
        assert bool(fused[1][0, 1] > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_an_activations_backward_after_a_product_is_the_two_ops(kind: str, dtype: torch.dtype) -> None:
    *product, x, _ = backward(kind, dtype)
    fused, apart = state(), state()
    found = twin.gemm_fp8_activation_backward(*product, x, kind, *fused, E5M2)
    dact = twin.gemm_fp8(*product, None, dtype, "split")
    expected = twin.activation_backward_cast_transpose_dbias(dact, x, kind, *apart, E5M2)
    for a, b in zip((*found, fused[1]), (*expected, apart[1]), strict=True):
        assert_same_bits(a, b)
    assert bool(fused[1][0, 1] > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_dropout_after_a_product_is_the_two_ops(p: float, dtype: torch.dtype) -> None:
    product = forward("gelu")
    bias, residual = normal(7, COLS).to(dtype), normal(8, M, COLS).to(dtype)
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        fused, apart = torch.tensor([5, 9]), torch.tensor([5, 9])
        found = twin.gemm_fp8_bias_dropout_add(*product, b, r, dtype, p, fused)
        expected = twin.bias_dropout_add(twin.gemm_fp8(*product, None, dtype, "fast"), b, r, p, apart)
        assert_same_bits(found, expected)
        assert fused.tolist() == apart.tolist() == [5, 10 if p else 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accumulation_is_one_addition_and_one_rounding(dtype: torch.dtype) -> None:
    product = forward("gelu")
    start = normal(9, M, COLS).to(dtype)
    out = start.clone()
    version = out._version
    twin.gemm_fp8_accumulate(*product, out)
    dw = twin.gemm_fp8(*product, None, torch.float32, "split")
    assert_same_bits(out, (start.float() + dw).to(dtype))
    assert out._version > version
    a, b = normal(10, M, K).bfloat16(), normal(11, COLS, K).bfloat16()
    out = start.clone()
    twin.gemm_accumulate(a, b, out)
    assert_same_bits(out, (start.float() + twin.gemm(a, b, None, torch.float32)).to(dtype))


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_opcheck(kind: str) -> None:
    bf16 = torch.bfloat16
    product = forward(kind)
    out, wide = torch.zeros(M, product[1].shape[0]), normal(1, M, K).bfloat16()
    for op, arguments in (
        (twin.gemm_fp8_activation, (*product, None, bf16, kind, *state(), E4M3)),
        (twin.gemm_fp8_activation_backward, (*backward(kind, bf16), *state(), E5M2)),
        (twin.gemm_fp8_bias_dropout_add, (*product, None, out.bfloat16(), bf16, 0.5, torch.tensor([1, 2]))),
        (twin.gemm_fp8_accumulate, (*product, out)),
        (twin.gemm_accumulate, (wide, normal(2, out.shape[1], K).bfloat16(), out)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=TESTS)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refusals(device: str) -> None:
    def moved(*args: Any) -> list[Any]:
        return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]

    bf16 = torch.bfloat16
    a, b, *inverses = forward("gelu")
    with pytest.raises(ValueError, match=r"^a has K = 48 and b has K = 32; a \[M, K\] and b \[N, K\] share K\."):
        twin.gemm_fp8_activation(*moved(a, b[:, :32].contiguous(), *inverses, None, bf16, "gelu", *state(), E4M3))
    with pytest.raises(ValueError, match=r"^twin::gemm_fp8_activation: kind must be one of .*; got 'elu'\."):
        twin.gemm_fp8_activation(*moved(a, b, *inverses, None, bf16, "elu", *state(), E4M3))
    with pytest.raises(ValueError, match=r"the columns of the activation must be a multiple of 16.*; got 24"):
        twin.gemm_fp8_activation(*moved(a, draw(1, 48, K, E4M3), *inverses, None, bf16, "geglu", *state(), E4M3))
    *product, x, _ = backward("swiglu", bf16)
    with pytest.raises(
        ValueError, match=r"^twin::gemm_fp8_activation_backward: x must be the pre-activation .* is \(37, 32\)"
    ):
        twin.gemm_fp8_activation_backward(*moved(*product, x, "gelu", *state(), E5M2))
    residual = normal(1, M, COLS)
    with pytest.raises(
        ValueError, match=r"^twin::gemm_fp8_bias_dropout_add: residual must be .*bfloat16 .*; got torch.float32"
    ):
        twin.gemm_fp8_bias_dropout_add(*moved(a, b, *inverses, None, residual, bf16, 0.0, None))
    with pytest.raises(ValueError, match=r"^twin::gemm_fp8_bias_dropout_add: a dropout probability of 0.5 needs rng_"):
        twin.gemm_fp8_bias_dropout_add(*moved(a, b, *inverses, None, None, bf16, 0.5, None))
    with pytest.raises(ValueError, match=r"^out has shape \(37, 16\); that of a \* b\^T, \(37, 32\)\."):
        twin.gemm_fp8_accumulate(*moved(a, b, *inverses, residual[:, :16]))
    wide = normal(1, M, K).bfloat16(), normal(2, COLS, K).bfloat16()
    with pytest.raises(TypeError, match=r"^out is torch.float64; bfloat16, float16 or float32 is accepted\."):
        twin.gemm_accumulate(*moved(*wide, residual.double()))
