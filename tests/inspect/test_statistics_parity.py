"""Statistics, plans and anomalies on an H200 are those of the CPU, in every number and word."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
DELAYED, CURRENT = te.DelayedScaling(amax_history_len=4), te.recipe.Float8CurrentScaling()


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).to(BF16)


def made(**options: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    options = {"params_dtype": BF16} | options
    layers = (te.TransformerLayer(128, 256, 2, **options) for _ in range(2))
    return torch.nn.Sequential(*layers, te.LayerNormLinear(128, 64, params_dtype=BF16))


def pair(**options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = made(**options)
    return model, copy.deepcopy(model).to("cuda")


def step(model: Any, i: int, recipe: Any) -> list[torch.Tensor]:
    """A step of SGD written out."""
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    torch.manual_seed(i)
    x = numbers(i, 96, 2, 128).to(device).requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward((numbers(i + 50, *y.shape) * 2.0**-8).to(device))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p - p.grad * 0.03125)
    return [y.detach(), x.grad, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT, None], ids=["delayed", "current", "16 bits"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_statistics_are_equal_numbers(recipe: Any, activation: str) -> None:
    texts = []
    for model in pair(activation=activation):
        with te.collect_stats(model, every=2, recipes=[CURRENT]) as stats:
            for i in range(5):
                step(model, i, recipe)
        assert {one.step for one in stats.samples()} == {0, 2, 4}
        texts.append(stats.to_json())
    assert texts[0] == texts[1]


def test_measured_steps_among_replayed_ones_change_no_bit() -> None:
    plain, measured = made().to("cuda"), made().to("cuda")
    expected = [step(plain, i, DELAYED) for i in range(8)]
    found = [step(measured, i, DELAYED) for i in range(3)]
    with te.collect_stats(measured, every=2):
        found += [step(measured, i, DELAYED) for i in range(3, 6)]
    found += [step(measured, i, DELAYED) for i in range(6, 8)]
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y, f"step {i}")


def test_a_plan_is_the_same_on_both_sides() -> None:
    plans = []
    for model in pair(hidden_dropout=0.0, attention_dropout=0.0):
        with torch.no_grad():
            model[1].layernorm_mlp.fc1_weight[:2] *= 2.0**14  # type: ignore[index, union-attr]
        plan = te.auto_precision(model, lambda m=model: [step(m, i, DELAYED) for i in range(3)])
        assert plan.layers["1.layernorm_mlp"].recipe is None
        plan.apply(model)
        step(model, 5, DELAYED)
        plans.append(str(plan))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("recipe", [DELAYED, None], ids=["fp8", "16 bits"])
def test_a_healthy_step_under_detect_anomaly_has_its_bits(recipe: Any) -> None:
    plain, watched = made().to("cuda"), made().to("cuda")
    for i in range(3):
        expected = step(plain, i, recipe)
        with te.detect_anomaly(watched):
            found = step(watched, i, recipe)
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("part", ["self_attention.proj.bias", "layernorm_mlp.fc2_bias"])
def test_an_anomaly_is_named_alike(part: str) -> None:
    sentences = []
    for model in pair(hidden_dropout=0.0, attention_dropout=0.0):
        with torch.no_grad():
            for layer in (model[0], model[1]):  # type: ignore[index]
                layer.get_parameter(part)[7] = 3e38
        with pytest.raises(FloatingPointError) as raised, te.detect_anomaly(model):
            step(model, 1, DELAYED)
        sentences.append(str(raised.value))
    assert sentences[0] == sentences[1]
    assert "the first infinity was made by twin::" in sentences[0]


def test_an_anomaly_in_backward_runs_in_another_thread_and_is_named() -> None:
    model = made().to("cuda")
    x = numbers(1, 16, 2, 128).cuda()
    with pytest.raises(FloatingPointError) as raised, te.detect_anomaly(model):  # noqa: PT012
        y = model(x)
        y.backward(torch.full_like(y, 3e38))
    assert "the first infinity was made by twin::" in str(raised.value) or "the first NaN" in str(raised.value)
    assert " in 2 (backward), " in str(raised.value)
    match = r"the first infinity was made by aten::log in code outside of"
    with pytest.raises(FloatingPointError, match=match), te.detect_anomaly(model):
        (model(x).float().sum() * 0).log()
    assert math.isfinite(float(model(x).detach().float().sum()))
