"""On a GPU: layers have the same bits with tapes and without."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.plan_cases import LAYERS, RECIPES, attributes
from shared.plan_cases import step as plan_step

import optimized
import reference as te
from optimized.tapes import TapeRunner, call_groups
from reference.nn.core import autograd
from reference.nn.transformer import halves

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def no_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    call_groups._groups.clear()
    monkeypatch.setattr(call_groups, "counts", call_groups.Counts())
    yield
    call_groups._groups.clear()


def train(
    layer: torch.nn.Module, runner: autograd.Runner, fp8: bool, monkeypatch: pytest.MonkeyPatch, micro: bool = False
) -> list[Any]:
    """Steps, some with two forwards before a backward, without gradients, or on another input; at the end ten alike.

    Or each of three microbatches, whose weights are cast in the first of all.
    """
    monkeypatch.setattr(autograd, "runner", runner)
    numbers = torch.Generator("cuda").manual_seed(3)
    torch.manual_seed(4)  # of cuDNN's dropout
    x = torch.empty(25, 2, 64, dtype=BF16, device="cuda").requires_grad_()
    seen: list[Any] = []
    for step in range(20):
        layer.zero_grad(set_to_none=True)
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=numbers, device="cuda") * 2.0 ** (step % 4))
        with te.autocast(enabled=fp8, recipe=RECIPE):
            firsts = (step == 0, False, False) if micro else (None, None) if step in (3, 7) else (None,)
            outs = [layer(x, is_first_microbatch=first) for first in firsts]
            if step in (4, 8):
                with torch.no_grad():
                    seen.append(layer(x))
                    seen.append(layer(x[:16]))
        torch.autograd.backward(outs, [torch.full_like(out, 2.0**-step) for out in outs])
        seen += [*outs, x.grad, *(p.grad for p in layer.parameters())]
        for module in layer.modules():
            for meta in (getattr(module, "fp8_meta", {}).get(key) for key in ("scaling_fwd", "scaling_bwd")):
                seen += [] if meta is None else [meta.scale, meta.amax_history]
        seen = [one.cpu().clone() for one in seen]  # what stays on the GPU keeps its address from the next step
        del outs
        x.grad = None
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(p - p.grad * 0.125)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two nodes", "one node"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mode", ["bf16", "fp8", "fp8 weights", "microbatches", "cudnn"])
def test_a_layer_has_the_same_bits_with_tapes(
    mode: str, dropout: float, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8, weights, micro = mode != "bf16", mode == "fp8 weights", mode == "microbatches"
    monkeypatch.setattr(halves, "SMALL", small)
    torch.manual_seed(1)
    with te.quantized_model_init(enabled=weights, recipe=RECIPE):
        layer = optimized.TransformerLayer(
            *(64, 128, 4),
            hidden_dropout=dropout,
            attention_dropout=dropout,
            fuse_qkv_params=True,
            params_dtype=BF16,
            attention_backend="cudnn" if mode == "cudnn" else "exact",
        )
    other = copy.deepcopy(layer)
    expected = train(layer, autograd.Runner(), fp8, monkeypatch, micro)
    assert not any(group.sizes != (0, 0) for group in call_groups._groups.values())
    actual = train(other, TapeRunner(), fp8, monkeypatch, micro)
    for position, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert_same_bits(a, b, f"tensor {position} of {len(expected)}")
    assert sum(group.hits for group in call_groups._groups.values()) >= 8
    assert all(group.usable for group in call_groups._groups.values())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["exact", "cudnn"])
def test_tapes_within_a_capture_of_the_users(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launches become part of it, and memory that a tape's own graph uses does not."""
    torch.manual_seed(1)
    layer = optimized.TransformerLayer(
        *(64, 128, 4), hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, attention_backend=backend
    )
    other = copy.deepcopy(layer)
    x = torch.randn(25, 2, 64, dtype=BF16, device="cuda").requires_grad_()

    def step(layer: torch.nn.Module) -> list[torch.Tensor]:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with te.autocast(recipe=RECIPE):
            out = layer(x)
        out.backward(torch.ones_like(out))
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]

    for _ in range(5):
        step(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            results = step(layer)
    graph.replay()
    actual = [one.cpu() for one in results]
    monkeypatch.setattr(autograd, "runner", autograd.Runner())
    for _ in range(8):
        expected = step(other)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b.cpu())
    assert sum(group.hits for group in call_groups._groups.values()) >= 2


@pytest.mark.gpu
def test_a_parameter_changed_between_forward_and_backward_is_noticed() -> None:
    layer = optimized.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16)
    for _ in range(4):
        x = torch.ones(8, 2, 64, dtype=BF16, device="cuda").requires_grad_()
        y = layer(x)
        with torch.no_grad():
            layer.layernorm_mlp.layer_norm_weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LAYERS)
def test_whatever_attribute_changes_between_two_calls(name: str, seed: int) -> None:
    """A change is seen at once: what a tape of before would compute is another result."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    plain = LAYERS[name](optimized)
    taped = copy.deepcopy(plain)
    runners = {id(plain): autograd.Runner(), id(taped): TapeRunner()}

    def run(layer: torch.nn.Module, recipe: Any) -> list[torch.Tensor]:
        layer.zero_grad(set_to_none=True)
        autograd.register(runners[id(layer)])
        try:
            found = plan_step(layer, recipe, 3)
        finally:
            autograd.register(runners[id(taped)])
        return [one.cpu() for one in (*found, *(p.grad for p in layer.parameters() if p.grad is not None))]

    changes: list[tuple[str, str, Any]] = []
    for _ in range(12):
        where, key, values = draw.choice(attributes(plain))
        recipe, value = draw.choice([None, *RECIPES]), draw.choice(values)
        before = getattr(plain.get_submodule(where), key)
        for layer in (plain, taped):
            setattr(layer.get_submodule(where), key, value)
        try:
            run(plain, recipe)
        except Exception as error:  # a value that the layer refuses, or that does not fit its tensors
            with pytest.raises(type(error)):  # what it changed before it failed, too
                run(taped, recipe)
            for layer in (plain, taped):
                setattr(layer.get_submodule(where), key, before)
            continue
        run(taped, recipe)
        changes.append((where, key, value))
        for time in range(3):
            for position, (a, b) in enumerate(zip(run(plain, recipe), run(taped, recipe), strict=True)):
                assert_same_bits(a, b, f"time {time}, tensor {position}, after {changes}")
    assert changes
    assert any(group.hits for group in call_groups._groups.values()) or name.endswith("Norm")  # which are one launch
