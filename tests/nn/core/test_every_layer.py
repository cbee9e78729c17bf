"""What holds for every layer: gradients one at a time, torch.autocast, gradients that are added to main_grad."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from reference.nn.transformer import halves

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
LAYERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(32, 48, **kw),
    "Linear in parts": lambda **kw: te.Linear(32, 48, parameters_split=("a", "b", "c"), **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(32, 48, **kw),
    "LayerNormLinear, norm too": lambda **kw: te.LayerNormLinear(32, 48, return_layernorm_output=True, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(32, 64, activation="swiglu", **kw),
    "LayerNormMLP, norm too": lambda **kw: te.LayerNormMLP(32, 64, return_layernorm_output=True, **kw),
    "LayerNorm": lambda **kw: te.LayerNorm(32, **kw),
    "RMSNorm": lambda **kw: te.RMSNorm(32, zero_centered_gamma=True, **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(32, 2, attention_dropout=0, return_bias=True, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(32, 64, 2, hidden_dropout=0, attention_dropout=0, **kw),
    "TransformerLayer, dropout": lambda **kw: te.TransformerLayer(32, 64, 2, **kw),
    "TransformerLayer, no bias": lambda **kw: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0, attention_dropout=0, bias=False, fuse_qkv_params=True, **kw
    ),
    "decoder": lambda **kw: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0, attention_dropout=0, layer_type="decoder", **kw
    ),
    "decoder, dropout": lambda **kw: te.TransformerLayer(32, 64, 2, layer_type="decoder", **kw),
}


def numbers(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def made(name: str, **settings: Any) -> Any:
    """A layer whose parameters are all unlike."""
    torch.manual_seed(0)
    layer = LAYERS[name](**settings)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_(numbers(i, tuple(p.shape), 0.1).to(p.dtype))
    return layer


def step(layer: Any, x: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, ...]:
    """Outputs of x; every one of them gets a gradient."""
    torch.manual_seed(3)  # of what the layer drops
    if getattr(layer, "layer_type", "encoder") == "decoder":
        arguments["encoder_output"] = numbers(7, (6, 2, 32)).to(BF16).to(x.dtype)
    y = layer(x, **arguments)
    outputs = y if isinstance(y, tuple) else (y,)
    grads = [numbers(20 + i, tuple(t.shape), 0.1).to(t.dtype) for i, t in enumerate(outputs)]
    pairs = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return outputs


WAYS = [(name, 0) for name in LAYERS] + [(name, 1 << 25) for name in LAYERS if "TransformerLayer" in name]
NO_NORM_FIRST = ("Linear", "Linear in parts", "MultiheadAttention")


@pytest.mark.sample(6)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("name", "small"), WAYS, ids=[f"{name}{', as one' if small else ''}" for name, small in WAYS])
def test_each_gradient_alone_is_the_one_among_all(
    name: str, small: int, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is frozen: a parameter's gradient, or x's, does not depend on which others are asked for."""
    monkeypatch.setattr(halves, "SMALL", small)
    found: dict[str, torch.Tensor] = {}
    names = ["x", *(key for key, _ in made(name).named_parameters())]
    for wanted in ("all", *names):
        layer, x = made(name, params_dtype=BF16), numbers(5, (8, 2, 32)).to(BF16)
        for key, p in layer.named_parameters():
            p.requires_grad_(wanted in ("all", key))
        x.requires_grad_(wanted in ("all", "x"))
        with te.autocast(enabled=fp8, recipe=RECIPE):
            step(layer, x)
        grads = {"x": x.grad} | {key: p.grad for key, p in layer.named_parameters()}
        if wanted == "all":
            found = grads
            assert all(grad is not None and bool(grad.any()) for grad in found.values())
            continue
        assert [key for key, grad in grads.items() if grad is not None] == [wanted]
        assert_same_bits(grads[wanted], found[wanted], wanted)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_under_torch_autocast_it_is_the_layer_of_a_rounded_input(name: str, fp8: bool) -> None:
    """What a 16-bit input gives, from an fp32 one; gradients of fp32 parameters are those numbers, widened."""
    found = []
    for rounded in (False, True):
        layer, x = made(name, params_dtype=torch.float32), numbers(5, (8, 2, 32))
        x = x.to(BF16).requires_grad_() if rounded else x.requires_grad_()
        if fp8 and name in NO_NORM_FIRST and not rounded:
            x = x.detach().to(BF16).float().requires_grad_()  # an input is cast to FP8 from its own dtype
        with te.autocast(enabled=fp8, recipe=RECIPE), torch.autocast("cpu", dtype=BF16):
            outputs = step(layer, x)
        assert {t.dtype for t in outputs} == {BF16}
        found.append([*outputs, x.grad.float(), *(p.grad for p in layer.parameters())])
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert_same_bits(a, b, f"tensor {i}")


@pytest.mark.parametrize("name", LAYERS)
def test_in_16_bits_parameters_are_taken_in_the_activation_dtype(name: str) -> None:
    found = []
    for dtype in (torch.float32, BF16):
        layer, x = made(name, params_dtype=torch.float32).to(dtype), numbers(5, (8, 2, 32)).to(BF16).requires_grad_()
        with torch.autocast("cpu", dtype=BF16):
            outputs = step(layer, x)
        found.append([*outputs, x.grad, *(p.grad.to(BF16) for p in layer.parameters())])
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert_same_bits(a, b, f"tensor {i}")


@pytest.mark.parametrize("name", ["Linear", "Linear in parts", "LayerNormLinear", "LayerNormMLP"])
def test_in_fp8_with_fp32_activations_biases_are_rounded_to_bf16(name: str) -> None:
    found: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for rounded in (False, True):
        layer = made(name, params_dtype=torch.float32)
        with torch.no_grad():
            for key, p in layer.named_parameters():
                if rounded and key.endswith("bias") and "norm" not in key:
                    p.copy_(p.bfloat16())
            for fp8, outputs in found.items():
                with te.autocast(enabled=fp8, recipe=RECIPE):
                    outputs.append(layer(numbers(5, (8, 32))))
    assert_same_bits(*found[True], "in FP8")
    assert not torch.equal(*found[False]), "outside of FP8 they are not"


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_begin_with_a_gamma_of_1(zero_centered: bool) -> None:
    """Kept as γ − 1 where it is zero-centred; after reset_parameters again."""
    for name in ("LayerNorm", "LayerNormLinear", "LayerNormMLP"):
        layer = LAYERS[name](zero_centered_gamma=zero_centered)
        gamma = layer.weight if name == "LayerNorm" else layer.layer_norm_weight
        beta = layer.bias if name == "LayerNorm" else layer.layer_norm_bias
        for change in (lambda: None, layer.reset_parameters):
            change()
            assert gamma.tolist() == [0.0 if zero_centered else 1.0] * 32
            assert not beta.any()
            torch.nn.init.normal_(gamma)
            torch.nn.init.normal_(beta)


WEIGHTS = ("weight", "fc1_weight", "fc2_weight")
FUSING = [name for name in LAYERS if name not in ("Linear in parts", "LayerNorm", "RMSNorm") and "decoder" not in name]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", FUSING)
def test_main_grads_are_what_gradients_would_be(name: str, fp8: bool) -> None:
    """Added in fp32 to what is there: from 0, in fp32, the gradient before its rounding; each weight its own."""
    settings = {"fuse_qkv_params": True} if "Attention" in name or "Transformer" in name else {}
    if name == "TransformerLayer, no bias":
        settings = {}
    plain, fusing = (made(name, params_dtype=BF16, **settings, **kw) for kw in ({}, {"fuse_wgrad_accumulation": True}))
    for layer in (plain, fusing):
        for p in layer.parameters():
            p.main_grad = torch.zeros(p.shape)
        with te.autocast(enabled=fp8, recipe=RECIPE):
            step(layer, numbers(5, (8, 2, 32)).to(BF16).requires_grad_())
    for (key, p), q in zip(plain.named_parameters(), fusing.parameters(), strict=True):
        if key.split(".")[-1] in WEIGHTS:
            assert q.grad is None, key
            assert_same_bits(q.main_grad.to(BF16), p.grad, key)
            assert not torch.equal(q.main_grad, p.grad.float()), key
        else:
            assert not q.main_grad.any(), key
            assert_same_bits(q.grad, p.grad, key)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "Linear", "LayerNormLinear", "LayerNormMLP"])
def test_reset_parameters_writes_to_the_memory_that_is_there(name: str) -> None:
    """What optimizers and graphs hold; from the meta device there is none, and it is made."""
    sizes = (32,) if name.endswith("Norm") else (32, 32)
    layer = getattr(te, name)(*sizes, device="cpu")
    before = [p.data_ptr() for p in layer.parameters()]
    layer.reset_parameters()
    assert [p.data_ptr() for p in layer.parameters()] == before
    layer = getattr(te, name)(*sizes, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    layer.reset_parameters()
    assert all(p.device.type == "cpu" and bool(p.isfinite().all()) for p in layer.parameters())
