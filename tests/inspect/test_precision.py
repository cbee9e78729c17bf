"""`auto_precision`: a layer that FP8 does not suit is found, and a plan is applied, saved and loaded without a loss."""

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from reference.inspect import precision
from reference.inspect.sample import Sample
from reference.support import files

BF16 = torch.bfloat16
DELAYED, CURRENT = te.DelayedScaling(amax_history_len=4), te.recipe.Float8CurrentScaling()
BLOCK = te.recipe.Float8BlockScaling()
AUTOCAST = te.recipe.AUTOCAST
NAMES = ["0.self_attention.layernorm_qkv", "0.self_attention.proj", "0.layernorm_mlp"]
NAMES += [name.replace("0", "1", 1) for name in NAMES] + ["2"]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).to(BF16)


def made() -> Any:
    torch.manual_seed(3)
    options = {"params_dtype": BF16, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    layers = (te.TransformerLayer(64, 128, 4, **options) for _ in range(2))
    return torch.nn.Sequential(*layers, te.Linear(64, 32, params_dtype=BF16))


def step(model: Any, i: int = 0, recipe: Any = DELAYED) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    x = numbers(i, 16, 2, 64).requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(numbers(i + 50, *y.shape))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def steps(
    model: Any, count: int = 4, each: Callable[[], None] | None = None, recipe: Any = DELAYED
) -> Callable[[], None]:
    def run() -> None:
        for i in range(count):
            step(model, i, recipe)
            if each is not None:
                each()

    return run


def underflows(model: Any) -> None:
    """Two channels of the second MLP's activation are so large that the others become 0 beside them."""
    with torch.no_grad():
        model[1].layernorm_mlp.fc1_weight[:2] *= 2.0**14


def growing(model: Any) -> Callable[[], None]:
    """The input of the first projection grows eightfold with each step: the scale of the steps before is too large."""

    def grow() -> None:
        with torch.no_grad():
            model[0].self_attention.layernorm_qkv.value_weight.mul_(8)

    return grow


# --- choices -----------------------------------------------------------------------------------------


def test_a_healthy_model_keeps_its_recipe() -> None:
    model = made()
    plan = te.auto_precision(model, steps(model))
    assert list(plan.layers) == NAMES
    assert {one.recipe for one in plan.layers.values()} == {AUTOCAST}
    for one in plan.layers.values():
        assert one.why.startswith("In DelayedScaling every tensor is within the limits (")
        assert one.why.endswith(" dB).")
    assert all(m.own_recipe is None and not m.in_high_precision for m in model.modules() if hasattr(m, "own_recipe"))


def test_a_layer_whose_activations_underflow_gets_16_bits() -> None:
    model = made()
    underflows(model)
    plan = te.auto_precision(model, steps(model))
    assert [name for name, one in plan.layers.items() if one.recipe is None] == ["1.layernorm_mlp"]
    why = plan.layers["1.layernorm_mlp"].why
    texts = [text.split(" does not suit ") for text in why.split(". ")]
    assert [text[0] for text in texts] == ["DelayedScaling", "Float8CurrentScaling"]
    for _, text in texts:
        assert re.search(r"fc2's input, read by fprop and wgrad: \d+\.\d\d% underflow \(at most 5.00%\)", text)
    plan.apply(model)
    with te.collect_stats(model, every=1) as stats:
        step(model)
    assert {one.layer for one in stats.samples() if one.recipe is None} == {"1.layernorm_mlp"}


def test_a_layer_whose_activations_saturate_gets_the_first_recipe_that_does_not() -> None:
    model = made()
    other = copy.deepcopy(model)
    plan = te.auto_precision(model, steps(model, each=growing(model)))
    changed = {name: one for name, one in plan.layers.items() if one.recipe != AUTOCAST}
    assert list(changed) == ["0.self_attention.layernorm_qkv", "0.self_attention.proj", "2"]
    assert {one.recipe for one in changed.values()} == {CURRENT}
    why = changed["0.self_attention.proj"].why
    assert re.match(r"DelayedScaling does not suit its input, read by fprop and wgrad: .*% saturate \(at most 0.1", why)
    assert ". In Float8CurrentScaling every tensor is within the limits (" in why
    without = te.auto_precision(other, steps(other, each=growing(other)), recipes=[])
    assert {name for name, one in without.layers.items() if one.recipe is None} == set(changed)


def test_block_scaling_is_judged_and_chosen(tmp_path: Path) -> None:
    """It suits a healthy model; where delayed scaling saturates it is chosen; the saved plan trains with its bits."""
    model = made()
    plan = te.auto_precision(model, steps(model, 2, recipe=BLOCK))
    assert {one.recipe for one in plan.layers.values()} == {AUTOCAST}
    start = "In Float8BlockScaling E4M3 every tensor is within the limits ("
    assert all(one.why.startswith(start) for one in plan.layers.values())
    model = made()
    plan = te.auto_precision(model, steps(model, each=growing(model)), recipes=[BLOCK])
    changed = {name: one.recipe for name, one in plan.layers.items() if one.recipe != AUTOCAST}
    assert changed == dict.fromkeys(["0.self_attention.layernorm_qkv", "0.self_attention.proj", "2"], BLOCK)
    plan.save(tmp_path / "plan.json")
    loaded, by_hand = made(), made()
    te.PrecisionPlan.load(tmp_path / "plan.json").apply(loaded)
    te.recipe.by_layer(by_hand, changed)
    with te.collect_stats(loaded, every=1) as stats:
        found = step(loaded)
    assert {one.layer for one in stats.samples() if one.recipe == BLOCK} == set(changed)
    for a, b in zip(found, step(by_hand), strict=True):
        assert_same_bits(a, b)


def test_nan_and_infinity_get_16_bits() -> None:
    model = made()
    with torch.no_grad():
        model[1].layernorm_mlp.fc2_bias[0] = math.inf  # the output of the second layer, the input of the last
    plan = te.auto_precision(model, steps(model))
    assert plan.layers["2"].recipe is None
    assert "its input, read by fprop and wgrad: 96 of 6144 elements are NaN or infinite" in plan.layers["2"].why
    assert plan.layers["0.self_attention.proj"].recipe in (None, AUTOCAST)


def test_statistics_of_a_run_in_16_bits_choose_among_what_was_measured_beside() -> None:
    model = made()
    underflows(model)
    with te.collect_stats(model, every=1, recipes=[CURRENT]) as stats:
        steps(model, recipe=None)()
    plan = te.auto_precision(model, stats)
    assert {name for name, one in plan.layers.items() if one.recipe is None} == {"1.layernorm_mlp"}
    assert {one.recipe for name, one in plan.layers.items() if name != "1.layernorm_mlp"} == {CURRENT}
    assert plan.layers["2"].why.startswith("16 bits, in which it ran: no NaN and no infinity. In Float8CurrentScaling")
    with te.collect_stats(model, every=1) as alone:
        step(model, 0, None)
        step(model, 1, None)
    plan = te.auto_precision(model, alone)
    assert {one.recipe for one in plan.layers.values()} == {None}
    assert plan.layers["2"].why == "16 bits, in which it ran: no NaN and no infinity."


def test_a_layer_keeps_the_recipe_of_its_own_that_does() -> None:
    model, own = made(), te.DelayedScaling(amax_history_len=2)
    te.recipe.by_layer(model, {"0": own})
    plan = te.auto_precision(model, steps(model))
    assert [one.recipe is own.fixed for one in plan.layers.values()] == [True] * 3 + [False] * 4


def test_a_layer_that_was_not_measured_keeps_its_choice() -> None:
    model = made()
    te.recipe.by_layer(model, {"0": CURRENT, "2": None})
    with te.collect_stats(model[1], every=1) as stats:
        step(model)
    with pytest.raises(ValueError, match=r"^auto_precision: evidence is of another model"):
        te.auto_precision(model, stats)
    with te.collect_stats(model, every=1) as stats:
        step(model)
    plan = te.auto_precision(model, stats)  # forward 0 is not judged
    assert [one.recipe for one in plan.layers.values()] == [CURRENT] * 3 + [AUTOCAST] * 3 + [None]
    assert {one.why for one in plan.layers.values()} == {"No number of it was measured: its choice stays as it was."}
    assert {one.recipe for one in te.auto_precision(model, stats, first=0).layers.values()} != {AUTOCAST}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("1.layernorm_mlp", NAMES[5:6]),
        ("0", NAMES[:3]),
        ("*.proj", [NAMES[1], NAMES[4]]),
        (["2", "*.layernorm_mlp"], [NAMES[2], NAMES[5], NAMES[6]]),
    ],
)
def test_disabled_layers_run_in_16_bits(pattern: Any, expected: list[str]) -> None:
    model = made()
    plan = te.auto_precision(model, steps(model, 2), disable=pattern)
    assert [name for name, one in plan.layers.items() if one.recipe is None] == expected
    first = pattern if isinstance(pattern, str) else pattern[1]
    assert plan.layers[expected[0]].why == f"It is disabled by {first!r}."


def sample(**changes: Any) -> Sample:
    """A healthy one."""
    one = Sample("2", "", "input", DELAYED, True, torch.float8_e4m3fn, 1, 1000, 1.0, 448.0, 0, 0, 0, 0, 1000.0, 1.0)
    return dataclasses.replace(one, **changes)


@pytest.mark.parametrize(
    ("name", "within", "beyond"),
    [
        ("max_saturated", {"saturated": 20}, {"saturated": 21}),
        ("max_underflowed", {"underflowed": 20}, {"underflowed": 21}),
        ("max_sqnr_loss", {"noise": 1.7}, {"noise": 1.9}),
    ],
)
def test_limits_are_the_last_that_is_accepted(name: str, within: Any, beyond: Any) -> None:
    """Of 1000 elements 20 are 2 %; in E4M3 27.5 dB, 5 less than 32.5, are a noise of 1.77."""
    limits = precision._Limits(0.02, 0.02, 5.0)
    assert precision.ideal_sqnr(torch.float8_e4m3fn) == pytest.approx(32.53, abs=0.01)
    assert precision.ideal_sqnr(torch.float8_e5m2) == pytest.approx(26.51, abs=0.01)
    assert limits.complaint(sample(**within)) is None
    complaint = limits.complaint(sample(**beyond))
    assert complaint is not None
    word = {"max_saturated": "saturate", "max_underflowed": "underflow", "max_sqnr_loss": "SQNR"}[name]
    assert re.fullmatch(rf"its input, read by fprop and wgrad: [^,]*{word}[^,]*", complaint)
    changed = limits._replace(**{name.removeprefix("max_"): 10.0})
    assert changed.complaint(sample(**beyond)) is None


def test_everything_that_is_beyond_a_limit_is_said() -> None:
    one = sample(nan=3, inf=2, saturated=100, underflowed=200, noise=1000.0, part="fc2")
    assert precision._Limits(0.01, 0.02, 6).complaint(one) == (
        "fc2's input, read by fprop and wgrad: 5 of 1000 elements are NaN or infinite, 10.00% saturate "
        "(at most 1.00%), 20.00% underflow (at most 2.00%), SQNR 0.0 dB (at least 26.5 dB in E4M3)"
    )
    sixteen = sample(recipe=None, nan=1, saturated=100, noise=1000.0)
    assert precision._Limits(0.01, 0.02, 6).complaint(sixteen) == (
        "its input, read by fprop and wgrad: 1 of 1000 elements are NaN or infinite"
    )


# --- plans -------------------------------------------------------------------------------------------


def mixed() -> precision.PrecisionPlan:
    """Each kind of choice."""
    choices = [AUTOCAST, None, te.recipe.Float8CurrentScaling(fp8_format=te.Format.E4M3), CURRENT]
    choices += [te.DelayedScaling(margin=1, amax_compute_algo="most_recent", reduce_amax=False), AUTOCAST, DELAYED]
    layers = zip(NAMES, choices, strict=True)
    return precision.PrecisionPlan({name: precision.Choice(one, f"Why {name}.") for name, one in layers})


def test_a_plan_is_loaded_as_it_was_saved_and_trains_with_the_same_bits(tmp_path: Path) -> None:
    plan, path = mixed(), tmp_path / "new folder" / "plan.json"
    plan.save(path)
    loaded = te.PrecisionPlan.load(str(path))
    assert loaded.layers == plan.layers
    assert str(loaded) == str(plan)
    by_hand, applied, from_file = (made() for _ in range(3))
    te.recipe.by_layer(by_hand, {name: one.recipe for name, one in plan.layers.items()})
    plan.apply(applied)
    loaded.apply(from_file)
    for i in range(3):
        expected = step(by_hand, i)
        for model in (applied, from_file):
            for a, b in zip(step(model, i), expected, strict=True):
                assert_same_bits(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(step(made()), step(applied), strict=True))
    te.PrecisionPlan({name: precision.Choice(AUTOCAST, "") for name in NAMES}).apply(applied)
    assert te.recipe.by_layer(applied, {}) == dict.fromkeys(NAMES, AUTOCAST)


def test_layers_with_equal_recipes_share_one_object() -> None:
    """A half of a transformer layer runs fused only then."""
    plan = precision.PrecisionPlan({name: precision.Choice(te.recipe.Float8CurrentScaling(), "") for name in NAMES})
    model = made()
    plan.apply(model)
    assert (
        len({id(layer.own_recipe) for layer in model.modules() if hasattr(layer, "own_recipe") and layer.fp8_weights})
        == 1
    )


def test_the_report_has_a_line_for_each_layer() -> None:
    head, *lines = str(mixed()).splitlines()
    assert head.split() == ["layer", "runs", "in", "why"]
    assert [line.split()[0] for line in lines] == NAMES
    assert [line.split("  Why")[0].split(None, 1)[1].strip() for line in lines] == [
        *("autocast's recipe", "16 bits", "Float8CurrentScaling E4M3", "Float8CurrentScaling", "DelayedScaling"),
        *("autocast's recipe", "DelayedScaling"),
    ]
    assert str(precision.PrecisionPlan({"": precision.Choice(None, "So.")})).splitlines()[1].startswith("(the model)  ")


def test_a_plan_of_another_model_is_refused_and_changes_nothing() -> None:
    plan, model = mixed(), made()
    te.recipe.by_layer(model, {"2": CURRENT})
    smaller = torch.nn.Sequential(*model[:2])
    sentence = (
        r"^apply: the plan has '2' and the model does not \(1 names differ\); a model with the layers of the plan"
    )
    with pytest.raises(ValueError, match=sentence):
        plan.apply(smaller)
    larger = torch.nn.Sequential(*model, te.Linear(32, 32))
    with pytest.raises(ValueError, match=r"^apply: the model has '3' and the plan does not \(1 names differ\)"):
        plan.apply(larger)
    assert te.recipe.by_layer(model, {}) == dict.fromkeys(NAMES[:6], AUTOCAST) | {"2": CURRENT}


def good() -> dict[str, Any]:
    return {"format": "twin-engine precision", "version": 1, "layers": {"a": {"choice": "16 bits", "why": "So."}}}


def of_layer(entry: Any) -> dict[str, Any]:
    return good() | {"layers": {"a": entry}}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", r"is damaged \(Expecting property name"),
        ([], "is damaged: it holds a list in place of an object"),
        ({}, "is no precision plan: its format is None, not 'twin-engine precision'"),
        (good() | {"format": "else"}, "is no precision plan: its format is 'else', not 'twin-engine precision'"),
        (good() | {"version": 2}, "has version 2 of the format; 1 is accepted"),
        (good() | {"version": True}, "has version True of the format; 1 is accepted"),
        (good() | {"layers": [1]}, "is damaged: its layers are a list, not an object"),
        (of_layer("16 bits"), "is damaged: layer 'a' has '16 bits'; a choice and why are accepted"),
        (of_layer({"choice": "16 bits"}), "is damaged: layer 'a' has .*; a choice and why are accepted"),
        (of_layer({"choice": "16 bits", "why": 1}), "is damaged: layer 'a' has .*; a choice and why are accepted"),
        (
            of_layer({"choice": "8 bits", "why": ""}),
            "is damaged: layer 'a' has the choice '8 bits'; '16 bits', 'autocast', 'D",
        ),
        (
            of_layer({"choice": {"recipe": "Recipe"}, "why": ""}),
            "is damaged: layer 'a' has the choice {'recipe': 'Recipe'}; '16",
        ),
        (of_layer({"choice": {"recipe": ["x"]}, "why": ""}), "is damaged: layer 'a' has the choice"),
        (
            of_layer({"choice": {"recipe": "DelayedScaling", "margin": 99}, "why": ""}),
            r"is damaged: layer 'a' has the choice .* \(DelayedScaling: margin=99; an int from 0 to 18",
        ),
        (
            of_layer({"choice": {"recipe": "DelayedScaling", "gain": 1}, "why": ""}),
            r"is damaged: .* \(.*unexpected keyword",
        ),
        (
            of_layer({"choice": {"recipe": "DelayedScaling", "fp8_format": "E5M2"}, "why": ""}),
            "is damaged: .*fp8_format=",
        ),
        (of_layer({"choice": {"recipe": "DelayedScaling", "fp8_format": ["x"]}, "why": ""}), "is damaged: layer 'a'"),
    ],
)
def test_a_bad_file_is_refused_in_a_sentence(content: Any, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    with pytest.raises(files.Damaged, match=rf"plan\.json {sentence}"):
        te.PrecisionPlan.load(path)
    with pytest.raises(FileNotFoundError):
        te.PrecisionPlan.load(tmp_path / "none.json")


def test_a_plan_that_cannot_be_written_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    mixed().save(path)
    before = path.read_bytes()

    class Own(te.DelayedScaling):
        pass

    with pytest.raises(TypeError, match=r"^save: .*Own\(.*is not one of te.recipe's recipes, which are accepted\.$"):
        precision.PrecisionPlan({"a": precision.Choice(Own(), "")}).save(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


# --- refusals ----------------------------------------------------------------------------------------


def test_refusals() -> None:
    model = made()
    run = steps(model, 2)
    with pytest.raises(TypeError, match=r"^auto_precision: model=3; a torch.nn.Module is accepted\.$"):
        te.auto_precision(3, run)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^auto_precision: evidence=3; statistics of collect_stats and functions are"):
        te.auto_precision(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^auto_precision: first=-1; an int of at least 0 is accepted\.$"):
        te.auto_precision(model, run, first=-1)
    for name in ("max_saturated", "max_underflowed", "max_sqnr_loss"):
        for value in (-1, math.nan, "5 %", None):
            with pytest.raises(ValueError, match=rf"^auto_precision: {name}={value!r}; a number of at least 0 is"):
                te.auto_precision(model, run, **{name: value})
    with pytest.raises(
        ValueError, match=r"^auto_precision: disable has 'head', which is or holds no layer of the model"
    ):
        te.auto_precision(model, run, disable="head")
    with pytest.raises(TypeError, match=r"^auto_precision: disable has 3; names and patterns are accepted\.$"):
        te.auto_precision(model, run, disable=[3])  # type: ignore[list-item]
    with te.collect_stats(model, every=1) as stats:
        run()
    with pytest.raises(ValueError, match=r"^auto_precision: recipes=\[\] with statistics, which were measured already"):
        te.auto_precision(model, stats, recipes=[])


@pytest.mark.parametrize("enabled", [False, True])
def test_a_layer_that_saw_empty_batches_alone_keeps_its_choice(enabled: bool) -> None:
    model = te.Linear(32, 48, params_dtype=torch.bfloat16)

    def train() -> None:
        for _ in range(2):
            with te.autocast(enabled=enabled):
                model(torch.zeros(0, 32, dtype=torch.bfloat16, requires_grad=True)).sum().backward()

    (choice,) = te.auto_precision(model, train).layers.values()
    assert choice == (te.recipe.AUTOCAST, "No number of it was measured: its choice stays as it was.")
