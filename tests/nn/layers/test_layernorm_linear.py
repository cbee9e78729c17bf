"""`LayerNormLinear` against the modules it fuses, and what a user may ask of it."""

from typing import Any

import numpy as np
import pytest
import torch
from shared import unfused_step

import reference as te

RECIPE = te.DelayedScaling(amax_history_len=4)
NORMS = {"LayerNorm": te.LayerNorm, "RMSNorm": te.RMSNorm}


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def pair(normalization: str, dtype: torch.dtype, **arguments: Any) -> tuple[te.LayerNormLinear, Any, te.Linear]:
    """A fused layer, and the two modules it fuses with the same parameters."""
    torch.manual_seed(0)
    fused = te.LayerNormLinear(64, 48, normalization=normalization, params_dtype=dtype, **arguments)
    norm = NORMS[normalization](64, params_dtype=dtype, zero_centered_gamma=fused.zero_centered_gamma)
    linear = te.Linear(64, 48, params_dtype=dtype, bias=fused.use_bias)
    with torch.no_grad():
        for i, p in enumerate(fused.parameters()):
            p.add_((numbers(i, *p.shape) * 0.1).to(dtype))
        norm.weight.copy_(fused.layer_norm_weight)
        if normalization == "LayerNorm":
            norm.bias.copy_(fused.layer_norm_bias)
        linear.weight.copy_(fused.weight)
        if fused.use_bias:
            linear.bias.copy_(fused.bias)
    return fused, norm, linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_in_16_bits_it_is_the_two_modules(
    dtype: torch.dtype, normalization: str, zero_centered: bool, same_bits
) -> None:
    """Both round at the same places, so every bit is equal."""
    fused, norm, linear = pair(normalization, dtype, zero_centered_gamma=zero_centered)
    x = numbers(7, 5, 3, 64).to(dtype)
    g = numbers(8, 5, 3, 48).to(dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = fused(a), linear(norm(b))
    y.backward(g)
    z.backward(g)
    same_bits(y, z, "y")
    same_bits(a.grad, b.grad, "dx")
    same_bits(fused.layer_norm_weight.grad, norm.weight.grad, "dgamma")
    if normalization == "LayerNorm":
        same_bits(fused.layer_norm_bias.grad, norm.bias.grad, "dbeta")
    same_bits(fused.weight.grad, linear.weight.grad, "dw")
    same_bits(fused.bias.grad, linear.bias.grad, "db")


@pytest.mark.parametrize("normalization", NORMS)
def test_in_fp8_it_is_the_norm_in_fp32_then_linear(normalization: str, same_bits) -> None:
    """The norm is cast from fp32: so it equals the norm with an fp32 output before an FP8 `Linear`."""
    fused, norm, linear = pair(normalization, torch.bfloat16)
    for step in range(3):
        x = (numbers(step, 20, 64) * (1 + step)).bfloat16().requires_grad_()
        with torch.no_grad():
            bias = norm.bias if normalization == "LayerNorm" else None
            normed = torch.ops.twin.norm(x.detach(), norm.weight, bias, norm.eps, False, norm.kind, torch.float32)[0]
        with te.autocast(recipe=RECIPE):
            y = fused(x)
        with te.autocast(recipe=RECIPE), torch.autocast("cpu", dtype=torch.bfloat16):
            z = linear(normed)
        g = numbers(50 + step, 20, 48).bfloat16()
        fused.zero_grad()
        linear.zero_grad()
        y.backward(g)
        z.backward(g)
        same_bits(y, z, f"y, step {step}")
        same_bits(fused.weight.grad, linear.weight.grad, f"dw, step {step}")
        for key in ("scaling_fwd", "scaling_bwd"):
            same_bits(fused.fp8_meta[key].scale, linear.fp8_meta[key].scale, key)
            same_bits(fused.fp8_meta[key].amax_history, linear.fp8_meta[key].amax_history, key)


@pytest.mark.parametrize("fp8", [True, False])
def test_return_values(fp8: bool, same_bits) -> None:
    fused, norm, _ = pair("LayerNorm", torch.bfloat16, return_bias=True, return_layernorm_output=True)
    x = numbers(9, 2, 8, 64).bfloat16()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with te.autocast(enabled=fp8, recipe=RECIPE):
        y, bias, normed = fused(a)
    assert y.shape == (2, 8, 48)
    same_bits(bias, fused.bias)
    same_bits(normed, norm(b))
    (normed.float().sum()).backward()
    norm(b).float().sum().backward()
    same_bits(a.grad, b.grad, "the gradient through the returned norm")


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("normalization", NORMS)
def test_both_outputs_have_gradients(normalization: str, fp8: bool, same_bits) -> None:
    """dL/dnorm(x) is added to what comes back through the product, with one rounding, before the norm's backward."""
    fused, norm, linear = pair(normalization, torch.bfloat16, return_layernorm_output=True)
    x, g, more = numbers(30, 20, 64).bfloat16(), numbers(31, 20, 48).bfloat16(), numbers(32, 20, 64).bfloat16()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with te.autocast(enabled=fp8, recipe=RECIPE):
        torch.autograd.backward(fused(a), (g, more))
    normed = norm(b)
    back = normed.detach().requires_grad_()
    if fp8:  # which the product reads in fp32
        bias = norm.bias if normalization == "LayerNorm" else None
        with torch.no_grad():
            wide = torch.ops.twin.norm(x, norm.weight, bias, norm.eps, False, norm.kind, torch.float32)[0]
        back = wide.requires_grad_()
    with te.autocast(enabled=fp8, recipe=RECIPE), torch.autocast("cpu", dtype=torch.bfloat16):
        linear(back).backward(g)
    normed.backward(back.grad.bfloat16() + more)
    same_bits(a.grad, b.grad, "dx")
    same_bits(fused.layer_norm_weight.grad, norm.weight.grad, "dgamma")
    if normalization == "LayerNorm":
        same_bits(fused.layer_norm_bias.grad, norm.bias.grad, "dbeta")
    same_bits(fused.weight.grad, linear.weight.grad, "dw")


def test_long_products_accumulate_as_they_are_to() -> None:
    """y in one chain; what reaches the norm and dw in chains of 128."""
    torch.manual_seed(6)
    layer = te.LayerNormLinear(160, 176, params_dtype=torch.bfloat16)
    torch.nn.init.normal_(layer.bias)
    torch.nn.init.normal_(layer.layer_norm_weight)
    x, g = (numbers(40, 150, 160) * 3).bfloat16(), (numbers(50, 150, 176) / 100).bfloat16()
    unfused_step.run(layer, x, g)
    step = unfused_step.Step(layer, torch.bfloat16)
    gamma, beta, w = (p.detach() for p in (layer.layer_norm_weight, layer.layer_norm_bias, layer.weight))
    y, mean, rstd = unfused_step.twin.norm(x, gamma, beta, 1e-5, False, "layernorm", torch.float32)
    xq, wq, gq = step.cast(y, 0), step.cast(w, 1), step.grad(g, 0)
    dnorm = step.product(gq, wq.t(), "split")
    dx, dgamma, dbeta = unfused_step.twin.norm_backward(dnorm, x, gamma, mean, rstd, False, "layernorm", None)
    step.check(
        unfused_step.run(layer, x, g),
        {
            "output 0": step.product(xq, wq, "fast", layer.bias.detach()),
            "dx": dx,
            "dlayer_norm_weight": dgamma,
            "dlayer_norm_bias": dbeta,
            "dweight": step.product(gq.t(), xq.t(), "split"),
            "dbias": unfused_step.twin.dbias(g),
        },
    )


def test_parameter_names_and_split() -> None:
    layer = te.LayerNormLinear(32, 48, parameters_split={"query_": 16, "key_": 16, "value_": 16})
    assert [n for n, _ in layer.named_parameters()] == [
        "layer_norm_weight", "layer_norm_bias", "query_weight", "key_weight", "value_weight",
        "query_bias", "key_bias", "value_bias",
    ]  # fmt: skip
    assert te.LayerNormLinear(32, 48, normalization="RMSNorm", bias=False).layer_norm_bias is None


def test_checkpoint_recompute_and_cache(same_bits) -> None:
    results = []
    for run in (lambda f, x, first: f(x, first), lambda f, x, first: te.checkpoint(f, x, first)):
        fused, _, _ = pair("LayerNorm", torch.bfloat16)
        for step in range(4):
            x = numbers(step, 20, 64).bfloat16().requires_grad_()
            with te.autocast(recipe=RECIPE):
                y = run(fused, x, step % 2 == 0)
            y.backward(torch.ones_like(y))
        results.append(
            (y, x.grad, fused.weight.grad, fused.layer_norm_weight.grad, fused.fp8_meta["scaling_fwd"].scale)
        )
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


def test_calibration_notes_what_fp8_would_cast() -> None:
    fused, norm, _ = pair("LayerNorm", torch.bfloat16)
    x = numbers(10, 20, 64).bfloat16()
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        fused(x)
    amaxes = fused.fp8_meta["scaling_fwd"].amax_history[0]
    assert amaxes[0] == norm(x).float().abs().max()
    assert amaxes[1] == fused.weight.float().abs().max()


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (
            lambda: te.LayerNormLinear(16, 16, normalization="BatchNorm"),
            ValueError,
            "normalization='BatchNorm'; one of",
        ),
        (lambda: te.LayerNormLinear(16, 16, ub_bulk_wgrad=True), NotImplementedError, "ub_bulk_wgrad=True is not"),
        (lambda: te.LayerNormLinear(16, 16)(torch.ones(2, 16), fp8_grad=True), NotImplementedError, "fp8_grad=True"),
        (lambda: te.LayerNormLinear(16, 16)(torch.ones(2, 24)), ValueError, r"inp has shape \[2, 24\]"),
    ],
)
def test_refusals(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


def test_fp8_sizes_are_checked_before_anything_changes() -> None:
    layer = te.LayerNormLinear(24, 16)
    with pytest.raises(ValueError, match="LayerNormLinear: in_features=24 under FP8"), te.autocast(recipe=RECIPE):
        layer(torch.ones(2, 24))
    assert layer.fp8_meta == {}
