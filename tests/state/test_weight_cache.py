"""A cached FP8 weight: who reads it, what drops it, and what a copy of its module has of it."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from shared.linear_cases import RECIPES, numbers

import reference as te

PARTS = ("scale", "amax_history")


def test_weight_cache(same_bits) -> None:
    """`is_first_microbatch`: True casts and keeps, False reuses and leaves the history alone, None always casts."""
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    x = numbers(9, 8, 32).to(torch.bfloat16)

    def run(first: bool | None) -> torch.Tensor:
        with te.autocast(recipe=RECIPES[0]):
            return layer(x.clone().requires_grad_(), is_first_microbatch=first)

    for _ in range(4):
        run(None)
    y = run(True)
    history = layer.fp8_meta["scaling_fwd"].amax_history[:, 1].clone()
    with torch.no_grad():
        layer.weight.mul_(2.0)
    same_bits(run(False), y, "the cached weight")
    assert torch.equal(layer.fp8_meta["scaling_fwd"].amax_history[:, 1], history)
    assert not torch.equal(run(True), y)
    assert not torch.equal(layer.fp8_meta["scaling_fwd"].amax_history[:, 1], history)
    layer.float()
    assert layer._store.casts == {}, "moving or converting the module drops the copy"


CACHING: dict[str, Any] = {
    "Linear": lambda: te.Linear(32, 32, params_dtype=torch.bfloat16),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, params_dtype=torch.bfloat16),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, params_dtype=torch.bfloat16),
}
CHANGES: dict[str, Any] = {
    "load_state_dict": lambda layer, other: layer.load_state_dict(other.state_dict()),
    "load_state_dict, assign": lambda layer, other: layer.load_state_dict(other.state_dict(), assign=True),
    "to another dtype and back": lambda layer, other: layer.to(torch.float8_e5m2).to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CACHING)
def test_a_cached_weight_does_not_outlive_its_numbers(name: str, change: str, same_bits) -> None:
    layer, other = CACHING[name](), CACHING[name]()
    x, g = numbers(30, 8, 32).to(torch.bfloat16), numbers(31, 8, 32).to(torch.bfloat16)

    def run(module: Any, first: bool | None) -> list[torch.Tensor]:
        inp = x.clone().requires_grad_()
        module.zero_grad()
        with te.autocast(recipe=RECIPES[0]):
            y = module(inp, is_first_microbatch=first)
        y.backward(g)
        state = [getattr(module.fp8_meta[key], part) for key in module.fp8_meta if "scal" in key for part in PARTS]
        return [y, inp.grad, *(p.grad for p in module.parameters()), *state]

    run(other, None)
    run(layer, True)
    CHANGES[change](layer, other)
    fresh = CACHING[name]()
    fresh.load_state_dict(layer.state_dict())
    for a, b in zip(run(layer, False), run(fresh, None), strict=True):
        same_bits(a, b)


def test_cached_and_recast_weights_give_the_same_gradients(same_bits) -> None:
    x, g = numbers(10, 8, 32).to(torch.bfloat16), numbers(11, 8, 16).to(torch.bfloat16)
    torch.manual_seed(3)
    cached = te.Linear(32, 16, params_dtype=torch.bfloat16)
    recast = te.Linear(32, 16, params_dtype=torch.bfloat16)
    recast.load_state_dict(cached.state_dict())
    for microbatch in range(3):
        for layer, first in ((cached, microbatch == 0), (recast, None)):
            with te.autocast(recipe=RECIPES[0]):
                y = layer(x, is_first_microbatch=first)
            y.backward(g)
        if microbatch == 0:
            same_bits(cached.weight.grad, recast.weight.grad)


def test_a_cache_without_its_transpose_is_not_enough_for_training() -> None:
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    x = numbers(12, 8, 32).to(torch.bfloat16).requires_grad_()
    with torch.no_grad(), te.autocast(recipe=RECIPES[0]):
        layer(x, is_first_microbatch=True)
    with te.autocast(recipe=RECIPES[0]):
        layer(x, is_first_microbatch=False).sum().backward()
    assert x.grad is not None


BLOCKS, CURRENT, ROWS, FOUR = (
    te.recipe.Float8BlockScaling,
    te.recipe.Float8CurrentScaling,
    te.recipe.Float8RowwiseScaling,
    te.recipe.NVFP4BlockScaling,
)
SETTINGS: dict[str, tuple[Any, Any]] = {
    "fp32 scales in blocks": (BLOCKS(use_f32_scales=True), BLOCKS()),
    "blocks of weights": (BLOCKS(w_block_scaling_dim=1), BLOCKS()),
    "current scales that are powers of two": (CURRENT(use_power_2_scales=True), CURRENT()),
    "one scale for the backward": (ROWS(weight_gradient="high_precision"), ROWS()),
    "blocks of MXFP8": (te.recipe.MXFP8BlockScaling(enable_2d_quantization=True), te.recipe.MXFP8BlockScaling()),
    "blocks of NVFP4": (FOUR(disable_2d_quantization=True), FOUR()),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_cast_by_other_settings_of_the_recipe_is_not_reused(settings: str, same_bits) -> None:
    x, g = (numbers(seed, 32, 128).to(torch.bfloat16) for seed in (13, 14))
    layer = te.Linear(128, 128, params_dtype=torch.bfloat16)
    with torch.no_grad():  # rows and columns of several sizes, so that each scale matters
        layer.weight *= torch.exp(2 * numbers(15, 128, 1)) * torch.exp(2 * numbers(16, 1, 128))

    def run(recipe: te.recipe.Recipe, first: bool | None) -> list[torch.Tensor]:
        inp = x.clone().requires_grad_()
        torch.manual_seed(17)
        with te.autocast(recipe=recipe):
            y = layer(inp, is_first_microbatch=first)
        y.backward(g)
        assert inp.grad is not None
        return [y, inp.grad]

    for one, other in (SETTINGS[settings], SETTINGS[settings][::-1]):
        expected, of_others = run(one, None), run(other, None)
        assert any(not torch.equal(a, b) for a, b in zip(expected, of_others, strict=True))
        run(other, True)
        for found, right in zip(run(one, False), expected, strict=True):
            same_bits(found, right)
        (cast,) = layer._store.casts.values()
        run(one, False)
        assert next(iter(layer._store.casts.values())) is cast, "that of the same settings is"


Layer = torch.nn.Module


def run(module: Layer, x: torch.Tensor, first: bool | None) -> torch.Tensor:
    with te.autocast(recipe=RECIPES[0]):
        return module(x, is_first_microbatch=first)


@pytest.mark.parametrize("name", CACHING)
def test_reset_parameters_drops_the_cached_weight(name: str, same_bits) -> None:
    layer, fresh = CACHING[name](), CACHING[name]()
    x = numbers(30, 8, 32).to(torch.bfloat16).requires_grad_()
    run(layer, x, True)
    layer.reset_parameters()
    fresh.load_state_dict(layer.state_dict())
    same_bits(run(layer, x, False), run(fresh, x, None))


@pytest.mark.parametrize("name", CACHING)
def test_a_module_with_a_cached_weight_can_be_pickled(name: str, same_bits) -> None:
    layer = CACHING[name]()
    x = numbers(30, 8, 32).to(torch.bfloat16).requires_grad_()
    run(layer, x, True)
    copied = pickle.loads(pickle.dumps(layer))
    same_bits(run(layer, x, False), run(copied, x, False))


@pytest.mark.parametrize("name", CACHING)
def test_what_inference_mode_has_cached_is_read_outside_and_by_a_copy(name: str, same_bits) -> None:
    layer = CACHING[name]()
    x = numbers(30, 8, 32).to(torch.bfloat16)
    with torch.inference_mode():
        first = run(layer, x, True)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for p in (*layer.parameters(), *copied.parameters()):
            if p.dim() == 2:
                p.mul_(2)  # not seen: the first microbatch has cast the weights
        same_bits(run(layer, x, False), first)
        same_bits(run(copied, x, False), first)
        assert not torch.equal(run(layer, x, None), first)
    y = run(layer, x.requires_grad_(), False)  # trains: what is cached has no transpose, so the weights are cast anew
    y.sum().backward()


def test_a_module_that_an_older_version_pickled_keeps_its_cast(same_bits) -> None:
    """Version 1.0 wrote a cast as codes, their transpose and the scale, FP8 as bytes with a dtype, and a layout."""
    layer = te.Linear(32, 32, params_dtype=torch.bfloat16)
    x = numbers(9, 8, 32).to(torch.bfloat16).requires_grad_()
    with te.autocast(recipe=RECIPES[0]):
        layer(x, is_first_microbatch=True)
    ((key, cast),) = layer._store.casts.items()
    (codes, scale_inv, layout, _), column = cast
    assert column is not None
    as_bytes = [(t.view(torch.uint8), t.dtype) for t in (codes, column.codes)]
    key = key[:2]  # it did not say by which settings
    same, older = copy.deepcopy(layer), te.Linear(32, 32, params_dtype=torch.bfloat16)
    older.__setstate__(
        {**copy.deepcopy(layer).__getstate__(), "_fp8_workspaces": {key: [*as_bytes, scale_inv, layout]}}
    )
    assert older._store.casts[key][0].layout == layout
    with torch.no_grad():
        older.weight.mul_(2.0)
    with te.autocast(recipe=RECIPES[0]):
        same_bits(older(x, is_first_microbatch=False), same(x, is_first_microbatch=False), "the cast of before")


@pytest.mark.parametrize("name", [*CACHING, "TransformerLayer"])
def test_a_layer_leaves_memory_with_its_last_reference(name: str) -> None:
    """No circle of references holds it, and its gigabytes, until Python looks for garbage; nor do its scales stay."""
    make = CACHING.get(name, lambda: te.TransformerLayer(32, 32, 2, params_dtype=torch.bfloat16))
    gc.collect()
    gc.disable()
    try:
        layer = make()
        x = torch.randn(4, 2, 32, dtype=torch.bfloat16, requires_grad=True)
        for first in (True, False, None):
            with te.autocast(recipe=RECIPES[0]):
                y = layer(x, is_first_microbatch=first)
            y.sum().backward()
        parts = [weakref.ref(part) for part in layer.modules()]
        del layer, y
        assert [part() for part in parts if part() is not None] == []
    finally:
        gc.enable()
