"""`TransformerLayer` against torch.nn in float64, against its parts, over training steps, and its refusals."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import reference as te
from reference.nn import blocks
from reference.ops import library

RECIPE = te.DelayedScaling(amax_history_len=4)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def layer_of(**arguments: Any) -> te.TransformerLayer:
    torch.manual_seed(1)
    settings: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    layer = te.TransformerLayer(64, 128, 4, **(settings | arguments))
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_((numbers(i, *p.shape) * 0.05).to(p.dtype))
    return layer


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


VARIANTS: dict[str, dict[str, Any]] = {
    "gqa, swiglu, rmsnorm, no bias": {
        "num_gqa_groups": 2, "activation": "swiglu", "normalization": "RMSNorm", "bias": False,
    },
    "one qkv parameter, batch first": {"fuse_qkv_params": True, "attn_input_format": "bshd"},
    "post-norm residual": {"apply_residual_connection_post_layernorm": True},
    "output norm": {"output_layernorm": True, "zero_centered_gamma": True},
    "decoder": {"layer_type": "decoder"},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
}  # fmt: skip


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

    h = add(layer.self_attention(x), x, not layer.output_layernorm)
    if other is not None:
        h = add(layer.inter_attention(h, encoder_output=other), h, True)
    y = add(layer.layernorm_mlp(h), h, True)
    return layer.layernorm(y) if layer.output_layernorm else y


BY_HAND: dict[str, dict[str, Any]] = {
    "plain": {},
    **{name: settings for name, settings in VARIANTS.items() if name != "dropout"},
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


def test_weights_of_several_dtypes_are_cast_apart(same_bits) -> None:
    found = []
    for hooked in (False, True):
        layer = layer_of()
        layer.self_attention.proj.float()
        layer.layernorm_mlp.float()
        if hooked:
            layer.self_attention.proj.register_forward_hook(lambda module, inputs, out: None)
            layer.layernorm_mlp.register_forward_hook(lambda module, inputs, out: None)
        x = numbers(1, 24, 2, 64).bfloat16().requires_grad_()
        with te.autocast(recipe=RECIPE):
            y = layer(x)
        y.backward(numbers(2, *y.shape).bfloat16())
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        same_bits(a, b)


def test_what_runs_as_a_block() -> None:
    def is_block(residual_is_norm: bool = False, recomputes: bool = False, **arguments: Any) -> bool:
        attention = te.MultiheadAttention(64, 4, params_dtype=torch.bfloat16, **arguments)
        return blocks.is_attention_block(attention, residual_is_norm, recomputes)

    assert is_block(input_layernorm=True)
    assert is_block(input_layernorm=True, recomputes=True)
    assert is_block(input_layernorm=True, attention_type="cross")
    assert is_block(input_layernorm=True, return_layernorm_output=True, residual_is_norm=True)
    assert not is_block(input_layernorm=False)
    assert not is_block(input_layernorm=True, return_layernorm_output=True)
    assert is_block(input_layernorm=True, attention_backend="cudnn")
    assert not is_block(input_layernorm=True, attention_backend="cudnn", recomputes=True)
    assert not is_block(input_layernorm=True, num_gqa_groups=2, attention_backend="cudnn")
    mlp = te.LayerNormMLP(64, 64, return_layernorm_output=True)
    assert [blocks.is_mlp_block(mlp, residual_is_norm) for residual_is_norm in (False, True)] == [False, True]


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "gqa, swiglu, rmsnorm, no bias": VARIANTS["gqa, swiglu, rmsnorm, no bias"],
    "one qkv parameter, batch first": VARIANTS["one qkv parameter, batch first"],
    "padding": {"self_attn_mask_type": "padding"},
    "padding, batch first": {"self_attn_mask_type": "padding", "attn_input_format": "bshd"},
    "fp32 parameters": {"params_dtype": torch.float32},
    "frozen up to the mlp": {},
    "frozen up to proj": {},
    "only the biases": {},
    "main_grad": {"fuse_wgrad_accumulation": True, "fuse_qkv_params": True},
    "frozen input": {},
    "rotary": {"num_gqa_groups": 2, "attention_dropout": 0.2},
    "rotary, batch first, neighbours": {"attn_input_format": "bshd", "rotary_pos_interleaved": True},
    "recomputed attention": {"attention_dropout": 0.2, "hidden_dropout": 0.2},
    "recomputed attention, rotary": {"fuse_qkv_params": True},
    "post norm": {"apply_residual_connection_post_layernorm": True, "hidden_dropout": 0.2},
    "decoder": {"layer_type": "decoder", "attention_dropout": 0.2, "num_gqa_groups": 2},
    "decoder, post norm, recomputed attention": {
        "layer_type": "decoder",
        "apply_residual_connection_post_layernorm": True,
        "fuse_qkv_params": True,
    },
    "decoder, frozen but for keys and values": {"layer_type": "decoder"},
    "decoder, frozen keys and values": {"layer_type": "decoder", "attn_input_format": "bshd"},
}
FROZEN = {
    "frozen up to the mlp": lambda name: not name.startswith("layernorm_mlp.fc"),
    "frozen up to proj": lambda name: name.startswith("self_attention.layernorm_qkv"),
    "only the biases": lambda name: name.endswith("weight"),
    "decoder, frozen but for keys and values": lambda name: "key_value" not in name,
    "decoder, frozen keys and values": lambda name: "key_value" in name,
}


def call_of(variant: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """What a variant's forward takes beside x and its mask."""
    found: dict[str, Any] = {}
    if "rotary" in variant:
        found["rotary_pos_emb"] = (numbers(3, 24, 1, 1, 16).float(), numbers(4, 24, 1, 1, 8).float())
    if "recomputed" in variant:
        found["checkpoint_core_attention"] = True
    if "decoder" in variant:
        source = (2, 17, 64) if "batch first" in variant or "frozen keys" in variant else (17, 2, 64)
        found["encoder_output"] = numbers(5, *source).bfloat16()
    return found


@pytest.mark.parametrize("variant", PARTS)
@pytest.mark.parametrize("recipe", [None, RECIPE, te.recipe.Float8CurrentScaling()], ids=["16", "delayed", "current"])
def test_the_layer_as_one_has_the_bits_of_its_parts(
    variant: str, recipe: te.recipe.Recipe | None, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that is not small runs as two halves, one with a hook on a part part by part.

    Microbatches, with cached weights, and a recomputed one.
    """
    shape = (2, 24, 64) if PARTS[variant].get("attn_input_format") == "bshd" else (24, 2, 64)
    mask = (torch.arange(24) >= torch.tensor([[24], [15]])).view(2, 1, 1, 24)
    fp8, three = recipe is not None, []
    for nodes in ("one", "two", "many"):
        monkeypatch.setattr(blocks, "SMALL", 1 << 25 if nodes == "one" else 0)
        layer = layer_of(**PARTS[variant])
        if nodes == "many":
            for name, part in layer.named_modules():
                if name.endswith(("proj", "mlp")):
                    part.register_forward_hook(lambda module, inputs, out: None)
        for name, p in layer.named_parameters():
            p.requires_grad_(not FROZEN.get(variant, lambda name: False)(name))
            p.main_grad = torch.zeros(p.shape)
        found = []
        for step, first in enumerate((None, True, False, None)):
            layer.zero_grad()
            x = numbers(1, *shape).bfloat16().requires_grad_("frozen" not in variant or "frozen keys" in variant)
            call = call_of(variant, shape)
            source = call.get("encoder_output", x)
            if source is not x:
                source.requires_grad_("frozen keys" not in variant)
            with te.autocast(enabled=fp8, recipe=recipe), torch.autocast("cpu", torch.bfloat16):
                if step == 3:
                    y = te.checkpoint(layer, x, mask, **call)
                else:
                    y = layer(x, mask, is_first_microbatch=first, **call)
            y.backward(numbers(2, *y.shape).bfloat16())
            found += [y, x.grad, source.grad]
            found += [*(p.grad for p in layer.parameters()), *(p.main_grad for p in layer.parameters())]
            found += [t for n, t in layer.state_dict().items() if "_extra_state" in n]
            found = [None if t is None else t.clone() for t in found]
        three.append(found)
    for a, b, c in zip(*three, strict=True):
        assert (a is None) == (b is None) == (c is None)
        if a is not None:
            same_bits(a, b)
            same_bits(a, c)


def parts_of(layer: te.TransformerLayer) -> dict[str, torch.nn.Module]:
    attention = layer.self_attention
    return {
        "self_attention": attention,
        "layernorm_qkv": attention.layernorm_qkv,
        "core_attention": attention.core_attention,
        "proj": attention.proj,
        "layernorm_mlp": layer.layernorm_mlp,
    }


def replaced(part: torch.nn.Module, forward: Any) -> None:
    part.forward = forward


def subclassed(part: torch.nn.Module, forward: Any) -> None:
    part.__class__ = type("Mine", (type(part),), {"forward": lambda self, *args, **kwargs: forward(*args, **kwargs)})


LOOKS: dict[str, Any] = {
    "a hook": lambda part, see: part.register_forward_hook(lambda *_: see()),
    "a hook before": lambda part, see: part.register_forward_pre_hook(lambda *_: see()),
    "a backward hook": lambda part, see: part.register_full_backward_hook(lambda *_: see()),
    "a backward hook before": lambda part, see: part.register_full_backward_pre_hook(lambda *_: see()),
}
MODULE = torch.nn.modules.module
GLOBAL_LOOKS = {
    "a hook": MODULE.register_module_forward_hook,
    "a hook before": MODULE.register_module_forward_pre_hook,
    "a backward hook": MODULE.register_module_full_backward_hook,
    "a backward hook before": MODULE.register_module_full_backward_pre_hook,
}


def found_by(layer: te.TransformerLayer) -> list[torch.Tensor]:
    """The bits of a step."""
    x = numbers(1, 24, 2, 64).bfloat16().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(numbers(2, 24, 2, 64).bfloat16())
    return [y, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("small", [0, 1 << 25], ids=["in halves", "as one"])
@pytest.mark.parametrize("look", [*LOOKS, "a forward of its own", "a class of its own"])
@pytest.mark.parametrize("name", list(parts_of(layer_of())))
def test_a_part_that_somebody_looks_at_runs_as_a_module(
    name: str, look: str, small: int, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part, each way to look: what looks is called once, and no bit changes."""
    monkeypatch.setattr(blocks, "SMALL", small)
    layer = layer_of()
    expected = [t.detach().clone() for t in found_by(layer)]
    part, seen = parts_of(layer)[name], []
    if look in LOOKS:
        LOOKS[look](part, lambda: seen.append(name))
    else:
        usual = part.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return usual(*args, **kwargs)

        (replaced if look == "a forward of its own" else subclassed)(part, forward)
    for a, b in zip(found_by(layer), expected, strict=True):
        same_bits(a, b)
    assert seen == [name]


@pytest.mark.parametrize("look", GLOBAL_LOOKS)
def test_a_global_hook_of_any_kind_sees_every_part(look: str) -> None:
    layer, seen = layer_of(), []
    handle = GLOBAL_LOOKS[look](lambda part, *_: seen.append(part))
    try:
        found_by(layer)
    finally:
        handle.remove()
    assert set(parts_of(layer).values()) <= set(seen)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_long_products_accumulate_in_the_layer_as_in_its_parts(
    dropout: float, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 128, fast and split accumulation give the same bits; these products are longer."""
    found = []
    for nodes in ("one", "two", "many"):
        monkeypatch.setattr(blocks, "SMALL", 1 << 25 if nodes == "one" else 0)
        torch.manual_seed(1)
        layer = te.TransformerLayer(
            144, 160, 3, hidden_dropout=dropout, attention_dropout=0.0, params_dtype=torch.bfloat16
        )
        if nodes == "many":
            for part in (layer.self_attention.proj, layer.layernorm_mlp):
                part.register_forward_hook(lambda module, inputs, out: None)
        for _ in range(2):
            x = numbers(1, 80, 2, 144).bfloat16().requires_grad_()
            layer.zero_grad()
            with te.autocast(recipe=RECIPE):
                y = layer(x)
            y.backward(numbers(2, *y.shape).bfloat16())
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for a, b, c in zip(*found, strict=True):
        same_bits(a, c)
        same_bits(b, c)


@pytest.mark.parametrize("small", [0, 1 << 25])
def test_the_output_may_be_changed_in_place(small: int, same_bits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SMALL", small)
    layer, x, y = layer_of(), numbers(1, 24, 2, 64).bfloat16().requires_grad_(), []
    for change in (lambda out: out.mul(2), lambda out: out.mul_(2)):
        y.append(change(layer(x)))
        y.append(torch.autograd.grad(y[-1].sum(), x)[0])
    same_bits(y[0], y[2])
    same_bits(y[1], y[3])


def test_a_global_hook_sees_every_part() -> None:
    seen: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda part, _, out: seen.append(type(part).__name__))
    try:
        layer_of()(numbers(1, 24, 2, 64).bfloat16())
    finally:
        handle.remove()
    assert {"LayerNormLinear", "DotProductAttention", "Linear", "MultiheadAttention", "LayerNormMLP"} <= set(seen)


def reached(layer: torch.nn.Module, name: str) -> dict[str, Any]:
    """The value of an attribute in every submodule that has it, by the submodule's name."""
    return {path: getattr(part, name) for path, part in layer.named_modules() if path and name in vars(part)}


QKV, QUERY, MLP = "self_attention.layernorm_qkv", "inter_attention.layernorm_query", "layernorm_mlp"
DECODER = {"layer_type": "decoder"}
OUT_NORM = {"output_layernorm": True}
LINEARS = {QKV, QUERY, MLP, "self_attention.proj", "inter_attention.proj", "inter_attention.key_value"}
CORES = {"self_attention.core_attention", "inter_attention.core_attention"}


@pytest.mark.parametrize(
    ("settings", "attribute", "value", "where"),
    [
        ({"layernorm_epsilon": 1e-3, **DECODER}, "eps", 1e-3, {QKV, QUERY, MLP}),
        ({"layernorm_epsilon": 1e-3, **OUT_NORM}, "eps", 1e-3, {MLP, "layernorm"}),
        ({"zero_centered_gamma": True, **DECODER}, "zero_centered_gamma", True, {QKV, QUERY, MLP}),
        ({"zero_centered_gamma": True, **OUT_NORM}, "zero_centered_gamma", True, {MLP, "layernorm"}),
        ({"normalization": "RMSNorm", **DECODER}, "kind", "rmsnorm", {QKV, QUERY, MLP}),
        ({"attention_dropout": 0.3, **DECODER}, "attention_dropout", 0.3, CORES),
        ({"kv_channels": 8, **DECODER}, "kv_channels", 8, CORES),
        ({"num_gqa_groups": 2, **DECODER}, "num_gqa_groups", 2, {*CORES, "self_attention", "inter_attention"}),
        ({"attn_input_format": "bshd", **DECODER}, "qkv_format", "bshd", {*CORES, "self_attention", "inter_attention"}),
        (
            {"fuse_wgrad_accumulation": True, "fuse_qkv_params": True, **DECODER},
            "fuse_wgrad_accumulation",
            True,
            LINEARS,
        ),
        ({"bias": False, **DECODER}, "use_bias", False, LINEARS),
        ({"activation": "swiglu"}, "activation", "swiglu", {MLP}),
        ({"rotary_pos_interleaved": True}, "rotary_pos_interleaved", True, {"self_attention"}),
        (
            {"self_attn_mask_type": "no_mask"},
            "attn_mask_type",
            "no_mask",
            {"self_attention", "self_attention.core_attention"},
        ),
    ],
)
def test_arguments_reach_every_part(settings: dict[str, Any], attribute: str, value: Any, where: set[str]) -> None:
    found = reached(te.TransformerLayer(64, 128, 4, **settings), attribute)
    assert {path for path, one in found.items() if one == value} >= where
    assert where >= {path for path, one in found.items() if one == value}


def test_qkv_weights_may_be_interleaved_or_not(same_bits) -> None:
    """Heads of q, k and v in turn, or all of q before all of k: the same layer, its rows in another order."""
    x, (one, other) = (
        numbers(1, 24, 2, 64).bfloat16(),
        (layer_of(fuse_qkv_params=True, qkv_weight_interleaved=interleaved) for interleaved in (True, False)),
    )
    other.load_state_dict(one.state_dict())
    qkv, mixed = other.self_attention.layernorm_qkv, one.self_attention.layernorm_qkv
    with torch.no_grad():
        for name in ("weight", "bias"):
            heads = mixed.get_parameter(name).unflatten(0, (4, 3, 16))
            qkv.get_parameter(name).copy_(heads.transpose(0, 1).flatten(0, 2))
    same_bits(one(x), other(x))
    assert not torch.equal(qkv.weight, mixed.weight)


def test_weights_are_drawn_by_their_methods_inside_the_tracker() -> None:
    inside: list[bool] = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name: str = "") -> Iterator[None]:
            inside.append(True)
            yield
            inside.pop()

    def method(value: float) -> Any:
        def fill(weight: torch.Tensor) -> None:
            assert inside == [True]
            torch.nn.init.constant_(weight, value)

        return fill

    layer = te.TransformerLayer(
        64,
        128,
        4,
        init_method=method(1.0),
        output_layer_init_method=method(2.0),
        get_rng_state_tracker=Tracker,
        layer_type="decoder",
    )
    for name, p in layer.named_parameters():
        if name.endswith("weight") and not name.endswith("norm_weight"):
            assert bool((p == (2.0 if "proj" in name or "fc2" in name else 1.0)).all()), name


def test_microbatches_reach_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decoder, whose parts are modules, of an encoder in halves, as one, and with a hook on its MLP."""
    for small, kind in ((0, "decoder"), (0, "encoder"), (1 << 25, "encoder"), (0, "hooked"), (0, "post-norm")):
        monkeypatch.setattr(blocks, "SMALL", small)
        layer = layer_of(
            layer_type="decoder" if kind == "decoder" else "encoder",
            apply_residual_connection_post_layernorm=kind == "post-norm",
        )
        if kind == "hooked":
            layer.layernorm_mlp.register_forward_hook(lambda module, inputs, out: None)
        x = numbers(1, 24, 2, 64).bfloat16().requires_grad_()
        parts = [part for part in layer.modules() if isinstance(getattr(part, "_fp8_workspaces", None), dict)]
        parts = [part for part in parts if part.fp8_weights]
        for first in (None, True):
            with te.autocast(recipe=RECIPE):
                layer(x, encoder_output=x if kind == "decoder" else None, is_first_microbatch=first)
            assert [len(part._fp8_workspaces) for part in parts] == [
                0 if first is None else part.num_gemms for part in parts
            ], (kind, first)


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


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"layer_type": "both"}, ValueError, "layer_type='both'; one of"),
        ({"parallel_attention_mlp": True}, NotImplementedError, "parallel_attention_mlp=True"),
        ({"drop_path_rate": 0.1}, NotImplementedError, "drop_path_rate=0.1"),
        ({"hidden_dropout": 1.5}, ValueError, "hidden_dropout=1.5; 0 <= p < 1"),
        ({"sequence_parallel": True}, NotImplementedError, "sequence_parallel=True is not offered"),
        ({"activation": "tanh"}, ValueError, "activation='tanh'"),
    ],
)
def test_constructor_refusals(arguments: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        layer_of(**arguments)


def test_torch_autocast_casts_the_input_first(same_bits) -> None:
    layer, x = layer_of(params_dtype=torch.float32), numbers(4, 8, 2, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        z = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    same_bits(y, z)


def test_transformer_engines_arguments_keep_their_places(same_bits) -> None:
    layer, x = layer_of(), numbers(4, 8, 2, 64).bfloat16()
    same_bits(
        layer(x, None, "causal", None, None, None, None, None, None, None, None, False, None, None, "no_bias"), layer(x)
    )
    with pytest.raises(NotImplementedError, match=r"TransformerLayer.forward: window_size=\(4, 0\) is not offered"):
        layer(x, None, "causal", (4, 0))
    with pytest.raises(NotImplementedError, match="alibi_slopes="):
        layer(x, alibi_slopes=torch.ones(4))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_fp32_against_torchs_own_layer_in_float64(mask: str) -> None:
    """Some hundred roundings of fp32."""
    layer, x = layer_of(self_attn_mask_type=mask, params_dtype=torch.float32), numbers(7, 40, 2, 64)
    expected = exact(layer, x.double(), mask == "causal")
    assert (layer(x).double() - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("small", [0, 1 << 25])
def test_a_mask_type_of_forward_replaces_the_layers(small: int, same_bits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SMALL", small)
    x, other = numbers(4, 8, 2, 64).bfloat16(), numbers(5, 8, 2, 64).bfloat16()
    for settings in ({}, {"output_layernorm": True}, {"layer_type": "decoder", "enc_dec_attn_mask_type": "causal"}):
        causal, full = layer_of(**settings), layer_of(**settings, self_attn_mask_type="no_mask")
        arguments = {"encoder_output": other} if "layer_type" in settings else {}
        same_bits(causal(x, self_attn_mask_type="no_mask", **arguments), full(x, **arguments))
        same_bits(full(x, self_attn_mask_type="causal", **arguments), causal(x, **arguments))
        assert not torch.equal(full(x, **arguments), causal(x, **arguments))
    decoder = layer_of(layer_type="decoder")
    across = layer_of(layer_type="decoder", enc_dec_attn_mask_type="causal")
    found = decoder(x, encoder_output=other, enc_dec_attn_mask_type="causal")
    same_bits(found, across(x, encoder_output=other))
    assert not torch.equal(found, decoder(x, encoder_output=other))
    mask = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    mask[1, ..., 5:] = True
    masked = decoder(
        x, encoder_output=other, enc_dec_attn_mask=(torch.zeros_like(mask), mask), enc_dec_attn_mask_type="padding"
    )
    shorter = decoder(x[:, 1:], encoder_output=other[:5, 1:])
    same_bits(masked[:, 1:], shorter)


@pytest.mark.parametrize("settings", [{}, {"layer_type": "decoder"}, {"output_layernorm": True}])
@pytest.mark.parametrize("small", [0, 1 << 25])
def test_nothing_is_dropped_in_evaluation(
    settings: dict[str, Any], small: int, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SMALL", small)
    x = numbers(4, 8, 2, 64).bfloat16()
    arguments = {"encoder_output": x} if "layer_type" in settings else {}
    dropping = layer_of(**settings, hidden_dropout=0.3, attention_dropout=0.3)
    expected = layer_of(**settings)(x, **arguments)
    assert not torch.equal(dropping(x, **arguments), expected)
    same_bits(dropping.eval()(x, **arguments), expected)
    for rate in ("hidden_dropout", "attention_dropout"):
        assert not torch.equal(layer_of(**settings, **{rate: 0.3})(x, **arguments), expected), rate


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_angles_reach_attention(layout: str, interleaved: bool, same_bits) -> None:
    """Of queries and keys, one for both or one each; the layer is its formula over its submodules with them."""
    layer = layer_of(rotary_pos_interleaved=interleaved, attn_input_format=layout)
    x = numbers(4, 8, 8, 64).bfloat16()
    one, other = numbers(5, 8, 1, 1, 16), numbers(6, 8, 1, 1, 16)
    found = []
    for angles in (None, one, (one, other), (other, one), (other, other)):
        y, bias = layer.self_attention(x, rotary_pos_emb=angles)
        h = x + (y + bias)
        y, bias = layer.layernorm_mlp(h)
        found.append(layer(x, rotary_pos_emb=angles))
        same_bits(found[-1], h + (y + bias))
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    same_bits(layer(x, rotary_pos_emb=(one, one)), found[1])


@pytest.mark.parametrize("settings", [{}, {"layer_type": "decoder"}])
def test_attention_alone_may_be_recomputed(
    settings: dict[str, Any], same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    attend = library.twin.attention
    monkeypatch.setattr(library.twin, "attention", lambda *args: (runs.append(1), attend(*args))[1])
    x, found = numbers(4, 8, 2, 64).bfloat16(), []
    arguments = {"encoder_output": x} if settings else {}
    for recompute in (False, True):
        layer, y = layer_of(**settings, attention_dropout=0.2), x.clone().requires_grad_()
        runs.clear()
        layer(y, checkpoint_core_attention=recompute, **arguments).float().square().sum().backward()
        assert len(runs) == (2 if settings else 1) * (2 if recompute else 1)
        found.append([y.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        same_bits(a, b)


def test_an_input_of_another_width_is_explained() -> None:
    for settings in ({}, {"output_layernorm": True}, {"layer_type": "decoder"}):
        x = numbers(4, 8, 2, 48).bfloat16()
        arguments = {"encoder_output": x} if "layer_type" in settings else {}
        with pytest.raises(ValueError, match=r"hidden_states has shape \[8, 2, 48\]; \[sequence, batch, 64\]"):
            layer_of(**settings)(x, **arguments)


def test_encoder_and_decoder_know_their_inputs() -> None:
    x = torch.zeros(4, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="layer_type='encoder' takes no encoder_output"):
        layer_of()(x, encoder_output=x)
    with pytest.raises(ValueError, match="layer_type='decoder' takes an encoder_output"):
        layer_of(layer_type="decoder")(x)
