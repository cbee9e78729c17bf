"""Recipes: defaults, formats, and every refusal."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import reference as te
from reference import recipe
from reference.recipes import base, delayed_scaling
from reference.support import notice

RECIPES = [te.DelayedScaling, recipe.Float8CurrentScaling, recipe.Float8BlockScaling]
RECIPES += [recipe.MXFP8BlockScaling, recipe.NVFP4BlockScaling]


def test_defaults_are_transformer_engines() -> None:
    r = te.DelayedScaling()
    assert (r.margin, r.fp8_format, r.amax_history_len, r.amax_compute_algo, r.reduce_amax) == (
        0,
        te.Format.HYBRID,
        1024,
        "max",
        True,
    )
    assert recipe.DelayedScaling is te.DelayedScaling
    assert recipe.Format is te.Format
    assert r.delayed()


@pytest.mark.parametrize(
    ("fmt", "forward", "backward"),
    [
        (te.Format.HYBRID, torch.float8_e4m3fn, torch.float8_e5m2),
        (te.Format.E4M3, torch.float8_e4m3fn, torch.float8_e4m3fn),
        (te.Format.E5M2, torch.float8_e5m2, torch.float8_e5m2),
    ],
)
def test_formats(fmt: te.Format, forward: torch.dtype, backward: torch.dtype) -> None:
    assert (fmt.dtype(True), fmt.dtype(False)) == (forward, backward)
    assert fmt.fp8_max(True) == torch.finfo(forward).max == fmt.value.max_fwd
    assert fmt.fp8_max(False) == torch.finfo(backward).max == fmt.value.max_bwd


def test_the_format_of_four_bits() -> None:
    e2m1 = te.Format.E2M1
    assert (e2m1.dtype(True), e2m1.fp8_max(True), e2m1.fp8_max(False)) == (torch.uint8, 6.0, 6.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"margin": -1}, r"margin=-1; an int from 0 to 18 is accepted .*rounds a tensor's largest number to 0"),
        ({"margin": 0.5}, r"margin=0.5; an int from 0 to 18 is accepted"),
        ({"fp8_format": te.Format.E5M2}, r"fp8_format=Format.E5M2; Format.HYBRID and Format.E4M3 are accepted"),
        ({"fp8_format": "hybrid"}, r"fp8_format=hybrid; Format.HYBRID and Format.E4M3 are accepted"),
        ({"amax_history_len": 0}, r"amax_history_len=0; an int from 1 to 1048576 is accepted"),
        ({"amax_compute_algo": "mean"}, r"amax_compute_algo='mean'; 'max' and 'most_recent' are accepted"),
        ({"amax_compute_algo": torch.amax}, r"'max' and 'most_recent' are accepted"),
        ({"scaling_factor_compute_algo": max}, r"scaling_factor_compute_algo=.*only None is accepted"),
        ({"fp8_mha": True}, r"DelayedScaling: fp8_mha=True is not offered .* False is accepted"),
        *[
            ({name: value}, rf"DelayedScaling: {name}=.*accepted")
            for name, values in {
                "margin": (19, 100, 10**30, True, np.int64(3), np.ones(2), "0", None, float("nan")),
                "amax_history_len": (2**20 + 1, 10**30, True, np.int64(3), 4.0, "4", None, np.ones(2)),
                "fp8_format": (te.Format.E2M1, "HYBRID", None, np.ones(2), [te.Format.HYBRID], te.Format.HYBRID.value),
                "amax_compute_algo": ("MAX", None, ["max"], np.ones(2), b"max"),
                "reduce_amax": ("False", 0, 1, None, np.ones(2), np.True_),
                "fp8_dpa": ("False", 0, 1, None, np.ones(2), np.False_),
                "fp8_mha": ("False", 0, 1, None, torch.ones(2), np.False_),
                "scaling_factor_compute_algo": (True, "max", np.ones(2)),
                "backward_override": ("dequantised", False, np.ones(2)),
                "override_linear_precision": ((False, False, True), False, None, (False,), np.ones(3), (0, 0, 0)),
            }.items()
            for value in values
        ],
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=sentence):
        te.DelayedScaling(**arguments)


@pytest.mark.parametrize("margin", [0, 18, 19])
def test_the_largest_margin_is_the_last_that_leaves_a_number(margin: int) -> None:
    """A tensor's largest number after a step, as E4M3 code: 2^-9 with 18 powers of two kept free, 0 with 19."""
    scale, history, x = torch.ones(1), torch.zeros(2, 1), torch.full((1, 16), 3.0)
    torch.ops.twin.amax(x, history, 0)
    torch.ops.twin.scale_update([scale], [history], 448.0, margin, "max")
    code = torch.ops.twin.cast(x, scale, None, 0, torch.float8_e4m3fn)[0].float()[0, 0]
    assert code == {0: 448.0, 18: 2.0**-9, 19: 0.0}[margin]
    if margin == delayed_scaling.MAX_MARGIN:
        te.DelayedScaling(margin=margin)


def test_the_largest_margin_trains() -> None:
    layer = te.Linear(32, 32)
    for _ in range(3):
        with te.autocast(recipe=te.DelayedScaling(margin=18, amax_history_len=2)):
            y = layer(torch.ones(4, 32))
        y.sum().backward()
        assert bool(y.isfinite().all())
        assert bool(y.any())


def test_a_recipe_says_what_it_is() -> None:
    """Transformer Engine's questions."""
    r = te.DelayedScaling()
    assert (r.delayed(), r.float8_per_tensor_scaling()) == (True, True)
    others = (r.mxfp8, r.nvfp4, r.float8_current_scaling, r.float8_block_scaling, r.custom)
    assert not any(question() for question in others)


def test_recipes_are_values() -> None:
    assert te.DelayedScaling(margin=1) == te.DelayedScaling(margin=1) != te.DelayedScaling()
    assert len({te.DelayedScaling(), te.DelayedScaling()}) == 1


@pytest.mark.parametrize("made", RECIPES)
def test_equal_recipes_of_every_kind_share_the_copy_that_layers_keep(made: Any) -> None:
    """So a program may make its recipe anew in each step."""
    one, other = made(), made(backward_override="high_precision")
    assert one == made() != other
    assert {one, made(), other} == {one, other}
    assert one.fixed is made().fixed is not other.fixed


@pytest.mark.parametrize("recalled", [False, True])
def test_a_field_that_is_set_counts_from_the_next_autocast_on(recalled: bool, same_bits) -> None:  # type: ignore[no-untyped-def]
    """As a recipe made anew with that field; an autocast that is open goes on with what it was given."""
    x = torch.linspace(-2, 3, 8 * 32).view(8, 32)

    def run(change: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layer, found = te.Linear(32, 16), []
        recipe = te.DelayedScaling(amax_history_len=4)
        for step in range(5):
            if step == 2 and change == "made anew":
                recipe = dataclasses.replace(recipe, margin=3, amax_compute_algo="most_recent")
            if step == 2 and change == "set":
                recipe.margin, recipe.amax_compute_algo = 3, "most_recent"
            with te.autocast(recipe=recipe):
                if change == "set while open" and step == 1:
                    recipe.margin, recipe.amax_compute_algo = 3, "most_recent"
                y = (te.checkpoint(layer, x) if recalled else layer(x)) * (step + 1)
            y.sum().backward()
            found += [y, layer.weight.grad.clone(), layer.fp8_meta["scaling_fwd"].scale.clone()]
        return found

    expected, plain = run("made anew"), run("never")
    for change in ("set", "set while open"):
        for found, wanted in zip(run(change), expected, strict=True):
            same_bits(found, wanted)
    assert any(not torch.equal(a, b) for a, b in zip(expected, plain, strict=True))


def test_a_field_that_is_set_is_checked_first() -> None:
    for one, name, value in ((te.DelayedScaling(), "margin", 19), (recipe.Float8CurrentScaling(), "fp8_dpa", True)):
        before = dataclasses.replace(one)
        with pytest.raises((ValueError, NotImplementedError), match=rf"^{type(one).__name__}: {name}={value}"):
            setattr(one, name, value)
        assert one == before


def test_layers_keep_a_copy_that_nothing_changes() -> None:
    one = te.DelayedScaling(amax_history_len=4)
    assert one.fixed is one.fixed
    assert one.fixed == one
    assert copy.deepcopy(one).fixed is one.fixed is te.DelayedScaling(amax_history_len=4).fixed
    layer = te.Linear(32, 32)
    with te.autocast(recipe=one):
        layer(torch.ones(4, 32))
    kept = layer.fp8_meta["recipe"]
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"margin=1 is set on the copy of a recipe that autocast"):
        kept.margin = 1
    one.margin = 1
    assert (kept.margin, one.fixed.margin) == (0, 1)
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize("made", [te.DelayedScaling, recipe.Float8CurrentScaling])
def test_a_recipe_made_anew_in_each_step_makes_nothing_anew(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As README's loop does: a layer keeps its quantizers, and a captured CUDA graph would still serve."""
    layer = te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.ones(4, 1, 32, dtype=torch.bfloat16, requires_grad=True)
    layer.to(torch.bfloat16)
    asked = []
    usual = recipe.Recipe.quantizers
    monkeypatch.setattr(recipe.Recipe, "quantizers", lambda *given: asked.append(given[0]) or usual(*given))
    seen = []
    for _ in range(3):
        with te.autocast(recipe=made()):
            y = layer(x)
        y.sum().backward()
        parts = [layer.self_attention.layernorm_qkv, layer.self_attention.proj, layer.layernorm_mlp]
        seen.append([(id(one._precision), id(one._membership), id(one._fitted)) for one in parts])
    assert seen[0] == seen[1] == seen[2]
    assert len(asked) == 3
    with te.autocast(recipe=made(backward_override="high_precision")):
        layer(x)
    assert len(asked) == 6


def test_copies_of_recipes_are_bounded_and_know_what_a_subclass_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(te.DelayedScaling):
        note: Any = None

    @dataclasses.dataclass
    class Hashless(te.DelayedScaling):
        pass

    one, other, same = Noted(), Noted(), Noted()
    one.note, other.note, same.note = torch.ones(2), torch.ones(2), None
    same.note = one.note
    assert one.fixed is same.fixed is not other.fixed
    assert other.fixed.note is other.note
    assert te.DelayedScaling().fixed is not Noted().fixed
    assert Hashless().fixed is not Hashless().fixed
    monkeypatch.setattr(base, "_fixed", {})
    monkeypatch.setattr(base, "_MOST_FIXED", 3)
    for rows in range(1, 12):
        assert te.DelayedScaling(amax_history_len=rows).fixed is te.DelayedScaling(amax_history_len=rows).fixed
        assert len(base._fixed) <= 3


def test_a_program_may_subclass_a_recipe() -> None:
    """As Megatron does, whose constructor has its own arguments."""

    class Own(te.DelayedScaling):
        def __init__(self, length: int) -> None:
            super().__init__(amax_history_len=length, override_linear_precision=(False, False, False))
            self.note = "own"

    one = Own(4)
    assert (one.amax_history_len, one.note, one.delayed()) == (4, "own", True)
    layer, x = te.Linear(32, 32), torch.ones(4, 32)
    with te.autocast(recipe=one):
        layer(x)
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape[0] == 4
    one.amax_history_len = 8
    with te.autocast(recipe=one):
        layer(x)
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape[0] == 8
    assert (one.fixed.note, type(one.fixed)) == ("own", Own)


def test_other_recipes_are_named_when_asked_for() -> None:
    with pytest.raises(AttributeError, match=r"recipe.CustomRecipe is not offered"):
        _ = recipe.CustomRecipe
    with pytest.raises(AttributeError, match="no attribute"):
        _ = recipe.NoSuchThing


@pytest.mark.parametrize("choices", [None, [], "x", 3])
def test_by_layer_takes_a_dictionary(choices: Any) -> None:
    with pytest.raises(TypeError, match=r"^by_layer: choices=.*; a dictionary of names or modules is accepted"):
        te.recipe.by_layer(te.Linear(32, 32), choices)


@pytest.mark.parametrize(
    ("variable", "text", "make", "sentence"),
    [
        ("BACKWARD_OVERRIDE", "dequantized", recipe.Float8BlockScaling, "the recipe has backward_override=None, and"),
        ("FP8_BLOCK_SCALING_FP32_SCALES", "1", recipe.Float8BlockScaling, "the recipe has use_f32_scales=False, and"),
        ("FP8_CURRENT_SCALING_POWER_2_SCALES", "1", recipe.Float8CurrentScaling, "has use_power_2_scales=False, and"),
        ("NVFP4_DISABLE_RHT", "1", recipe.NVFP4BlockScaling, "the recipe has disable_rht=False, and"),
        ("NVFP4_4OVER6", "all", recipe.NVFP4BlockScaling, "the recipe has nvfp4_4over6='none', and"),
        ("FP8_BLOCK_SCALING_FP32_SCALES", "0", recipe.Float8BlockScaling, None),
        ("FP8_BLOCK_SCALING_FP32_SCALES", "1", recipe.Float8CurrentScaling, None),
        ("FP8_BLOCK_SCALING_FP32_SCALES", "1", lambda: recipe.Float8BlockScaling(use_f32_scales=True), None),
    ],
)
def test_a_variable_that_transformer_engine_reads_is_spoken_of(
    variable: str,
    text: str,
    make: Any,
    sentence: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its defaults come from the environment, ours do not: a program that relies on it must hear of that, once."""
    made = make()
    monkeypatch.setattr(notice, "_said", set())
    monkeypatch.setenv(f"NVTE_{variable}", text)
    assert make() == make() == made
    if sentence is None:
        assert not caplog.text
    else:
        assert caplog.text.count(f"NVTE_{variable}={text!r} in the environment is not read; ") == 1
        assert sentence in caplog.text
