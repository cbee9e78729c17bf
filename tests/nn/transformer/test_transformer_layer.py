"""`TransformerLayer` against torch.nn in float64, against its formula, over training steps, and in checkpoints."""

from typing import Any

import pytest
import torch
from shared.transformer_layers import RECIPE, VARIANTS, layer_of, numbers

import reference as te


def exact(layer: te.TransformerLayer, x: torch.Tensor, causal: bool) -> torch.Tensor:
    """torch.nn's pre-norm encoder layer in float64 with the same parameters (q, k, v as one matrix)."""
    p = dict(layer.named_parameters())
    wide = torch.nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, norm_first=True, dtype=torch.float64,
        activation=lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    )  # fmt: skip
    qkv = "self_attention.layernorm_qkv."
    names = {
        "self_attn.in_proj_weight": torch.cat([p[qkv + f"{n}_weight"] for n in ("query", "key", "value")]),
        "self_attn.in_proj_bias": torch.cat([p[qkv + f"{n}_bias"] for n in ("query", "key", "value")]),
        "self_attn.out_proj.weight": p["self_attention.proj.weight"],
        "self_attn.out_proj.bias": p["self_attention.proj.bias"],
        "linear1.weight": p["layernorm_mlp.fc1_weight"],
        "linear1.bias": p["layernorm_mlp.fc1_bias"],
        "linear2.weight": p["layernorm_mlp.fc2_weight"],
        "linear2.bias": p["layernorm_mlp.fc2_bias"],
        "norm1.weight": p[qkv + "layer_norm_weight"],
        "norm1.bias": p[qkv + "layer_norm_bias"],
        "norm2.weight": p["layernorm_mlp.layer_norm_weight"],
        "norm2.bias": p["layernorm_mlp.layer_norm_bias"],
    }
    wide.load_state_dict({name: value.detach().double() for name, value in names.items()})
    layer.wide = wide
    mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[0], dtype=torch.float64) if causal else None
    return wide(x, src_mask=mask, is_causal=causal)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("fp8", [False, True])
def test_against_torchs_own_layer_in_float64(mask: str, fp8: bool) -> None:
    """bf16 rounds by 2^-9 some ten times in a row; E4M3 by 2^-4 and E5M2 by 2^-3, beside residuals that are exact."""
    layer = layer_of(self_attn_mask_type=mask)
    x, g = numbers(7, 40, 2, 64).bfloat16().requires_grad_(), numbers(8, 40, 2, 64).bfloat16()
    for _ in range(2):
        layer.zero_grad()
        x.grad = None
        with te.autocast(enabled=fp8, recipe=RECIPE):
            y = layer(x)
        y.backward(g)
    wide = x.detach().double().requires_grad_()
    expected = exact(layer, wide, mask == "causal")
    expected.backward(g.double())
    own, theirs = dict(layer.named_parameters()), layer.wide
    grads = [
        (x.grad, wide.grad),
        (own["self_attention.proj.weight"].grad, theirs.self_attn.out_proj.weight.grad),
        (own["self_attention.layernorm_qkv.value_weight"].grad, theirs.self_attn.in_proj_weight.grad[128:]),
        (own["layernorm_mlp.fc1_weight"].grad, theirs.linear1.weight.grad),
        (own["layernorm_mlp.fc2_bias"].grad, theirs.linear2.bias.grad),
        (own["layernorm_mlp.layer_norm_weight"].grad, theirs.norm2.weight.grad),
    ]
    assert (y.double() - expected).norm() / expected.norm() < (0.1 if fp8 else 0.01)
    for got, want in grads:
        assert (got.double() - want).norm() / want.norm() < (0.25 if fp8 else 0.03)


@pytest.mark.sample(5)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fp8", [False, True])
def test_variants_train_and_recompute(variant: str, fp8: bool, same_bits) -> None:
    """Each variant learns to map x to 0, and `checkpoint` around it changes no bit of anything."""
    results, losses = [], []
    for wrapped in (False, True):
        layer = layer_of(**VARIANTS[variant])
        other = numbers(20, 12, 2, 64).bfloat16() if variant == "decoder" else None
        for _ in range(4):
            x = numbers(1, 24, 2, 64).bfloat16().requires_grad_()
            layer.zero_grad()
            with te.autocast(enabled=fp8, recipe=RECIPE):
                y = te.checkpoint(layer, x, encoder_output=other) if wrapped else layer(x, encoder_output=other)
            y.backward(y.detach() / 10)
            losses.append(y.float().square().mean().item())
            with torch.no_grad():
                for p in layer.parameters():
                    p.copy_(p - (p.grad * 0.02))
        results.append((y, x.grad, *layer.parameters()))
    assert losses[3] < losses[0]
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


def by_hand(layer: te.TransformerLayer, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """The module's formulas over the layer's submodules, without dropout; each sum rounds once."""
    post = layer.apply_residual_connection_post_layernorm

    def add(results: Any, residual: torch.Tensor, normed: bool) -> torch.Tensor:
        y, bias, *norm = results
        residual = norm[0] if post and normed else residual
        return residual + (y if bias is None else y + bias)

    if layer.parallel_attention_mlp:
        both = x.view_as(x)  # so that the halves' gradients are added before the residual's
        return x + (layer.self_attention(both) + layer.layernorm_mlp(both))
    h = add(layer.self_attention(x), x, not layer.output_layernorm)
    if other is not None:
        h = add(layer.inter_attention(h, encoder_output=other), h, True)
    y = add(layer.layernorm_mlp(h), h, True)
    return layer.layernorm(y) if layer.output_layernorm else y


BY_HAND: dict[str, dict[str, Any]] = {
    "plain": {},
    **{name: settings for name, settings in VARIANTS.items() if "hidden_dropout" not in settings},
    "parallel": {"parallel_attention_mlp": True},
    "parallel, no bias": {"parallel_attention_mlp": True, "bias": False, "normalization": "RMSNorm"},
    "post-norm residual, output norm": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
    "post-norm decoder": {"apply_residual_connection_post_layernorm": True, "layer_type": "decoder"},
    "decoder, output norm": {"layer_type": "decoder", "output_layernorm": True, "normalization": "RMSNorm"},
}


@pytest.mark.parametrize("variant", BY_HAND)
def test_the_layer_is_its_formula_over_its_submodules(variant: str, same_bits) -> None:
    """Gradients of the residual and of what passes the submodule are added by autograd, with one rounding."""
    layer = layer_of(**BY_HAND[variant])
    other = numbers(20, 12, 2, 64).bfloat16() if layer.layer_type == "decoder" else None
    found = []
    for run in (lambda x: layer(x, encoder_output=other), lambda x: by_hand(layer, x, other)):
        layer.zero_grad()
        x = numbers(1, 24, 2, 64).bfloat16().requires_grad_()
        y = run(x)
        y.backward(numbers(2, *y.shape).bfloat16())
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        same_bits(a, b)


def test_names_are_transformer_engines() -> None:
    encoder = [n for n, _ in layer_of().named_parameters()]
    assert encoder[:3] == [
        f"self_attention.layernorm_qkv.{n}" for n in ("layer_norm_weight", "layer_norm_bias", "query_weight")
    ]
    assert encoder[-1] == "layernorm_mlp.fc2_bias"
    decoder = {n for n, _ in layer_of(layer_type="decoder").named_children()}
    assert {"self_attention", "inter_attention", "layernorm_mlp"} <= decoder
    assert "layernorm.weight" in dict(layer_of(output_layernorm=True).named_parameters())


def test_state_dict_round_trip(same_bits) -> None:
    a, b = (
        layer_of(),
        te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16, hidden_dropout=0, attention_dropout=0),
    )
    x = numbers(3, 16, 2, 64).bfloat16()
    for _ in range(2):
        with te.autocast(recipe=RECIPE):
            a(x).sum().backward()
    b.load_state_dict(a.state_dict())
    with te.autocast(recipe=RECIPE):
        same_bits(a(x), b(x))


def test_torch_autocast_casts_the_input_first(same_bits) -> None:
    layer, x = layer_of(params_dtype=torch.float32), numbers(4, 8, 2, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        z = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    same_bits(y, z)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_fp32_against_torchs_own_layer_in_float64(mask: str) -> None:
    """Some hundred roundings of fp32."""
    layer, x = layer_of(self_attn_mask_type=mask, params_dtype=torch.float32), numbers(7, 40, 2, 64)
    expected = exact(layer, x.double(), mask == "causal")
    assert (layer(x).double() - expected).norm() / expected.norm() < 1e-5
