"""`LayerNormMLP` against the modules it fuses and against float64."""

from typing import Any

import numpy as np
import pytest
import torch
from shared import unfused_step

import reference as te
from reference.ops.activations.activation import CLAMPED, KINDS, Clamp, clamp_of, is_gated

RECIPE = te.DelayedScaling(amax_history_len=4)
ACTIVATIONS = (*KINDS, Clamp(1.5, 0.5, -0.25).kind)


def named(kind: str) -> dict[str, Any]:
    """A kind as a layer's arguments."""
    clamp = clamp_of(kind) if kind != CLAMPED else None
    return {"activation": kind} if clamp is None else {"activation": CLAMPED, "activation_params": clamp._asdict()}


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def mlp(dtype: torch.dtype, **arguments: Any) -> te.LayerNormMLP:
    torch.manual_seed(1)
    layer = te.LayerNormMLP(48, 80, params_dtype=dtype, **arguments)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_((numbers(i, *p.shape) * 0.1).to(dtype))
    return layer


class Activation(torch.autograd.Function):
    """The 16-bit activation as a module of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return torch.ops.twin.activation(x, kind)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.twin.activation_backward(grad, *ctx.saved_tensors, ctx.kind), None


@pytest.mark.sample(30)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("both", [False, True], ids=["y", "y and norm(x)"])
def test_in_16_bits_it_is_the_four_modules(
    dtype: torch.dtype, activation: str, normalization: str, both: bool, same_bits
) -> None:
    """Both round at the same places, so every bit is equal; with a gradient of norm(x) too."""
    fused = mlp(dtype, **named(activation), normalization=normalization, return_layernorm_output=both)
    norm = getattr(te, normalization)(48, params_dtype=dtype)
    fc1 = te.Linear(48, fused.fc1_weight.shape[0], params_dtype=dtype)
    fc2 = te.Linear(80, 48, params_dtype=dtype)
    modules = [norm, fc1, fc2]
    unfused = [p for m in modules for p in m.parameters()]
    with torch.no_grad():
        for p, q in zip(unfused, fused.parameters(), strict=True):
            p.copy_(q)
    x, *grads = (numbers(i, 3, 7, 48).to(dtype) for i in ((7, 8, 9) if both else (7, 8)))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    normed = norm(b)
    h = fc1(normed).reshape(21, -1)
    z = fc2(Activation.apply(h, activation)).view(3, 7, 48)
    found, expected = fused(a) if both else (fused(a),), (z, normed) if both else (z,)
    torch.autograd.backward(found, grads)
    torch.autograd.backward(expected, grads)
    for y, one in zip(found, expected, strict=True):
        same_bits(y, one, "an output")
    same_bits(a.grad, b.grad, "dx")
    for (name, p), q in zip(fused.named_parameters(), unfused, strict=True):
        same_bits(p.grad, q.grad, name)


def exact(layer: te.LayerNormMLP, x: torch.Tensor) -> torch.Tensor:
    """The same function in float64."""
    p = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}
    layer.wide = p
    h = torch.nn.functional.layer_norm(x, x.shape[-1:], p["layer_norm_weight"], p["layer_norm_bias"], layer.eps)
    h = torch.nn.functional.linear(h, p["fc1_weight"], p["fc1_bias"])
    h, gate = h.chunk(2, dim=-1) if is_gated(layer.activation) else (h, torch.ones(()))
    limit, alpha, offset = clamp_of(layer.activation_kind) or Clamp()
    if layer.activation == CLAMPED:
        h, gate = h.clamp(max=limit), gate.clamp(-limit, limit) + offset
    functions = {
        "gelu": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "geglu": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "swiglu": torch.nn.functional.silu,
        "reglu": torch.relu,
        "srelu": lambda t: torch.relu(t) ** 2,
        "sreglu": lambda t: torch.relu(t) ** 2,
        "qgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "qgeglu": lambda t: t * torch.sigmoid(1.702 * t),
        "glu": torch.sigmoid,
        "clamped_swiglu": lambda t: t * torch.sigmoid(alpha * t),
    }
    return torch.nn.functional.linear(functions[layer.activation](h) * gate, p["fc2_weight"], p["fc2_bias"])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("fp8", [False, True])
def test_against_float64(activation: str, fp8: bool) -> None:
    """16 bits: five roundings of bf16 (2^-9 each) in a row, and relu's slope may jump at a pre-activation that a
    rounding moved across 0. FP8: E4M3 rounds by 2^-4, E5M2 by 2^-3; a few of them in a row."""
    layer = mlp(torch.bfloat16, **named(activation))
    x = numbers(9, 64, 48).bfloat16().requires_grad_()
    g = numbers(10, 64, 48).bfloat16()
    for _ in range(2 if fp8 else 1):  # the second step uses the first one's scales
        layer.zero_grad()
        x.grad = None
        with te.autocast(enabled=fp8, recipe=RECIPE):
            y = layer(x)
        y.backward(g)
    wide = x.detach().double().requires_grad_()
    expected = exact(layer, wide)
    expected.backward(g.double())
    pairs = [(y, expected), (x.grad, wide.grad)]
    pairs += [(p.grad, layer.wide[name].grad) for name, p in layer.named_parameters()]
    for got, want in pairs:
        error = (got.double() - want).norm() / want.norm()
        assert error < (0.2 if fp8 else 0.05)


def test_state_has_two_gemms() -> None:
    layer = mlp(torch.bfloat16)
    x = numbers(11, 16, 48).bfloat16().requires_grad_()
    with te.autocast(recipe=RECIPE):
        y = layer(x)
    y.sum().backward()
    forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
    assert [s != 1 for s in forward.scale.tolist()] == [True, True, False, True, True, False]
    assert [s != 1 for s in backward.scale.tolist()] == [True, False, True, False]
    assert layer.state_dict()["_extra_state"].shape == (1 + 4, 6 + 4)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_calibration_notes_what_fp8_would_cast(activation: str) -> None:
    layer = mlp(torch.bfloat16, **named(activation))
    x = numbers(13, 16, 48).bfloat16()
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE), torch.no_grad():
        layer(x)
        norm = te.LayerNorm(48, params_dtype=torch.bfloat16)
        norm.weight.copy_(layer.layer_norm_weight)
        norm.bias.copy_(layer.layer_norm_bias)
        normed = norm(x)
        a = torch.ops.twin.activation(
            torch.ops.twin.gemm(normed, layer.fc1_weight, layer.fc1_bias, x.dtype), activation
        )
    seen = [normed, layer.fc1_weight, None, a, layer.fc2_weight, None]
    expected = [0.0 if t is None else t.detach().float().abs().max().item() for t in seen]
    assert layer.fp8_meta["scaling_fwd"].amax_history[0].tolist() == expected


def test_checkpoint_cache_and_accumulation(same_bits) -> None:
    results = []
    for run in (lambda f, x, first: f(x, first), lambda f, x, first: te.checkpoint(f, x, first)):
        layer = mlp(torch.bfloat16, fuse_wgrad_accumulation=True)
        for p in (layer.fc1_weight, layer.fc2_weight):
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        for step in range(4):
            x = numbers(step, 20, 48).bfloat16().requires_grad_()
            with te.autocast(recipe=RECIPE):
                y = run(layer, x, step % 2 == 0)
            y.backward(torch.ones_like(y))
        results.append((y, x.grad, layer.fc1_weight.main_grad, layer.fc2_weight.main_grad, layer.fc1_bias.grad))
        assert layer.fc1_weight.grad is None
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


def test_return_values_and_names(same_bits) -> None:
    layer = mlp(torch.bfloat16, return_bias=True, return_layernorm_output=True)
    x = numbers(12, 4, 48).bfloat16()
    y, bias, normed = layer(x)
    assert y.shape == normed.shape == x.shape
    same_bits(bias, layer.fc2_bias)
    assert [n for n, _ in layer.named_parameters()] == [
        "layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias",
    ]  # fmt: skip


@pytest.mark.parametrize("both", [False, True], ids=["y", "y and norm(x)"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_fp8_step_written_out(activation: str, both: bool) -> None:
    """Products longer than 128: forward in one chain, backward in chains of 128; every scale is another one.

    dL/dnorm(x) is added to what comes back through fc1, with one rounding, before the norm's backward.
    """
    torch.manual_seed(6)
    dtype, twin = torch.bfloat16, unfused_step.twin
    layer = te.LayerNormMLP(144, 160, activation=activation, params_dtype=dtype, return_layernorm_output=both)
    for p in (layer.fc1_bias, layer.fc2_bias, layer.layer_norm_weight):
        torch.nn.init.normal_(p)
    x, g, more = (
        (numbers(40, 150, 144) * 3).bfloat16(),
        numbers(50, 150, 144).bfloat16(),
        numbers(51, 150, 144).bfloat16(),
    )
    grads = (g / 100, more / 100) if both else (g / 100,)
    unfused_step.run(layer, x, *grads)
    step = unfused_step.Step(layer, dtype)
    gamma, beta, w1, b1, w2, b2 = (p.detach() for p in layer.parameters())
    normed, mean, rstd = twin.norm(x, gamma, beta, 1e-5, False, "layernorm", torch.float32)
    nq, w1q, w2q, gq = step.cast(normed, 0), step.cast(w1, 1), step.cast(w2, 4), step.grad(grads[0], 2)
    h = step.product(nq, w1q, "fast", b1)
    codes, _, inverse = twin.activation_cast_transpose(h, activation, *step.state(3))
    aq = unfused_step.Cast(codes, inverse)
    dact = step.product(gq, w2q.t(), "split")
    state = step.state(0, "scaling_bwd")
    codes, _, inverse, db1 = twin.activation_backward_cast_transpose_dbias(dact, h, activation, *state)
    hq = unfused_step.Cast(codes, inverse)
    dnorm = step.product(hq, w1q.t(), "split")
    dnorm = dnorm + grads[1] if both else dnorm
    dx, dgamma, dbeta = twin.norm_backward(dnorm, x, gamma, mean, rstd, False, "layernorm", None)
    outputs = {"output 0": step.product(aq, w2q, "fast", b2)} | ({"output 1": normed.to(dtype)} if both else {})
    step.check(
        unfused_step.run(layer, x, *grads),
        outputs
        | {
            "dx": dx,
            "dlayer_norm_weight": dgamma,
            "dlayer_norm_bias": dbeta,
            "dfc1_weight": step.product(hq.t(), nq.t(), "split"),
            "dfc1_bias": db1,
            "dfc2_weight": step.product(gq.t(), aq.t(), "split"),
            "dfc2_bias": twin.dbias(grads[0]),
        },
    )


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: te.LayerNormMLP(16, 16, activation="tanh"), ValueError, "activation='tanh'; one of"),
        (
            lambda: te.LayerNormMLP(16, 16, activation_params={"limit": 7.0}),
            ValueError,
            r"LayerNormMLP: activation_params={'limit': 7.0} with activation='gelu'; None is accepted",
        ),
        (
            lambda: te.LayerNormMLP(16, 16, activation="clamped_swiglu", activation_params={"limits": 7.0}),
            ValueError,
            r"activation_params={'limits': 7.0}; None, or a dict of 'limit'",
        ),
        (lambda: te.LayerNormMLP(16, 0), ValueError, "ffn_hidden_size=0; an int from 1"),
        (lambda: te.LayerNormMLP(16, 16, checkpoint=1), TypeError, "checkpoint=1; True and False are accepted"),
        (lambda: te.LayerNormMLP(16, 16, normalization="none"), ValueError, "normalization='none'"),
    ],
)
def test_refusals(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()
    layer = te.LayerNormMLP(16, 24)
    with pytest.raises(ValueError, match="LayerNormMLP: ffn_hidden_size=24 under FP8"), te.autocast(recipe=RECIPE):
        layer(torch.ones(2, 16))
