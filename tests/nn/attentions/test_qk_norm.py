"""`qk_norm_type`: heads of q and k are normalised, before or after the rotary embedding; `L2Normalization` itself."""

import copy
from typing import Any

import pytest
import torch
from shared.transformer_layers import RECIPE, layer_of, numbers

import reference as te
from reference.nn.layers.layernorm import L2Normalization

TYPES = ("L2Normalization", "RMSNorm", "LayerNorm")
BF16 = torch.bfloat16


def attention(qk_norm_type: str, before: bool, **arguments: Any) -> te.MultiheadAttention:
    torch.manual_seed(1)
    layer = te.MultiheadAttention(
        64,
        4,
        attention_dropout=0.0,
        params_dtype=BF16,
        qk_norm_type=qk_norm_type,
        qk_norm_before_rope=before,
        **arguments,
    )
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_((numbers(i, *p.shape) * 0.2).bfloat16())
    return layer


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x `[s, b, h, d]` in float64, halves paired."""
    first, second = x.chunk(2, -1)
    return x * angles.double().cos() + torch.cat((-second, first), -1) * angles.double().sin()


def exact(layer: te.MultiheadAttention, p: dict[str, torch.Tensor], x: torch.Tensor, angles: Any) -> torch.Tensor:
    """The same attention in float64, with PyTorch's functions."""
    f = torch.nn.functional
    s, b, _ = x.shape
    q, k, v = (
        f.linear(x, p[f"qkv.{n}_weight"], p[f"qkv.{n}_bias"]).view(s, b, -1, 16) for n in ("query", "key", "value")
    )

    def normed(t: torch.Tensor, name: str) -> torch.Tensor:
        if isinstance(layer.q_norm, L2Normalization):
            return t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        if isinstance(layer.q_norm, te.RMSNorm):
            return f.rms_norm(t, (16,), p[f"{name}.weight"], 1e-6)
        return f.layer_norm(t, (16,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-6)

    for step in ("norm", "rope") if layer.qk_norm_before_rope else ("rope", "norm"):
        if step == "norm":
            q, k = normed(q, "q_norm"), normed(k, "k_norm")
        elif angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    out = f.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
    return f.linear(out, p["proj.weight"], p["proj.bias"])


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("qk_norm_type", TYPES)
def test_against_float64(qk_norm_type: str, before: bool) -> None:
    layer = attention(qk_norm_type, before, num_gqa_groups=2)
    x, g = (numbers(i, 24, 2, 64).bfloat16().requires_grad_() for i in (1, 2))
    angles = numbers(3, 24, 1, 1, 16)
    y = layer(x, rotary_pos_emb=angles)
    y.backward(g.detach())
    wide = x.detach().double().requires_grad_()
    p = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}
    expected = exact(layer, p, wide, angles)
    expected.backward(g.detach().double())
    # A dozen roundings to bf16 (2^-9 each) stand one after the other, forward and backward.
    assert (y.double() - expected).norm() / expected.norm() < 0.02
    assert (x.grad.double() - wide.grad).norm() / wide.grad.norm() < 0.03
    for name, value in layer.named_parameters():
        if p[name].grad.norm() > 1e-9:  # nothing where it shifts all keys alike, which softmax does not see
            assert (value.grad.double() - p[name].grad).norm() / p[name].grad.norm() < 0.04, name
    layer.qk_norm_before_rope = not before
    if qk_norm_type != "L2Normalization":  # a rotation leaves the length as it is
        assert (layer(x, rotary_pos_emb=angles).double() - expected).norm() / expected.norm() > 0.05


@pytest.mark.sample(6)
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("attention_type", ["self", "cross"])
@pytest.mark.parametrize("qk_norm_type", TYPES)
def test_it_is_the_modules_one_after_the_other(
    qk_norm_type: str, attention_type: str, qkv_format: str, same_bits
) -> None:
    layer = attention(
        qk_norm_type,
        False,
        attention_type=attention_type,
        qkv_format=qkv_format,
        fuse_qkv_params=True,
        num_gqa_groups=2,
    )
    x, source = (numbers(i, 24, 24, 64).bfloat16() for i in (1, 2))
    angles = numbers(3, 24, 1, 1, 16)
    if attention_type == "self":
        q, k, v = layer.qkv(x).view(24, 24, 2, 4, 16).split((2, 1, 1), 3)
    else:
        q, (k, v) = layer.query_layer(x), layer.key_value(source).view(24, 24, 2, 2, 16).split((1, 1), 3)
    q, k, v = (t.reshape(24, 24, -1, 16) for t in (q, k, v))
    q, k = (te.apply_rotary_pos_emb(t, angles, tensor_format=qkv_format) for t in (q, k))
    q, k = layer.q_norm(q), layer.k_norm(k)
    expected = layer.proj(layer.core_attention(q, k, v, attn_mask_type="causal"))
    given = (x, None, source) if attention_type == "cross" else (x,)
    same_bits(layer(*given, rotary_pos_emb=angles), expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("size", [8, 16, 40, 64, 256])
def test_l2_normalization(size: int, dtype: torch.dtype, same_bits) -> None:
    """At most 24 fp32 roundings of positive numbers (tree, square root, division, products), then the dtype's own."""
    norm = L2Normalization(size, 1e-6)
    x, g = ((numbers(i, 30, size) * 3).to(dtype) for i in (1, 2))
    x[0] = 0
    a, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    y, truth = norm(a), wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    error = torch.finfo(dtype).eps / 2 + 24 * 2.0**-24
    normal = truth.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    assert ((y.double() - truth).abs() <= error * normal).all()
    y.backward(g)
    truth.backward(g.double())
    inverse = 1 / (wide.detach().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    bound = inverse * (g.double().abs() + g.double().norm(dim=-1, keepdim=True))
    assert ((a.grad.double() - wide.grad).abs() <= error * bound).all()
    same_bits(norm(x.view(5, 3, 2, size)), norm(x).view(5, 3, 2, size))
    scale = torch.full((size,), size**-0.5)
    same_bits(norm(x), torch.ops.twin.norm(x, scale, None, 1e-6 / size, False, "rmsnorm", dtype)[0])


def test_names_in_a_checkpoint_are_transformer_engines() -> None:
    for qk_norm_type, names in (("L2Normalization", []), ("RMSNorm", ["weight"]), ("LayerNorm", ["weight", "bias"])):
        layer = layer_of(qk_norm_type=qk_norm_type, layer_type="decoder")
        for part in ("self_attention", "inter_attention"):
            found = [n for n in layer.state_dict() if f"{part}.q_norm." in n or f"{part}.k_norm." in n]
            assert sorted(found) == sorted(f"{part}.{norm}.{n}" for norm in ("q_norm", "k_norm") for n in names)
    layer = attention("RMSNorm", False)
    assert list(layer.state_dict())[:2] == ["q_norm.weight", "k_norm.weight"]
    assert layer.q_norm.weight.shape == (16,)
    assert layer.q_norm.eps == 1e-6
    assert attention("RMSNorm", False, qk_norm_eps=0.5).k_norm.eps == 0.5
    assert te.MultiheadAttention(64, 4).q_norm is None


def test_a_norm_without_parameters_follows_the_module() -> None:
    layer = te.MultiheadAttention(64, 4, qk_norm_type="L2Normalization", device="meta")
    assert layer.q_norm is layer.k_norm
    assert layer.q_norm.scale.is_meta
    layer.to_empty(device="cpu")
    assert layer.q_norm.scale.tolist() == [0.25] * 16
    other = copy.deepcopy(layer.half())
    assert other.q_norm.scale.dtype == torch.float32
    other.q_norm._put(torch.device("meta"))
    assert other.q_norm(torch.ones(2, 16)).shape == (2, 16)


@pytest.mark.parametrize("qk_norm_type", TYPES)
def test_training_in_fp8_and_in_a_checkpoint(qk_norm_type: str, same_bits) -> None:
    """Microbatches with cached weights, recomputation and FP8: a checkpoint changes no bit, and a step learns."""
    found = []
    for recomputed in (False, True):
        layer = layer_of(qk_norm_type=qk_norm_type, attention_dropout=0.1, hidden_dropout=0.1)
        for step in range(2):
            torch.manual_seed(step)
            layer.zero_grad()
            x = numbers(step, 24, 2, 64).bfloat16().requires_grad_()
            with te.autocast(recipe=RECIPE):
                y = te.checkpoint(layer, x) if recomputed else layer(x)
            y.backward(numbers(9, *y.shape).bfloat16())
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
        assert all(p.grad is not None for p in layer.parameters())
    for a, b in zip(*found, strict=True):
        same_bits(a, b)


def test_gradients_and_masks_of_a_large_eps() -> None:
    """A large eps leaves q and k small, so that attention is nearly a mean."""
    layer = attention("L2Normalization", False, attn_mask_type="no_mask", qk_norm_eps=1e20)
    x = numbers(1, 24, 2, 64).bfloat16()
    value = layer.qkv(x).view(24, 2, -1)[..., 128:].float().mean(0, keepdim=True).expand(24, -1, -1).bfloat16()
    # Weights are bf16, and so are mean and projection.
    torch.testing.assert_close(layer(x), layer.proj(value), rtol=0.05, atol=0.05)
