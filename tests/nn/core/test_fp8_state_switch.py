"""The first step under another recipe has scales for that recipe, wherever the recipe changes.

Expected scales are computed here from the amax histories, and given to a new layer by hand.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

import reference as te
from reference.checkpoints import transformer_engine_state
from reference.inspect.precision import Choice
from reference.state.scaling import KEYS, FP8TensorMeta

HYBRID, E4M3 = te.Format.HYBRID, te.Format.E4M3
STEPS = 3
START = te.DelayedScaling(amax_history_len=8)
CURRENT = te.recipe.Float8CurrentScaling()
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(32, 48, params_dtype=torch.bfloat16),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 48, params_dtype=torch.bfloat16),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16),
    "TransformerLayer": lambda: te.TransformerLayer(
        32, 64, 2, params_dtype=torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.0
    ),
}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "to E4M3": ({}, {"fp8_format": E4M3}),
    "to HYBRID": ({"fp8_format": E4M3}, {"fp8_format": HYBRID}),
    "to a margin": ({}, {"margin": 5}),
    "from a margin": ({"margin": 18}, {"margin": 1}),
    "format and margin": ({"margin": 2}, {"fp8_format": E4M3, "margin": 0}),
    "a margin of 7 that gives one direction its number": ({"margin": 7}, {"fp8_format": E4M3, "margin": 0}),
    "a longer history": ({}, {"amax_history_len": 20, "fp8_format": E4M3}),
    "a shorter history": ({}, {"amax_history_len": 2, "fp8_format": E4M3}),
    "algorithm": ({}, {"amax_compute_algo": "most_recent"}),
    "reduce_amax": ({}, {"reduce_amax": False, "margin": 1}),
    "backward_override": ({"backward_override": "high_precision"}, {"backward_override": None, "margin": 3}),
    "fp8_dpa": ({"fp8_dpa": True}, {"margin": 4}),
    "nothing": ({}, {}),
}


def step(run: Any, recipe: Any, i: int = 0, layer: Any = None) -> dict[str, torch.Tensor]:
    """y, dx and the parameters' gradients of `layer`, which `run` runs."""
    layer = run if layer is None else layer
    x = torch.linspace(-3, 2, 16 * 2 * 32).cos().mul(1 + i).reshape(16, 2, 32).to(torch.bfloat16).requires_grad_()
    layer.zero_grad()
    with te.autocast(recipe=recipe):
        y = run(x)
    y.backward(torch.linspace(-7, 5, y.numel()).sin().mul(0.01).reshape(y.shape).to(y.dtype))
    grads = {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def trained(name: str, recipe: Any) -> Any:
    torch.manual_seed(1)
    layer = LAYERS[name]()
    for i in range(STEPS):
        step(layer, recipe, i)
    return layer


def expected(layer: Any, recipe: Any, latest: bool = False) -> dict[str, torch.Tensor]:
    """The next step of a new layer whose scales are `2^-margin · fp8_max / amax`, division by division."""
    found = copy.deepcopy(layer)
    for one in found.modules():
        for key in KEYS:
            meta = getattr(one, "fp8_meta", {}).get(key)
            if meta is None:
                continue
            limit = {HYBRID: (448, 57344), E4M3: (448, 448)}[recipe.fp8_format][key == KEYS[1]]
            amax = meta.amax_history[-1 if latest else 1 :].numpy().max(axis=0)
            scale = np.float32(limit * 2.0**-recipe.margin) / np.where(amax > 0, amax, 1).astype(np.float32)
            scale = torch.tensor(np.where(amax > 0, scale, 1).astype(np.float32))
            one.fp8_meta[key] = FP8TensorMeta(scale, meta.amax_history.clone())
            one._fitted = None
    return step(found, recipe, STEPS)


def loaded(layer: Any, name: str) -> Any:
    made = LAYERS[name]()
    made.load_state_dict(layer.state_dict())
    return made


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], same_bits: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        same_bits(found[name], x, name)


@pytest.mark.sample(7)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_the_first_step_after_a_change(name: str, change: str, same_bits: Any) -> None:
    before, after = CHANGES[change]
    old = replace(START, **before)
    new = replace(old, **({"fp8_dpa": False} if before.get("fp8_dpa") else {}), **after)
    if before.get("fp8_dpa") and name != "TransformerLayer":
        old = replace(old, fp8_dpa=False)
    layer = trained(name, old)
    layer_of_checkpoint, copied = loaded(layer, name), pickle.loads(pickle.dumps(layer))
    by_layer = copy.deepcopy(layer)
    te.recipe.by_layer(by_layer, {"*": new})
    wanted = expected(layer, new)
    assert_same(step(layer, new, STEPS), wanted, same_bits)
    assert_same(step(layer_of_checkpoint, new, STEPS), wanted, same_bits)
    assert_same(step(copied, new, STEPS), wanted, same_bits)
    assert_same(step(by_layer, old, STEPS), wanted, same_bits)


SETTINGS = [
    te.DelayedScaling(margin=0, amax_history_len=8),
    te.DelayedScaling(margin=3, amax_history_len=8, amax_compute_algo="most_recent"),
    te.DelayedScaling(margin=7, amax_history_len=20, reduce_amax=False),
    te.DelayedScaling(margin=0, amax_history_len=8, fp8_format=E4M3),
    te.DelayedScaling(margin=10, amax_history_len=5, fp8_format=E4M3, fp8_dpa=True),
    te.DelayedScaling(margin=1, amax_history_len=8, fp8_dpa=True),
]


def distributed(layer: Any, name: str, folder: Any) -> Any:
    made = LAYERS[name]()
    checkpoint = torch.distributed.checkpoint
    checkpoint.save(layer.state_dict(), checkpoint_id=folder, no_dist=True)
    state = made.state_dict()
    checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    made.load_state_dict(state)
    return made


@cache
def ran(name: str, setting: int) -> Any:
    return trained(name, SETTINGS[setting])


@cache
def first_step(name: str, before: int, after: int, fp8_dpa: bool) -> dict[str, torch.Tensor]:
    latest = SETTINGS[before].amax_compute_algo == "most_recent"
    return expected(ran(name, before), replace(SETTINGS[after], fp8_dpa=fp8_dpa), latest)


def into_one_that_ran(layer: Any, name: str, recipe: Any) -> Any:
    made = copy.deepcopy(ran(name, SETTINGS.index(recipe)))
    made.load_state_dict(layer.state_dict())
    return made


def planned(layer: Any, name: str, recipe: Any) -> Any:
    names = [key for key, one in layer.named_modules() if getattr(one, "fp8_weights", None)]
    te.PrecisionPlan({key: Choice(recipe, "") for key in names}).apply(layer)
    return layer


WAYS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "a switch": lambda layer, name, old, new, folder: step(layer, new, STEPS),
    "a load": lambda layer, name, old, new, folder: step(loaded(layer, name), new, STEPS),
    "a load after a run": lambda layer, name, old, new, folder: step(into_one_that_ran(layer, name, new), new, STEPS),
    "a distributed load": lambda layer, name, old, new, folder: step(distributed(layer, name, folder), new, STEPS),
    "a pickle": lambda layer, name, old, new, folder: step(pickle.loads(pickle.dumps(layer)), new, STEPS),
    "te.checkpoint": lambda layer, name, old, new, folder: step(partial(te.checkpoint, layer), new, STEPS, layer),
    "a plan": lambda layer, name, old, new, folder: step(planned(layer, name, new), old, STEPS),
}


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Linear", "TransformerLayer"])
def test_every_pair_of_settings(name: str, way: str, tmp_path: Any, same_bits: Any) -> None:
    pairs = [(i, j) for i in range(len(SETTINGS)) for j in range(len(SETTINGS))]
    if name == "TransformerLayer":  # each setting once before, once after
        pairs = [(i, (i + 1 + len(way) % 5) % len(SETTINGS)) for i in range(len(SETTINGS))]
    for i, j in pairs:
        old, new = SETTINGS[i], SETTINGS[j]
        if way == "a plan":  # it leaves attention to autocast
            new = replace(new, fp8_dpa=old.fp8_dpa)
            if old.fp8_dpa and name != "Linear":
                continue
        found = WAYS[way](copy.deepcopy(ran(name, i)), name, old, new, tmp_path / f"{i}{j}")
        assert_same(found, first_step(name, i, j, new.fp8_dpa), same_bits)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("old", "new"), [(HYBRID, E4M3), (E4M3, HYBRID)])
def test_transformer_engines_checkpoints_say_what_scales_are_for(name: str, old: Any, new: Any, same_bits: Any) -> None:
    layer = trained(name, replace(START, fp8_format=old, margin=1))
    made = LAYERS[name]()
    made.load_state_dict(te.transformer_engine_state_dict(layer))
    recipe = replace(START, fp8_format=new)
    assert_same(step(made, recipe, STEPS), expected(layer, recipe), same_bits)
    between = copy.deepcopy(layer)  # the recipe of its last run has no scales
    step(between, te.recipe.Float8CurrentScaling())
    linear = next(one for one in between.modules() if getattr(one, "fp8_weights", None))
    found = transformer_engine_state.read("", te.transformer_engine_state_dict(linear)["_extra_state"])
    assert found is not None
    said = found[1]
    assert said is not None
    assert (said.fp8_format, said.margin) == (old, 1)


def test_a_checkpoint_that_does_not_say_is_for_the_next_recipe(same_bits: Any) -> None:
    recipe = replace(START, fp8_format=E4M3, margin=3)
    layer, made = trained("Linear", recipe), LAYERS["Linear"]()
    state = layer.state_dict()
    assert float(state["_extra_state"][0, 4]) == 2.0**-4
    state["_extra_state"][0, 4] = 1
    made.load_state_dict(state)
    assert_same(step(made, recipe, STEPS), step(layer, recipe, STEPS), same_bits)


def test_another_recipe_between_leaves_no_trace(same_bits: Any) -> None:
    layer = trained("LayerNormMLP", START)
    wanted = expected(layer, new := replace(START, fp8_format=E4M3))
    step(layer, te.recipe.Float8CurrentScaling())
    with torch.no_grad(), te.autocast(recipe=replace(START, margin=4)):
        layer(torch.zeros(16, 32, dtype=torch.bfloat16))
    assert_same(step(layer, new, STEPS), wanted, same_bits)


@pytest.mark.sample(6)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("old", "new"), [(HYBRID, E4M3), (E4M3, HYBRID)])
def test_a_backward_after_the_next_recipe_has_the_scales_of_its_own(
    name: str, old: Any, new: Any, checkpointed: bool, same_bits: Any
) -> None:
    first, second = (replace(START, fp8_format=one, margin=i) for i, one in enumerate((old, new)))
    second = replace(second, amax_history_len=5)
    layer = trained(name, first)
    wanted = step(copy.deepcopy(layer), first, STEPS)
    x = torch.linspace(-3, 2, 16 * 2 * 32).cos().mul(1 + STEPS).reshape(16, 2, 32).to(torch.bfloat16).requires_grad_()
    layer.zero_grad()
    with te.autocast(recipe=first):
        y = te.checkpoint(layer, x) if checkpointed else layer(x)
        with te.autocast(recipe=second), torch.no_grad():
            layer(x.detach())
        y.backward(torch.linspace(-7, 5, y.numel()).sin().mul(0.01).reshape(y.shape).to(y.dtype))
    same_bits(x.grad, wanted["dx"])
    for key, one in layer.named_parameters():
        same_bits(one.grad, wanted[key], key)


def test_columns_that_were_never_cast_keep_their_first_scale() -> None:
    layer = LAYERS["Linear"]()
    with te.autocast(recipe=START), torch.no_grad():
        layer(torch.ones(16, 32, dtype=torch.bfloat16))
    with te.autocast(recipe=replace(START, fp8_format=E4M3)), torch.no_grad():
        layer(torch.ones(16, 32, dtype=torch.bfloat16))
    assert layer.fp8_meta["scaling_bwd"].scale.tolist() == [1, 1]
    assert layer.fp8_meta["scaling_fwd"].scale[0] == 448


@pytest.mark.parametrize("change", [{"margin": 4}, {"fp8_format": E4M3}])
def test_cached_weights(change: dict[str, Any], same_bits: Any) -> None:
    """A microbatch under another margin casts the weight anew; under another format of gradients it need not."""
    layer, x = trained("Linear", START), torch.linspace(-1, 1, 16 * 32).reshape(16, 32).to(torch.bfloat16)
    new = replace(START, **change)
    other = copy.deepcopy(layer)
    with te.autocast(recipe=START), torch.no_grad():
        layer(x, is_first_microbatch=True)
    with te.autocast(recipe=new), torch.no_grad():
        same_bits(layer(x, is_first_microbatch=False), other(x, is_first_microbatch=True))


@pytest.mark.parametrize("way", ["", "checkpoint", "copy", "checkpoint and copy"])
@pytest.mark.parametrize(("old", "new"), [(START, CURRENT), (CURRENT, START)])
def test_weights_that_another_kind_of_recipe_has_cast(old: Any, new: Any, way: str, same_bits: Any) -> None:
    """They are cast anew, whether or not the layer knows of its last forward."""
    layer, x = trained("Linear", START), torch.linspace(-1, 1, 16 * 32).reshape(16, 32).to(torch.bfloat16)
    run = te.checkpoint if "checkpoint" in way else lambda module, *args, **kwargs: module(*args, **kwargs)
    wanted = copy.deepcopy(layer)
    with te.autocast(recipe=old):
        run(layer, x.clone().requires_grad_(), is_first_microbatch=True)
    with torch.no_grad():
        for one in (layer, wanted):
            one.weight.mul_(0.75)
    if "copy" in way:
        layer = copy.deepcopy(layer)
    wanted.load_state_dict(layer.state_dict())
    with te.autocast(recipe=new):
        same_bits(run(layer, x, is_first_microbatch=False), wanted(x, is_first_microbatch=True))


def test_weights_kept_in_fp8(same_bits: Any) -> None:
    with te.quantized_model_init(recipe=START):
        layer = te.Linear(32, 48, params_dtype=torch.bfloat16)
    for i in range(STEPS):
        step(layer, START, i)
    new = replace(START, fp8_format=E4M3, margin=2)
    wanted = expected(layer, new)
    made = copy.deepcopy(layer)
    made.load_state_dict(layer.state_dict())
    assert_same(step(made, new, STEPS), wanted, same_bits)
    made.weight.data.copy_(torch.ones(48, 32))
    scale = made.fp8_meta["scaling_fwd"].scale[1]
    assert float(made.weight._scale_inv) == float(1 / scale), "a write has the scale of the setting of now"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled(same_bits: Any) -> None:
    """Eager and compiled steps in turn, with the recipe changed between them."""
    torch._dynamo.reset()
    recipes = [START, replace(START, fp8_format=E4M3), replace(START, margin=3), START]
    eager, compiled = trained("Linear", START), trained("Linear", START)
    run = torch.compile(compiled, backend="aot_eager")
    for i, recipe in enumerate(recipes):
        wanted = step(eager, recipe, i)
        compiled.zero_grad()
        x = torch.linspace(-3, 2, 16 * 2 * 32).cos().mul(1 + i).reshape(16, 2, 32).to(torch.bfloat16).requires_grad_()
        with te.autocast(recipe=recipe):
            y = (compiled if i == 2 else run)(x)
        y.backward(torch.linspace(-7, 5, y.numel()).sin().mul(0.01).reshape(y.shape).to(y.dtype))
        same_bits(y, wanted["y"], f"y {i}")
        same_bits(x.grad, wanted["dx"], f"dx {i}")
