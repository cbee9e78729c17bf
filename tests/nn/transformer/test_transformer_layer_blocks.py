"""`TransformerLayer` as one pair of functions, as two, and part by part: the same bits, and hooks are called."""

from typing import Any

import pytest
import torch
from shared.transformer_layers import RECIPE, VARIANTS, layer_of, numbers

import reference as te
from reference.nn.transformer import halves


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
    def is_block(residual_is_norm: bool = False, **arguments: Any) -> bool:
        attention = te.MultiheadAttention(64, 4, params_dtype=torch.bfloat16, **arguments)
        return halves.is_attention_block(attention, residual_is_norm)

    assert is_block(input_layernorm=True)
    assert is_block(input_layernorm=True, attention_type="cross")
    assert is_block(input_layernorm=True, return_layernorm_output=True, residual_is_norm=True)
    assert is_block(input_layernorm=False)
    assert is_block(input_layernorm=True, softmax_type="learnable", qk_norm_type="RMSNorm")
    assert not is_block(input_layernorm=True, return_layernorm_output=True)
    assert is_block(input_layernorm=True, num_gqa_groups=2, attention_backend="cudnn")
    mlp = te.LayerNormMLP(64, 64, return_layernorm_output=True)
    assert [halves.is_mlp_block(mlp, residual_is_norm) for residual_is_norm in (False, True)] == [False, True]


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


@pytest.mark.sample(12)
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
        monkeypatch.setattr(halves, "SMALL", 1 << 25 if nodes == "one" else 0)
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


@pytest.mark.sample(14)
@pytest.mark.parametrize("small", [0, 1 << 25], ids=["in halves", "as one"])
@pytest.mark.parametrize("look", [*LOOKS, "a forward of its own", "a class of its own"])
@pytest.mark.parametrize("name", list(parts_of(layer_of())))
def test_a_part_that_somebody_looks_at_runs_as_a_module(
    name: str, look: str, small: int, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part, each way to look: what looks is called once, and no bit changes."""
    monkeypatch.setattr(halves, "SMALL", small)
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
        monkeypatch.setattr(halves, "SMALL", 1 << 25 if nodes == "one" else 0)
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
    monkeypatch.setattr(halves, "SMALL", small)
    layer, x, y = layer_of(), numbers(1, 24, 2, 64).bfloat16().requires_grad_(), []
    for change in (lambda out: out.mul(2), lambda out: out.mul_(2)):
        y.append(change(layer(x)))
        y.append(torch.autograd.grad(y[-1].sum(), x)[0])
    same_bits(y[0], y[2])
    same_bits(y[1], y[3])
