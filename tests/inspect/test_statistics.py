"""`collect_stats`: its counts are NumPy's, and what it measures is what the GEMMs read.

On an H200 statistics, plans and anomalies are those of the CPU, in every number and word.
"""

import copy
import dataclasses
import json
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits
from shared.statistics_cases import BF16, CURRENT, DELAYED, LAYERS, made, numbers, step

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from reference.inspect import statistics
from reference.numbers import formats

ROLES = ("input", "weight", "grad_output")


# --- the numbers -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_runner")
def test_every_number_is_numpys() -> None:
    """Of a linear layer, whose three tensors are at hand."""
    layer: Any = made("Linear")
    layer(torch.zeros(1, 32, dtype=BF16))
    with te.autocast(recipe=DELAYED):
        layer(numbers(1, 5, 32))
    layer.fp8_meta["scaling_fwd"].scale.copy_(torch.tensor([300.0, 2.0**13, 1.0]))
    layer.fp8_meta["scaling_bwd"].scale[0] = 2.0**-16
    x, g = numbers(2, 64, 32), numbers(3, 64, 48)
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    with te.collect_stats(layer, every=1) as stats:
        with te.autocast(recipe=DELAYED):
            y = layer(x.requires_grad_())
        y.backward(g)
    samples = {one.role: one for one in stats.samples()}
    assert list(samples) == ["input", "weight", "grad_output"]
    e4m3, e5m2 = formats.E4M3, formats.E5M2
    for role, t, fmt, scale in (
        ("input", x, e4m3, 300.0),
        ("weight", layer.weight, e4m3, 2.0**13),
        ("grad_output", g, e5m2, 2.0**-16),
    ):
        one, v = samples[role], t.detach().float().numpy().astype(np.float64)
        stands_for = formats.decode(formats.cast(t, fmt, scale)).numpy() * np.float64(np.float32(1) / np.float32(scale))
        finite = np.isfinite(v)
        noise = np.square(v - stands_for)[finite].sum()
        assert (one.layer, one.part, one.recipe, one.ran, one.step) == ("", "", DELAYED, True, 0)
        assert (one.dtype, one.format, one.scale, one.elements) == (fmt.dtype, fmt.name, scale, v.size)
        assert one.amax == (math.inf if role == "input" else np.abs(v).max())
        assert one.nan == np.isnan(v).sum()
        assert one.inf == np.isinf(v).sum()
        limit = {"E4M3": 464, "E5M2": 61440}[fmt.name]
        assert one.saturated == (finite & (np.abs(v) > limit / scale)).sum()
        assert one.underflowed == (finite & (v != 0) & (stands_for == 0)).sum()
        assert one.signal == pytest.approx(np.square(v[finite]).sum(), rel=1e-12)  # another order of float64 additions
        assert one.noise == pytest.approx(noise, rel=1e-12)
        assert one.sqnr == pytest.approx(10 * math.log10(np.square(v[finite]).sum() / noise), rel=1e-12)
    assert samples["input"].saturated > 0 < samples["weight"].saturated
    assert samples["grad_output"].underflowed > 0
    assert samples["input"].gemms == ("fprop", "wgrad")
    assert samples["weight"].gemms == ("fprop", "dgrad")
    assert samples["grad_output"].gemms == ("dgrad", "wgrad")


@pytest.mark.usefixtures("same_runner")
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_measured_is_what_was_cast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under current scaling, x cast with the noted scale is the codes; a fused kernel casts the same x, not rounded."""
    seen: list[tuple[torch.Tensor, Any, Any]] = []

    def note(self: Any, key: Any, x: torch.Tensor, quantized: Any, scale: torch.Tensor) -> None:
        seen.append((x.clone(), quantized, scale))

    monkeypatch.setattr(statistics._Observer, "_note", note)
    model = made(name)
    for recipe in (CURRENT, DELAYED, DELAYED):
        seen.clear()
        stats = te.collect_stats(model, every=1)
        with mock.patch.object(stats, "_samples", [None]), stats:
            step(model, 1, recipe)
        assert len(seen) >= 3
        for x, quantized, scale in seen:
            cast = formats.cast(x, formats.format_of(quantized.row.codes.dtype), scale)
            if recipe is CURRENT:
                assert_same_bits(quantized.row.codes, cast)
            else:  # x is rounded to bf16 where a fused kernel casts fp32: at most the next code
                distance = (quantized.row.codes.view(torch.uint8).int() - cast.view(torch.uint8).int()).abs() % 127
                assert int(distance.max()) <= 1
                assert float((distance > 0).float().mean()) < 0.05


@pytest.mark.usefixtures("same_runner")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_parts_and_roles(name: str) -> None:
    model = made(name)
    with te.collect_stats(model, every=1, recipes=[CURRENT]) as stats:
        step(model)
        step(model, 1)
    expected = set()
    for path, module in model.named_modules():
        for weight in getattr(module, "fp8_weights", {}):
            part = weight[: -len("_weight")] if "_" in weight else ""
            expected |= {(path, part, role, ran) for role in ROLES for ran in (True, False)}
    assert {(one.layer, one.part, one.role, one.ran) for one in stats.summary()} == expected
    assert len(stats.summary()) == len(expected)
    assert len(stats.samples()) == 2 * len(expected)
    assert all((one.recipe == DELAYED) == one.ran for one in stats.samples())


@pytest.mark.usefixtures("same_runner")
def test_a_summary_adds_counts_and_leaves_out_what_comes_before_first() -> None:
    model = made("Linear")
    with te.collect_stats(model, every=1) as stats:
        for i in range(3):
            step(model, i)
    samples = [one for one in stats.samples() if one.role == "grad_output"]
    assert [one.step for one in samples] == [0, 1, 2]
    for first in (0, 1):
        (one,) = (one for one in stats.summary(first) if one.role == "grad_output")
        kept = samples[first:]
        for name in ("elements", "saturated", "underflowed", "nan", "inf"):
            assert getattr(one, name) == sum(getattr(sample, name) for sample in kept)
        assert one.amax == max(sample.amax for sample in kept)
        assert (one.step, one.scale) == (2, samples[-1].scale)
        assert one.noise == pytest.approx(sum(sample.noise for sample in kept), rel=1e-15)
    assert samples[0].underflowed > samples[1].underflowed, "delayed scaling begins with scale 1"


@pytest.mark.usefixtures("same_runner")
def test_layers_in_16_bits() -> None:
    """Their numbers are counted; what a recipe would make of them is measured beside, and nothing of it is used."""
    model = made("LayerNormMLP")
    expected = step(copy.deepcopy(model), 0, None)
    with te.collect_stats(model, every=1, recipes=[CURRENT]) as stats:
        found = step(model, 0, None)
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)
    ran = [one for one in stats.summary() if one.ran]
    beside = [one for one in stats.summary() if not one.ran]
    assert len(ran) == len(beside) == 6
    assert {(one.recipe, one.sqnr, one.scale, one.saturated, one.format) for one in ran} == {
        (None, None, None, 0, "bfloat16")
    }
    assert all(one.recipe == CURRENT and one.sqnr > 20 for one in beside)
    assert [one.amax for one in ran] == [one.amax for one in beside]


@pytest.mark.usefixtures("same_runner")
def test_a_layer_whose_sizes_do_not_fit_fp8_is_measured_in_16_bits_alone() -> None:
    model = te.Linear(32, 20, params_dtype=BF16)
    with te.collect_stats(model, every=1, recipes=[CURRENT]) as stats:
        model(numbers(1, 4, 32))
    assert {(one.role, one.recipe) for one in stats.samples()} == {("input", None), ("weight", None)}


@pytest.mark.usefixtures("same_runner")
def test_a_recipe_in_which_a_layer_runs_is_not_measured_beside_it() -> None:
    model = made("Linear")
    with te.collect_stats(model, every=1, recipes=[te.recipe.Float8CurrentScaling()]) as stats:
        step(model, 0, CURRENT)
    assert [one.ran for one in stats.samples()] == [True] * 3


@pytest.mark.usefixtures("same_runner")
def test_sqnr_without_noise_or_signal() -> None:
    one = statistics.Sample("", "", "input", DELAYED, True, torch.float8_e4m3fn, 0, 0, 0.0, 1.0, 0, 0, 0, 0, 0.0, 0.0)
    assert (one.sqnr, one.saturated_share, one.underflowed_share) == (math.inf, 0.0, 0.0)
    assert dataclasses.replace(one, noise=1.0).sqnr == -math.inf
    assert dataclasses.replace(one, signal=1.0, noise=math.inf).sqnr == -math.inf
    assert math.isnan(dataclasses.replace(one, signal=1.0, noise=math.nan).sqnr or 0.0)


# --- texts -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_runner")
def test_the_table_and_the_json() -> None:
    model = made("LayerNormMLP")
    with te.collect_stats(model, every=1, recipes=[te.recipe.Float8CurrentScaling(fp8_format=te.Format.E4M3)]) as stats:
        x = numbers(0, 16, 2, 32)
        x[0] = math.inf
        with te.autocast(recipe=DELAYED):
            model(x).sum().backward()
    head, *rows = stats.table().splitlines()
    assert head.split() == [
        "layer",
        "role",
        "GEMMs",
        "recipe",
        "format",
        "amax",
        "scale",
        "saturated",
        "underflowed",
        "SQNR",
        "dB",
        "NaN",
        "inf",
    ]
    assert [row.split()[:2] for row in rows[::2]] == [[p, role] for p in ("fc1", "fc2") for role in ROLES]
    assert "fprop, wgrad" in rows[0]
    assert "(Float8CurrentScaling E4M3)" in rows[1]
    entries = json.loads(stats.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["samples"]
    assert len(entries) == len(stats.samples()) == 12
    first, one = entries[0], stats.samples()[0]
    assert first["nan"] == one.nan == 64  # the norm of an infinity
    assert (first["layer"], first["part"], first["role"], first["gemms"]) == ("", "fc1", "input", ["fprop", "wgrad"])
    assert (first["sqnr"], first["scale"], first["recipe"]) == (one.sqnr, 1.0, repr(DELAYED))


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_runner")
def test_refusals() -> None:
    model = made("Linear")
    with pytest.raises(TypeError, match=r"^collect_stats: model='gpt'; a torch.nn.Module is accepted\.$"):
        te.collect_stats("gpt")  # type: ignore[arg-type]
    for every in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match=rf"^collect_stats: every={every}; an int of at least 1 is accepted\.$"):
            te.collect_stats(model, every=every)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^collect_stats: recipes has .*recipes without state between steps are accepted"
    ):
        te.collect_stats(model, recipes=[DELAYED])
    with pytest.raises(ValueError, match=r"^collect_stats: model is a RMSNorm without a layer that casts to FP8"):
        te.collect_stats(te.RMSNorm(32))
    with pytest.raises(ValueError, match=r"^collect_stats: model is a Linear without a layer that casts to FP8"):
        te.collect_stats(torch.nn.Linear(2, 2))
    stats = te.collect_stats(model)
    with pytest.raises(RuntimeError, match=r"^collect_stats: it is open already"), stats, stats:
        pass
    with (
        pytest.raises(
            RuntimeError, match=r"^collect_stats: Sequential was not called inside; give the module that the"
        ),
        te.collect_stats(torch.nn.Sequential(model)),
    ):
        step(model)


@pytest.mark.usefixtures("same_runner")
def test_a_model_of_which_nothing_can_be_measured_says_so() -> None:
    """As one that is compiled: its layers' pairs pass by no runner."""
    model = made("Linear")
    with (
        pytest.raises(
            RuntimeError, match=r"^collect_stats: Linear was called, and none of its layers could be measured"
        ),
        mock.patch.object(torch.compiler, "is_compiling", return_value=True),
        te.collect_stats(model, every=1),
    ):
        model(numbers(0, 4, 32))


@pytest.mark.usefixtures("same_runner")
def test_attention_in_fp8_shows_its_operands() -> None:
    """q, k and v; alone and in a layer, with another recipe beside."""
    torch.manual_seed(0)
    layer = te.TransformerLayer(32, 48, 2, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0)
    x, q = numbers(1, 16, 2, 32).requires_grad_(), numbers(2, 16, 2, 2, 16).requires_grad_()
    core = layer.self_attention.core_attention
    for part, given in ((layer, (x,)), (core, (q, q, q))):
        with (
            te.collect_stats(part, every=1, recipes=[CURRENT]) as stats,
            te.autocast(recipe=te.DelayedScaling(fp8_dpa=True)),
        ):
            part(*given).sum().backward()
        name = "" if part is core else "self_attention.core_attention"
        found = [(one.part, one.role, one.ran) for one in stats.summary() if one.layer == name]
        operands = [("attention", "q"), ("attention", "k"), ("attention", "v")]
        assert found == [(*one, ran) for one in operands for ran in (True, False)]
    assert all(one.amax == q.abs().max() for one in stats.summary())


def made_of_blocks(**options: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    options = {"params_dtype": BF16} | options
    layers = (te.TransformerLayer(128, 256, 2, **options) for _ in range(2))
    return torch.nn.Sequential(*layers, te.LayerNormLinear(128, 64, params_dtype=BF16))


def pair(**options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = made_of_blocks(**options)
    return model, copy.deepcopy(model).to("cuda")


def sgd_step(model: Any, i: int, recipe: Any) -> list[torch.Tensor]:
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


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT, None], ids=["delayed", "current", "16 bits"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_statistics_are_equal_numbers(recipe: Any, activation: str) -> None:
    texts = []
    for model in pair(activation=activation):
        with te.collect_stats(model, every=2, recipes=[CURRENT]) as stats:
            for i in range(5):
                sgd_step(model, i, recipe)
        assert {one.step for one in stats.samples()} == {0, 2, 4}
        texts.append(stats.to_json())
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_measured_steps_among_replayed_ones_change_no_bit() -> None:
    plain, measured = made_of_blocks().to("cuda"), made_of_blocks().to("cuda")
    expected = [sgd_step(plain, i, DELAYED) for i in range(8)]
    found = [sgd_step(measured, i, DELAYED) for i in range(3)]
    with te.collect_stats(measured, every=2):
        found += [sgd_step(measured, i, DELAYED) for i in range(3, 6)]
    found += [sgd_step(measured, i, DELAYED) for i in range(6, 8)]
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y, f"step {i}")


@pytest.mark.gpu
def test_a_plan_is_the_same_on_both_sides() -> None:
    plans = []
    for model in pair(hidden_dropout=0.0, attention_dropout=0.0):
        with torch.no_grad():
            model[1].layernorm_mlp.fc1_weight[:2] *= 2.0**14  # type: ignore[index, union-attr]
        plan = te.auto_precision(model, lambda m=model: [sgd_step(m, i, DELAYED) for i in range(3)])
        assert plan.layers["1.layernorm_mlp"].recipe is None
        plan.apply(model)
        sgd_step(model, 5, DELAYED)
        plans.append(str(plan))
    assert plans[0] == plans[1]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [DELAYED, None], ids=["fp8", "16 bits"])
def test_a_healthy_step_under_detect_anomaly_has_its_bits(recipe: Any) -> None:
    plain, watched = made_of_blocks().to("cuda"), made_of_blocks().to("cuda")
    for i in range(3):
        expected = sgd_step(plain, i, recipe)
        with te.detect_anomaly(watched):
            found = sgd_step(watched, i, recipe)
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["self_attention.proj.bias", "layernorm_mlp.fc2_bias"])
def test_an_anomaly_is_named_alike(part: str) -> None:
    sentences = []
    for model in pair(hidden_dropout=0.0, attention_dropout=0.0):
        with torch.no_grad():
            for layer in (model[0], model[1]):  # type: ignore[index]
                layer.get_parameter(part)[7] = 3e38
        with pytest.raises(FloatingPointError) as raised, te.detect_anomaly(model):
            sgd_step(model, 1, DELAYED)
        sentences.append(str(raised.value))
    assert sentences[0] == sentences[1]
    assert "the first infinity was made by twin::" in sentences[0]


@pytest.mark.gpu
def test_an_anomaly_in_backward_runs_in_another_thread_and_is_named() -> None:
    model = made_of_blocks().to("cuda")
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
