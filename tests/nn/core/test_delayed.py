"""`delay_wgrad_compute`: backward and `backward_dw` together have the bits of one backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.dry_gpu import DryGpu
from shared.transformer_layers import RECIPE, numbers

import optimized
import reference as te

BF16 = torch.bfloat16
SPLIT = {"query": 16, "key": 16, "value": 32}
LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **more: te.Linear(64, 64, **more),
    "Linear, split, no bias": lambda **more: te.Linear(64, 64, parameters_split=SPLIT, bias=False, **more),
    "Linear, fp32 parameters": lambda **more: te.Linear(64, 64, **{**more, "params_dtype": torch.float32}),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(64, 64, **more),
    "LayerNormLinear, split": lambda **more: te.LayerNormLinear(64, 64, parameters_split=SPLIT, **more),
    "LayerNormMLP": lambda **more: te.LayerNormMLP(64, 96, activation="swiglu", **more),
    "LayerNormMLP, recomputed": lambda **more: te.LayerNormMLP(64, 96, checkpoint=True, **more),
    "LayerNormMLP, main_grad": lambda **more: te.LayerNormMLP(64, 96, fuse_wgrad_accumulation=True, **more),
}
RECIPES = {"16": None, "delayed": RECIPE, "current": te.recipe.Float8CurrentScaling()}


def weights(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for name, p in layer.named_parameters() if name.endswith("weight") and "layer_norm" not in name]


@pytest.mark.sample(16)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_both_together_have_the_bits_of_one_backward(name: str, recipe: str, device: str, same_bits) -> None:
    found = []
    for delay in (False, True):
        torch.manual_seed(0)
        layer = LAYERS[name](params_dtype=BF16, delay_wgrad_compute=delay).to(device)
        assert layer.need_backward_dw() is delay
        for p in layer.parameters():
            p.main_grad = torch.zeros(p.shape, device=device)
        results: list[Any] = []
        for step in range(2):
            xs = [(numbers(10 * step + i, 3, 8, 64) * 4**i).bfloat16().to(device) for i in range(2)]
            ys = []
            for x in xs:  # two microbatches, whose gradients are added
                with te.autocast(enabled=recipe != "16", recipe=RECIPES[recipe]), torch.autocast(device, BF16):
                    ys.append(layer(x.requires_grad_()))
            for i, y in enumerate(ys):
                y.backward(numbers(99 + i, *y.shape).bfloat16().to(device))
            if delay:
                assert all(w.grad is None for w in weights(layer)) or step > 0
                assert all(not w.main_grad.any() for w in weights(layer)) or step > 0
            for _ in ys:
                layer.backward_dw()
            results += [*ys, *(x.grad for x in xs)]
            results += [None if p.grad is None else p.grad.clone() for p in layer.parameters()]
            results += [p.main_grad.clone() for p in layer.parameters()]
        found.append(results)
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            same_bits(a, b)


def test_in_a_transformer_layers_halves(same_bits) -> None:
    """Its fused halves hand their gradients to the modules, too."""
    found = []
    for delay in (False, True):
        torch.manual_seed(0)
        layer = te.TransformerLayer(64, 64, 4, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0)
        parts = [layer.self_attention.layernorm_qkv, layer.self_attention.proj, layer.layernorm_mlp]
        for part in parts:
            part.delays(delay)
        x = numbers(1, 24, 2, 64).bfloat16().requires_grad_()
        with te.autocast(recipe=RECIPE):
            y = layer(x)
        y.backward(numbers(2, *y.shape).bfloat16())
        for part in parts:
            assert delay is (weights(part)[0].grad is None)
            part.backward_dw()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        same_bits(a, b)


def test_frozen_weights_and_weights_in_fp8(same_bits) -> None:
    for freeze in ("query_weight", "key_weight", ""):
        found = []
        for delay in (False, True):
            torch.manual_seed(0)
            layer = te.Linear(64, 64, parameters_split=SPLIT, params_dtype=BF16, delay_wgrad_compute=delay)
            for name, p in layer.named_parameters():
                p.requires_grad_(name != freeze)
            y = layer(numbers(1, 8, 64).bfloat16())
            y.backward(torch.ones_like(y))
            layer.backward_dw()
            found.append([p.grad for p in layer.parameters() if p.requires_grad])
            assert all(p.grad is None for p in layer.parameters() if not p.requires_grad)
        for a, b in zip(*found, strict=True):
            same_bits(a, b, freeze)
    found = []
    for delay in (False, True):
        torch.manual_seed(0)
        with te.quantized_model_init():
            layer = te.Linear(64, 64, params_dtype=BF16, delay_wgrad_compute=delay)
        with te.autocast():
            y = layer(numbers(1, 16, 64).bfloat16())
        y.backward(torch.ones_like(y))
        layer.backward_dw()
        found.append(layer.weight.grad)
    same_bits(*found, "of a weight in FP8")


def test_hooks_run_after_it_and_megatrons_do_not_run_before() -> None:
    layer, ran = te.Linear(64, 64, params_dtype=BF16, delay_wgrad_compute=True), []
    assert layer.weight.skip_backward_post_hook
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(layer.weight.grad is not None))
    layer(numbers(1, 8, 64).bfloat16()).sum().backward()
    assert ran == []
    layer.backward_dw()
    assert ran == [True]


def test_refusals_and_copies() -> None:
    layer = te.Linear(64, 64, params_dtype=BF16, delay_wgrad_compute=True)
    with pytest.raises(RuntimeError, match="Linear: backward_dw without a backward whose weight gradients are still"):
        layer.backward_dw()
    layer(numbers(1, 8, 64).bfloat16()).sum().backward()
    other = copy.deepcopy(layer)
    with pytest.raises(RuntimeError, match="backward_dw without a backward"):
        other.backward_dw()
    layer.backward_dw()
    plain = te.Linear(64, 64)
    assert not plain.need_backward_dw()
    plain.backward_dw()
    with pytest.raises(
        RuntimeError, match="register_wgrad_accumulation_and_reduce_hooks with delay_wgrad_compute=False"
    ):
        plain.register_wgrad_accumulation_and_reduce_hooks(print)
    x = numbers(1, 8, 64).bfloat16()
    with pytest.raises(Exception, match=r"delay_wgrad_compute=True under torch\.compile is not offered"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("kind", [optimized.Linear, optimized.LayerNormMLP])
def test_a_dry_pass_collects_delayed_gradients_and_keeps_none(kind: Any, fuse: bool) -> None:
    with DryGpu() as gpu:
        gpu.tapes()
        layer = kind(64, 128, params_dtype=BF16, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
        for parameter in layer.parameters():
            parameter.main_grad = torch.empty(parameter.shape, device="cuda")
        x = torch.empty(40, 2, 64, dtype=BF16, device="cuda").requires_grad_()
        with te.autocast():
            y = layer(x)
        assert len(layer._store.delayed) == 0
        y.backward(torch.empty_like(y))
        assert len(layer._store.delayed) == 1
        layer.backward_dw()
        launched = {one.kernel for one in gpu.launches if one.kernel.kernel != "scale_update"}
        assert gpu.collected[0] == launched
