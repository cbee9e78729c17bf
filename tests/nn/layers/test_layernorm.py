"""`LayerNorm` and `RMSNorm` as layers: against torch.nn in float64, dtypes, refusals. (The op: test_norm.py.)"""

from typing import Any

import numpy as np
import pytest
import torch

import reference as te

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def exact(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The same function in float64."""
    x = x.double()
    gamma = layer.weight.double() + (1 if layer.zero_centered_gamma else 0)
    if isinstance(layer, te.RMSNorm):
        return x * (x.square().mean(-1, keepdim=True) + layer.eps).rsqrt() * gamma
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gamma, layer.bias.double(), layer.eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [te.LayerNorm, te.RMSNorm])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_against_float64(dtype: torch.dtype, kind: Any, zero_centered: bool) -> None:
    layer = kind(100, zero_centered_gamma=zero_centered, params_dtype=dtype)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_(numbers(i, 100) * 0.1)
    x = (numbers(5, 3, 7, 100) * 3 + 1).to(dtype).requires_grad_()
    g = numbers(6, 3, 7, 100).to(dtype)
    y = layer(x)
    y.backward(g)
    wide = x.detach().double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in layer.parameters()]
    reference_layer = kind(100, zero_centered_gamma=zero_centered, params_dtype=torch.float32)
    reference_layer.__dict__["_parameters"] = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
    expected = exact(reference_layer, wide)
    expected.backward(g.double())
    # One rounding to the dtype (eps / 2 of the value); what fp32 loses before it is below 40 · 2^-24 of the sizes here.
    eps = torch.finfo(dtype).eps
    for got, want, size in (
        (y, expected, 8.0),
        (x.grad, wide.grad, 4.0),
        *((p.grad, q.grad, 40.0) for p, q in zip(layer.parameters(), parameters, strict=True)),
    ):
        bound = want.abs() * eps / 2 + size * 40 * 2.0**-24
        assert bool(((got.double() - want).abs() <= bound).all())


def test_dtypes_and_shapes() -> None:
    layer = te.LayerNorm(32, params_dtype=torch.float32)
    x = numbers(1, 4, 32).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert layer(x.float()).dtype == torch.float16
    assert layer(x[:0]).shape == (0, 32)
    assert te.LayerNorm(hidden_size=32).weight.shape == (32,)
    assert [n for n, _ in te.RMSNorm(32).named_parameters()] == ["weight"]
    assert bool((te.LayerNorm(32, zero_centered_gamma=True).weight == 0).all())
    assert te.LayerNorm(32, device="meta").weight.is_meta


def test_loads_torchs_own_checkpoint() -> None:
    plain = torch.nn.LayerNorm(32)
    layer = te.LayerNorm(32)
    layer.load_state_dict(plain.state_dict(), strict=True)
    x = numbers(2, 8, 32)
    assert torch.allclose(layer(x), plain(x), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: te.LayerNorm((4, 8)), ValueError, r"normalized_shape=\(4, 8\); one dimension"),
        (lambda: te.LayerNorm(), TypeError, "normalized_shape=None; an int from 1"),
        (lambda: te.RMSNorm(0), ValueError, "normalized_shape=0; an int from 1"),
        (
            lambda: te.LayerNorm(8, sequence_parallel=1),
            TypeError,
            "sequence_parallel=1; None, True and False are accepted",
        ),
        (lambda: te.LayerNorm(8)(torch.ones(2, 9)), ValueError, r"LayerNorm: input has shape \[2, 9\]"),
        (lambda: te.LayerNorm(8)(torch.ones(2, 8).long()), TypeError, "input has dtype torch.int64"),
    ],
)
def test_refusals(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


@pytest.mark.parametrize("norm", [te.LayerNorm, te.RMSNorm])
@pytest.mark.parametrize("given", [None, False, True])
def test_parameters_say_whether_ranks_have_tokens_of_their_own(norm: Any, given: bool | None) -> None:
    layer = norm(8, sequence_parallel=given)
    assert layer.sequence_parallel is bool(given)
    marks = [getattr(p, "sequence_parallel", None) for p in layer.parameters()]
    assert marks == [given] * len(marks)
    assert marks
