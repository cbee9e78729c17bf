"""`torch.utils.checkpoint`, as Hugging Face's `gradient_checkpointing_enable` calls it: no bit changes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import reference as te

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": RECIPE, "current": te.recipe.Float8CurrentScaling(), "off": None}
Run = Callable[..., Any]
recomputed = functools.partial(checkpoint, use_reentrant=False)


def plain(function: Run, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = te.Linear(32, 64, params_dtype=BF16)
        self.b = te.Linear(64, 32, params_dtype=BF16)

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.b(torch.relu(self.a(x, **more)), **more)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "Block": Block,
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, params_dtype=BF16),
    "TransformerLayer": lambda: te.TransformerLayer(32, 64, 4, params_dtype=BF16),
}


def data(i: int) -> torch.Tensor:
    return ((torch.arange(8 * 2 * 32).reshape(8, 2, 32) * (7 + i)).remainder(13) - 5).to(BF16) * 0.25


def states(model: torch.nn.Module) -> list[torch.Tensor]:
    metas = [m.fp8_meta.get(key) for m in model.modules() if hasattr(m, "fp8_meta") for key in m.fp8_meta]
    return [t for meta in metas if hasattr(meta, "scale") for t in (meta.scale, meta.amax_history)]


def train(make: Callable[[], torch.nn.Module], run: Run, recipe: Any = RECIPE, **more: Any) -> list[torch.Tensor]:
    """Three steps: outputs, gradients and FP8 state after each, and torch's random state."""
    torch.manual_seed(0)
    model, results = make(), []
    for i in range(3):
        x = data(i).requires_grad_()
        model.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = run(model, x, **more)
        y.backward(data(i + 3) * 1e-3)
        results += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
        results += [t.clone() for t in states(model)]
    return [*results, torch.get_rng_state()]


@pytest.mark.sample(6)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_changes(name: str, recipe: str, early: bool, same_bits: Any) -> None:
    expected = train(MODELS[name], plain, RECIPES[recipe])
    with set_checkpoint_early_stop(early):
        found = train(MODELS[name], recomputed, RECIPES[recipe])
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        same_bits(a, b, f"result {i}")


def test_masks_do_not_depend_on_the_random_state_that_pytorch_preserves(same_bits: Any) -> None:
    """Without it the recomputation draws other seeds, but its masks are those of the first run."""
    expected = train(MODELS["TransformerLayer"], plain)
    found = train(MODELS["TransformerLayer"], recomputed, preserve_rng_state=False)
    count = (len(expected) - 1) // 3  # later steps draw other seeds
    for a, b in zip(found[:count], expected[:count], strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("recipe", [RECIPE, te.recipe.Float8CurrentScaling(), te.recipe.Float8BlockScaling()], ids=str)
def test_weights_that_are_kept_in_fp8(recipe: Any, same_bits: Any) -> None:
    def make() -> torch.nn.Module:
        with te.quantized_model_init(recipe=recipe):
            return te.LayerNormMLP(32, 64, params_dtype=BF16)

    for a, b in zip(train(make, recomputed, recipe), train(make, plain, recipe), strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("first", [True, False, None])
def test_microbatches(first: bool | None, same_bits: Any) -> None:
    more = {"is_first_microbatch": first}
    for a, b in zip(train(Block, recomputed, **more), train(Block, plain, **more), strict=True):
        same_bits(a, b)


def inside(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One autocast around a part, and one that is off around another."""
    with te.autocast(recipe=RECIPE):
        x = model.a(x)  # type: ignore[operator]
    with te.autocast(enabled=False):
        return model.b(x)  # type: ignore[operator]


def test_autocasts_inside_the_function_update_once(same_bits: Any) -> None:
    def run(wrap: Run) -> list[torch.Tensor]:
        return train(Block, lambda model, x: wrap(inside, model, x), None)

    for a, b in zip(run(recomputed), run(plain), strict=True):
        same_bits(a, b)


def test_a_module_used_twice_and_one_checkpoint_per_layer(same_bits: Any) -> None:
    def twice(wrap: Run) -> Run:
        return lambda model, x: wrap(lambda t: model.b(model.a(model.b(model.a(t)))), x)

    def each(wrap: Run) -> Run:
        return lambda model, x: wrap(model.b, torch.relu(wrap(model.a, x)))

    for how in (twice, each):
        for a, b in zip(train(Block, how(recomputed)), train(Block, how(plain)), strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_that_is_kept_goes_backward_twice(recipe: str, same_bits: Any) -> None:
    results = []
    for run in (plain, recomputed):
        torch.manual_seed(0)
        model, settings = Block(), RECIPES[recipe]
        for i in range(3):
            x = data(i).requires_grad_()
            with te.autocast(enabled=settings is not None, recipe=settings):
                y = run(model, x)
            y.sum().backward(retain_graph=True)
            y.backward(data(i + 1) * 1e-2)
        results.append([x.grad, *(p.grad for p in model.parameters()), *states(model)])
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


def test_memory_is_really_given_back() -> None:
    model, x = Block(), data(0).requires_grad_()
    with te.autocast(recipe=RECIPE):
        y = recomputed(model, x)
    held = [t for t in y.grad_fn.next_functions if "SavedTensor" in type(t[0]).__name__]
    assert not held
    before = [t.clone() for t in states(model)]
    y.sum().backward()
    with te.autocast(recipe=RECIPE):
        model(x)
    assert any(not torch.equal(a, b) for a, b in zip(before, states(model), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"return_layernorm_output": True, "return_bias": True}])
def test_layernorm_mlps_own_checkpoint(recipe: str, options: dict[str, bool], same_bits: Any) -> None:
    """`LayerNormMLP(checkpoint=True)` saves its input only; no bit changes."""

    def model(on: bool) -> torch.nn.Module:
        return te.LayerNormMLP(32, 64, params_dtype=BF16, checkpoint=on, activation="swiglu", **options)

    def run(layer: torch.nn.Module, x: torch.Tensor, **more: Any) -> torch.Tensor:
        y = layer(x, **more)
        return y if not options else y[0] + y[1] + y[2]

    results = [train(functools.partial(model, on), run, RECIPES[recipe]) for on in (True, False)]
    for a, b in zip(*results, strict=True):
        same_bits(a, b)
    saved: list[int] = []
    for on in (True, False):
        layer, kept = model(on), []
        x = data(0).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            run(layer, x)
        saved.append(len(kept))
    assert saved[0] < saved[1]


@pytest.mark.parametrize("name", ["off", "delayed"])
def test_a_transformer_layer_whose_mlp_checkpoints(name: str, same_bits: Any) -> None:
    def model(on: bool) -> torch.nn.Module:
        layer = MODELS["TransformerLayer"]()
        layer.layernorm_mlp.checkpoint = on  # type: ignore[union-attr]
        return layer

    results = [train(functools.partial(model, on), plain, RECIPES[name]) for on in (True, False)]
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


# --- one inside another, and what is refused -------------------------------------------------------------


def under_other_hooks(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return model(x)


COMBINED: dict[str, Run] = {
    "nested": lambda model, x: recomputed(lambda t: recomputed(model, t), x),
    "ours inside": lambda model, x: recomputed(lambda t: te.checkpoint(model, t), x),
    "other hooks": lambda model, x: recomputed(under_other_hooks, model, x),
}


@pytest.mark.parametrize("how", COMBINED)
def test_one_inside_another(how: str, same_bits: Any) -> None:
    """Where PyTorch's stops as soon as it has what it needs, the outer one recomputes no FP8 module."""
    for a, b in zip(train(Block, COMBINED[how]), train(Block, plain), strict=True):
        same_bits(a, b)


REFUSED = r"Linear ran in FP8 and is being recomputed by torch\.utils\.checkpoint with use_reentrant=True, nested"


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: checkpoint(model, x, use_reentrant=True),
        lambda model, x: recomputed(lambda t: model.b(recomputed(model.a, t)), x),
        lambda model, x: recomputed(lambda t: model.b(te.checkpoint(model.a, t)), x),
        lambda model, x: te.checkpoint(lambda t: recomputed(model, t), x),
    ],
    ids=["reentrant", "nested", "ours inside", "in ours"],
)
# PyTorch 2.11 does not end a nested checkpoint's generator properly when an error passes through it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_be_recomputed_is_refused(run: Run) -> None:
    model, x = Block(), data(0).requires_grad_()
    with te.autocast(recipe=RECIPE):
        y = run(model, x)
    with pytest.raises(RuntimeError, match=REFUSED):
        y.sum().backward()


def test_reentrant_checkpoints_work_in_16_bits(same_bits: Any) -> None:
    run = functools.partial(checkpoint, use_reentrant=True)
    for a, b in zip(train(Block, run, None), train(Block, plain, None), strict=True):
        same_bits(a, b)


def test_a_function_that_does_more_when_recomputed_is_refused() -> None:
    model, x, runs = Block(), data(0).requires_grad_(), []

    def function(t: torch.Tensor) -> torch.Tensor:
        runs.append(0)
        return model.a(t) if len(runs) == 1 else model.a(model.b(model.a(t)))

    with te.autocast(recipe=RECIPE), set_checkpoint_early_stop(False):
        y = recomputed(function, x, determinism_check="none")
    with pytest.raises(RuntimeError, match=r"Linear runs more often when recomputed \(1 times\) than in the first run"):
        y.sum().backward()


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_hugging_face_model(same_bits: Any) -> None:
    transformers = pytest.importorskip("transformers")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig
        supports_gradient_checkpointing = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layers = torch.nn.ModuleList(MODELS["TransformerLayer"]() for _ in range(2))
            self.gradient_checkpointing = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if self.gradient_checkpointing and self.training:
                    x = self._gradient_checkpointing_func(layer.__call__, x)
                else:
                    x = layer(x)
            return x

    def make(on: bool) -> Any:
        model = Model(transformers.PretrainedConfig()).train()
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            assert model.gradient_checkpointing
        return model

    found = train(functools.partial(make, True), plain)
    for a, b in zip(found, train(functools.partial(make, False), plain), strict=True):
        same_bits(a, b)
