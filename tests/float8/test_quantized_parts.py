"""Weights of several parameters (`parameters_split`, q, k and v of attention), each kept in FP8 with its own scale."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from reference.float8.float8_tensor import Float8Tensor
from reference.ops.library import twin

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
SIZES = {"query": 48, "key": 16, "value": 32}

LAYERS: dict[str, Callable[..., Any]] = {
    "TransformerLayer": lambda **kw: te.TransformerLayer(64, 96, 4, params_dtype=BF16, hidden_dropout=0.0, **kw),
    "grouped queries": lambda **kw: te.TransformerLayer(64, 96, 4, num_gqa_groups=2, params_dtype=BF16, **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(64, 4, input_layernorm=True, params_dtype=BF16, **kw),
    "cross": lambda **kw: te.MultiheadAttention(64, 4, attention_type="cross", params_dtype=BF16, **kw),
    "decoder": lambda **kw: te.TransformerLayer(64, 96, 4, layer_type="decoder", params_dtype=BF16, **kw),
}


def made(name: str, kept: bool = True) -> Any:
    torch.manual_seed(0)
    with te.fp8_model_init(enabled=kept, recipe=RECIPE):
        return LAYERS[name]()


def arguments(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, source = (torch.randn(n, 2, 64, generator=generator).to(BF16) for n in (8, 6))
    first = {"hidden_states": x}
    return first | ({"encoder_output": source} if name in ("cross", "decoder") else {})


def run(layer: Any, name: str, recipe: Any = RECIPE, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    with te.autocast(recipe=recipe):
        return layer(**arguments(name, seed))


def trained(layer: Any, name: str, steps: int = 4) -> list[float]:
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=3e-3, master_weights=True)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (run(layer, name).float() - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parts(layer: Any) -> dict[str, Float8Tensor]:
    return {key: p for key, p in layer.named_parameters() if key.endswith("_weight") and isinstance(p, Float8Tensor)}


@pytest.mark.parametrize("name", LAYERS)
def test_attention_trains_with_its_default_parameters(name: str) -> None:
    layer = made(name)
    names = {key.split(".")[-1] for key in parts(layer)}
    assert {"key_weight", "value_weight"} <= names
    assert ("query_weight" in names) == (name != "cross")
    scale_invs = {f"{key}_scale_inv" for key, p in layer.named_parameters() if isinstance(p, Float8Tensor)}
    assert set(layer.state_dict()) == set(made(name, False).state_dict()) | scale_invs
    losses = trained(layer, name, 8)
    assert losses[-1] < 0.8 * losses[0], losses
    for weight in parts(layer).values():
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        assert weight._scale_inv != 1, "its scale was updated, and it was cast with it"


def far_apart(kind: str) -> Any:
    """A layer whose parts have scales far from each other: a common scale would lose one of them."""
    torch.manual_seed(0)
    with te.fp8_model_init(recipe=RECIPE):
        layer = getattr(te, kind)(32, 96, parameters_split=SIZES, params_dtype=BF16)
    with torch.no_grad():
        for _ in range(2):
            for i, (part, size) in enumerate(SIZES.items()):
                layer.get_parameter(f"{part}_weight").copy_(torch.randn(size, 32) * 100.0 ** (i - 1))
                layer.get_parameter(f"{part}_bias").copy_(torch.randn(size))
            with torch.enable_grad(), te.autocast(recipe=RECIPE):
                layer(torch.randn(8, 32, dtype=BF16))  # its end updates the scales
    assert len({w._scale_inv.item() for w in layer.parts_of("weight")}) == 3
    return layer


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_each_part_is_a_gemm_with_its_own_scale(kind: str, forward_only: bool) -> None:
    """Forward: three layers side by side. Backward of Linear: the parts' products are added in fp32."""
    layer = far_apart(kind)
    recipe = te.recipe.Float8CurrentScaling(backward_override="high_precision" if forward_only else None)
    x, g = torch.randn(24, 32, dtype=BF16).requires_grad_(), torch.randn(24, 96, dtype=BF16)
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    weights, alone = layer.parts_of("weight"), []
    for part, w in zip(SIZES, weights, strict=True):
        with te.fp8_model_init(recipe=RECIPE):
            one = getattr(te, kind)(32, len(w), params_dtype=BF16)
        with torch.no_grad(), te.autocast(recipe=recipe):
            one.weight.copy_(w)
            one.bias.copy_(layer.get_parameter(f"{part}_bias"))
            alone.append(one(x))
    assert_same_bits(y, torch.cat(alone, 1), "y")
    if kind == "Linear":
        assert_same_bits(x.grad, _dx(weights, g, forward_only), "dx")
    joined = getattr(te, kind)(32, 96, params_dtype=BF16)
    own = x.detach().clone().requires_grad_()
    with te.autocast(recipe=recipe):
        joined(own).backward(g)
    assert_same_bits(torch.cat([w.grad for w in weights]), joined.weight.grad, "dw")


def _dx(weights: list[Any], g: torch.Tensor, forward_only: bool) -> torch.Tensor:
    if forward_only:
        return twin.gemm(g, torch.cat([w.numbers() for w in weights]).t().contiguous(), None, BF16)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, device="cpu")
    cast, dx = quantizer(g), torch.zeros(24, 32)
    for w, codes in zip(weights, cast.codes.split(list(SIZES.values()), 1), strict=True):
        operands = (codes.contiguous(), w.codes.t().contiguous(), cast._scale_inv, w._scale_inv)
        dx += twin.gemm_fp8(*operands, None, torch.float32, "split")
    return dx.to(BF16)


def test_one_launch_casts_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, calls, kind = made("TransformerLayer"), [], type(twin)
    found = twin.multi_cast_transpose
    run(layer, "TransformerLayer").sum().backward()
    monkeypatch.setattr(twin, "multi_cast_transpose", lambda xs, *rest: (calls.append(len(xs)), found(xs, *rest)))
    te.optimizers.FusedAdam(layer.parameters(), master_weights=True).step()
    assert calls == [6], kind


def test_a_frozen_part_keeps_its_codes() -> None:
    layer = made("TransformerLayer")
    frozen = layer.self_attention.layernorm_qkv.key_weight.requires_grad_(False)
    before = frozen.codes.clone(), frozen._scale_inv.clone()
    trained(layer, "TransformerLayer", 3)
    assert frozen.grad is None
    assert torch.equal(frozen.codes.view(torch.uint8), before[0].view(torch.uint8))
    assert torch.equal(frozen._scale_inv, before[1])


@pytest.mark.sample(6)
@pytest.mark.parametrize("to", [True, False], ids=["to FP8", "to 16 bits"])
@pytest.mark.parametrize("of", [True, False], ids=["of FP8", "of 16 bits"])
@pytest.mark.parametrize("form", ["state dict", "Transformer Engine's", "older"])
def test_checkpoints_of_either_kind_load_into_either_kind(of: bool, to: bool, form: str) -> None:
    source, target = made("grouped queries", of), made("grouped queries", to)
    trained(source, "grouped queries", 3)
    state = te.transformer_engine_state_dict(source) if form == "Transformer Engine's" else source.state_dict()
    if form == "older":
        for name, module in source.named_modules():
            if getattr(module, "fp8_weights", None):
                del state[f"{name}._extra_state"]
                for key in ("scaling_fwd", "scaling_bwd"):
                    state[f"{name}.{key}.scale"] = module.fp8_meta[key].scale
                    state[f"{name}.{key}.amax_history"] = module.fp8_meta[key].amax_history
    assert not any(target.load_state_dict(state))
    for module in (source, target):
        module.eval()
    with torch.no_grad():
        expected, found = run(source, "grouped queries"), run(target, "grouped queries")
    if of == to and form != "Transformer Engine's":
        assert_same_bits(found, expected, "forward")
    else:  # another scale of the weights: an error of E4M3, 2^-4 of a number
        torch.testing.assert_close(found, expected, rtol=0.07, atol=0.07)
    projection = target.self_attention.layernorm_qkv
    assert projection.fp8_meta["scaling_fwd"].scale.numel() == (9 if to else 3)
    if to or not of:  # else it refuses, as for one weight: it reads no weights
        te.load_fp8_state(made("grouped queries", to), state)
    if not of and not to:
        assert projection.fp8_meta["scaling_fwd"].scale.tolist() == (
            source.self_attention.layernorm_qkv.fp8_meta["scaling_fwd"].scale.tolist()
        )


@pytest.mark.parametrize("name", ["grouped queries", "decoder"])
def test_modules_one_by_one_have_the_bits_of_the_block(name: str) -> None:
    layer, hooked = made(name), made(name)
    for module in hooked.modules():
        if isinstance(module, (te.Linear, te.LayerNormLinear)):
            module.register_forward_hook(lambda *_: None)
    for layer_ in (layer, hooked):
        trained(layer_, name, 3)
    for (key, a), b in zip(layer.named_parameters(), hooked.parameters(), strict=True):
        assert_same_bits(a.grad, b.grad, key)


def test_statistics_and_microbatches_and_delayed_gradients() -> None:
    torch.manual_seed(0)
    with te.fp8_model_init(recipe=RECIPE):
        layer = te.Linear(32, 96, parameters_split=SIZES, params_dtype=BF16, delay_wgrad_compute=True)
    eager = te.Linear(32, 96, params_dtype=BF16)
    x, g = torch.randn(24, 32, dtype=BF16), torch.randn(24, 96, dtype=BF16)
    with te.collect_stats(layer) as stats:
        for first in (True, False):
            for one in (layer, eager):
                with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
                    y = one(x, is_first_microbatch=first)
                y.backward(g)
            layer.backward_dw()
    assert {sample.role for sample in stats.summary(0)} >= {"input", "grad_output"}
    assert_same_bits(torch.cat([w.grad for w in layer.parts_of("weight")]), eager.weight.grad, "dw")


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["grouped queries", "cross"])
def test_compiled_it_has_the_bits_of_eager_mode(name: str) -> None:
    layer = made(name).eval()
    trained(layer, name, 2)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for module in (layer, compiled):
        layer.zero_grad()
        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            y = module(**arguments(name))
        y.float().square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert_same_bits(a, b, f"tensor {i}")
