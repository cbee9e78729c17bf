"""`make_graphed_callables`: replays have the bits of eager mode, and FP8 state moves only in training steps."""

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.graph_cases import (
    BF16,
    HIDDEN,
    RECIPE,
    RECIPES,
    pretended,  # noqa: F401  (a fixture)
    state,
)

import reference as te
from reference.graphs import graphed_module
from reference.state import scaling
from reference.state.threads import here
from reference.support.nested import tensors_of


def train(
    modules: tuple[torch.nn.Module, ...], device: str, recipe: te.recipe.Recipe | None, steps: int
) -> list[torch.Tensor]:
    """Every output, gradient and state of `steps` steps through a chain of modules, two backward passes each."""
    seen: list[torch.Tensor] = []
    numbers = torch.Generator().manual_seed(3)
    torch.manual_seed(4)  # of the masks
    for step in range(steps):
        for module in modules:
            module.zero_grad(set_to_none=True)
        for _ in range(2):
            x = torch.randn(4, 2, HIDDEN, generator=numbers).to(device, BF16).requires_grad_()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = x * 2.0**step
                for module in modules:
                    y = module(y)
            y.backward(torch.full_like(y, 2.0**-step))
            seen += [y.clone(), x.grad.clone(), *(t for module in modules for t in state(module))]
        with torch.no_grad():
            for p in (p for module in modules for p in module.parameters()):
                seen.append(p.grad.clone())
                p.copy_(p - p.grad * 0.125)
    return seen


def chain(package: Any) -> tuple[torch.nn.Module, ...]:
    torch.manual_seed(2)
    first = package.TransformerLayer(HIDDEN, 64, 2, params_dtype=BF16)
    return first, package.LayerNormLinear(HIDDEN, HIDDEN, params_dtype=BF16)


def compare(modules: tuple[torch.nn.Module, ...], device: str, recipe: te.recipe.Recipe | None) -> None:
    eager = copy.deepcopy(modules)
    samples = tuple((torch.randn(4, 2, HIDDEN, device=device, dtype=BF16, requires_grad=True),) for _ in modules)
    before = [t for module in modules for t in state(module)]
    graphed = te.make_graphed_callables(modules, samples, enabled=recipe is not None, recipe=recipe)
    after = [t for module in modules for t in state(module)]
    assert all(t.eq(1 if t.dim() == 1 else 0).all() for t in after if t.dtype == torch.float32)
    for a, b in zip(before, (t for t in after if t.dtype == torch.int64), strict=True):
        assert_same_bits(a, b, "random state after capture")
    expected, actual = train(eager, device, recipe, 4), train(graphed, device, recipe, 4)
    for position, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert_same_bits(a, b, f"tensor {position} of {len(expected)}")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_replays_the_bits_of_eager_mode(recipe: str) -> None:
    import optimized

    compare(chain(optimized), "cuda", RECIPES[recipe])


@pytest.mark.sample(2)
@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("recipe", RECIPES)
def test_warm_up_changes_no_state_and_replays_update_the_scales(recipe: str) -> None:
    compare(chain(te), "cpu", RECIPES[recipe])


def microbatches(modules: tuple[torch.nn.Module, ...], device: str, recipe: te.recipe.Recipe) -> list[torch.Tensor]:
    """Every output, gradient and state of three steps of three microbatches; weights are cast in each first one."""
    seen: list[torch.Tensor] = []
    numbers = torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    for step in range(3):
        for module in modules:
            module.zero_grad(set_to_none=True)
        for n in range(3):
            if step == 1 and n == 1:  # drops the copies: the next microbatch casts weights although it is no first one
                modules[0].load_state_dict(modules[0].state_dict())
            x = torch.randn(4, 2, HIDDEN, generator=numbers).to(device, BF16).requires_grad_()
            with te.autocast(recipe=recipe):
                y = x
                for module in modules:
                    y = module(y, is_first_microbatch=n == 0)
            y.backward(torch.full_like(y, 2.0**-n))
            with torch.no_grad():  # a weight changes in between: nobody sees it before the next step
                modules[1].weight.mul_(0.5 if n == 0 else 1.0)
            seen += [y.clone(), x.grad.clone(), *(t for module in modules for t in state(module))]
        with torch.no_grad():
            for p in (p for module in modules for p in module.parameters()):
                seen.append(p.grad.clone())
                p.copy_(p - p.grad * 0.125)
    return seen


def compare_caches(modules: tuple[torch.nn.Module, ...], device: str, recipe: te.recipe.Recipe) -> None:
    eager = copy.deepcopy(modules)
    samples = tuple((torch.randn(4, 2, HIDDEN, device=device, dtype=BF16, requires_grad=True),) for _ in modules)
    te.make_graphed_callables(modules, samples, enabled=True, recipe=recipe, cache_quantized_params=True)
    expected = microbatches(eager, device, recipe)
    for position, (a, b) in enumerate(zip(expected, microbatches(modules, device, recipe), strict=True)):
        assert_same_bits(a, b, f"tensor {position} of {len(expected)}")


FP8 = {name: recipe for name, recipe in RECIPES.items() if recipe is not None}


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", FP8)
def test_a_graph_reads_cached_weights(recipe: str) -> None:
    import optimized

    compare_caches(chain(optimized), "cuda", FP8[recipe])


@pytest.mark.slow
@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("recipe", [name for name in FP8 if name != "delayed"])  # which the next test has
def test_a_pretended_graph_reads_cached_weights(recipe: str) -> None:
    compare_caches(chain(te), "cpu", FP8[recipe])


def copies(module: torch.nn.Module) -> list[int]:
    """Where the FP8 copies of its weights lie."""
    found = [one for m in module.modules() if hasattr(m, "_store") for one in m._store.casts.values()]
    return sorted({t.data_ptr() for one in found for t in tensors_of(one)})


@pytest.mark.usefixtures("pretended")
def test_cached_weights_are_cast_where_they_lie() -> None:
    """A replay takes the copies of the first microbatch, which stay where the graph has found them."""
    compare_caches(chain(te), "cpu", RECIPE)
    modules = chain(te)
    x = torch.randn(4, 2, HIDDEN, dtype=BF16, requires_grad=True)
    sample = ((x,), (x,))
    te.make_graphed_callables(modules, sample, fp8_enabled=True, fp8_recipe=RECIPE, fp8_weight_caching=True)
    assert not any(copies(module) for module in modules)  # as before: the next call casts, whatever it says
    assert all(
        t.eq(1 if t.dim() == 1 else 0).all() for module in modules for t in state(module) if t.is_floating_point()
    )
    places = []
    for first in (True, False, True, False):
        with te.autocast(recipe=RECIPE):
            modules[1](modules[0](x, is_first_microbatch=first), is_first_microbatch=first)
        places.append([place for module in modules for place in copies(module)])
    assert len(places[0]) == 3 * 5
    assert all(one == places[0] for one in places)


@pytest.mark.usefixtures("pretended")
def test_modules_that_take_no_is_first_microbatch_can_cache() -> None:
    """As in Transformer Engine the callable takes it, whatever its module takes; in 16 bits it means nothing."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(te.Linear(HIDDEN, 16, params_dtype=BF16), te.LayerNormMLP(16, 32, params_dtype=BF16))
    eager, x = copy.deepcopy(model), torch.randn(16, HIDDEN, dtype=BF16)
    te.make_graphed_callables(model, (x,), enabled=True, recipe=RECIPE, cache_quantized_params=True)
    with te.autocast(recipe=RECIPE):
        assert_same_bits(model(x, is_first_microbatch=True), eager(x))
        with torch.no_grad():
            model[0].weight.zero_()
        assert_same_bits(model(x, is_first_microbatch=False), eager(x))
        assert not torch.equal(model(x, is_first_microbatch=True), eager(x))
        for missing in ({}, {"is_first_microbatch": None}):
            with pytest.raises(
                TypeError, match=r"Sequential: is_first_microbatch=None; True and False are accepted: its"
            ):
                model(x, **missing)
    plain, x = te.Linear(HIDDEN, 16, params_dtype=BF16), torch.randn(4, HIDDEN, dtype=BF16)
    expected = plain(x)
    te.make_graphed_callables(plain, (x,), cache_quantized_params=True)
    assert_same_bits(plain(x, is_first_microbatch=True), expected)
    fused = te.Linear(HIDDEN, 16, params_dtype=BF16, fuse_wgrad_accumulation=True)
    with pytest.raises(NotImplementedError, match="cache_quantized_params=True with a layer with fuse_wgrad_accumulat"):
        te.make_graphed_callables(fused, (x,), enabled=True, cache_quantized_params=True)


@pytest.mark.usefixtures("pretended")
def test_a_graph_whose_fp8_state_was_replaced_is_refused() -> None:
    x = torch.randn(4, HIDDEN, dtype=BF16)
    layer = te.make_graphed_callables(te.Linear(HIDDEN, 16, params_dtype=BF16), (x,), enabled=True, recipe=RECIPE)
    with te.autocast(recipe=RECIPE):
        layer(x)
    layer.load_state_dict(layer.state_dict())
    with te.autocast(recipe=RECIPE):
        layer(x)
    layer.fp8_meta["scaling_fwd"].resize(7)
    with te.autocast(recipe=RECIPE), pytest.raises(RuntimeError, match="Linear: its FP8 state has moved since"):
        layer(x)


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_graph_that_reads_no_fp8_state_goes_on_after_a_checkpoint(recipe: str) -> None:
    """A checkpoint always has an FP8 state, which a recipe without one does not read."""
    x = torch.randn(4, HIDDEN, dtype=BF16)
    eager = te.Linear(HIDDEN, 16, params_dtype=BF16)
    layer = te.make_graphed_callables(copy.deepcopy(eager), (x,), enabled=True, recipe=RECIPES[recipe])
    layer.load_state_dict(eager.state_dict())
    with te.autocast(recipe=RECIPES[recipe]):
        assert_same_bits(layer(x), eager(x))


@pytest.mark.usefixtures("pretended")
def test_gradients_scales_are_updated_by_the_first_module_that_has_a_backward() -> None:
    x = torch.randn(4, HIDDEN, dtype=BF16)
    layer = te.make_graphed_callables(te.Linear(HIDDEN, 16, params_dtype=BF16), (x,), enabled=True, recipe=RECIPE)
    with te.autocast(recipe=RECIPE):
        with torch.no_grad():
            layer(x)
        assert here().first_module_pending
        layer(x)
        assert not here().first_module_pending


@pytest.mark.usefixtures("pretended")
def test_a_replay_joins_the_autocast_as_its_layers_would(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, HIDDEN, dtype=BF16)
    layer = te.make_graphed_callables(te.Linear(HIDDEN, 16, params_dtype=BF16), (x,), enabled=True, recipe=RECIPE)
    joined: list[Any] = []
    watched = SimpleNamespace(**{**vars(scaling), "join": lambda *given: joined.append(given)})
    monkeypatch.setattr(graphed_module, "scaling", watched)
    with te.autocast(recipe=RECIPE):
        layer(x)
    assert joined == [(layer, RECIPE, None)]


@pytest.mark.usefixtures("pretended")
def test_a_call_that_wants_another_graph_is_refused() -> None:
    x = torch.randn(4, HIDDEN, dtype=BF16)
    layer = te.make_graphed_callables(te.Linear(HIDDEN, 16, params_dtype=BF16), (x,), fp8_enabled=True)
    with pytest.raises(RuntimeError, match="Linear: its CUDA graph was captured with enabled=True and is called with "):
        layer(x)
    with te.autocast(recipe=RECIPE), pytest.raises(RuntimeError, match="captured with recipe=DelayedScaling"):
        layer(x)
    with te.autocast(), pytest.raises(TypeError, match="captured with keywords"):
        layer(x, is_first_microbatch=True)
    assert layer.eval()(x).dtype == BF16  # without a graph, as it is


@pytest.mark.usefixtures("pretended")
def test_tensors_by_keyword_change_from_call_to_call() -> None:
    x = torch.randn(4, 2, HIDDEN, dtype=BF16, requires_grad=True)
    hidden = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
    layer = te.MultiheadAttention(HIDDEN, 2, attention_dropout=0.0, attn_mask_type="padding", params_dtype=BF16)
    eager = copy.deepcopy(layer)
    te.make_graphed_callables(layer, (x,), sample_kwargs={"attention_mask": hidden, "attn_mask_type": "padding"})
    other = hidden.clone()
    other[1, ..., 2:] = True
    assert_same_bits(layer(x, attention_mask=other), eager(x, attention_mask=other))
    assert not torch.equal(layer(x, attention_mask=other), eager(x, attention_mask=hidden))


def test_on_a_cpu_modules_come_back_unchanged_with_one_notice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reference.support.notice._said", set())
    layer, x = te.Linear(HIDDEN, 16), torch.randn(4, HIDDEN)
    with caplog.at_level(logging.WARNING, logger="twin"):
        assert te.make_graphed_callables(layer, (x,), enabled=True) is layer
        assert te.make_graphed_callables((layer, layer), ((x,), (x,))) == (layer, layer)
    assert [r.message for r in caplog.records] == [
        "make_graphed_callables: on a CPU there is nothing to capture; the modules run as they are (said once)."
    ]
    assert "forward" not in vars(layer)
    assert layer.fp8_meta == {}


def test_a_list_is_a_tuple() -> None:
    layers = [te.Linear(16, 16), te.Linear(16, 16)]
    found = te.make_graphed_callables(layers, [(torch.randn(2, 16),), (torch.randn(2, 16),)])
    assert found == tuple(layers)


@pytest.mark.parametrize("_as", [tuple, list])
def test_samples_are_tuples_or_lists(_as: Callable[..., Any]) -> None:
    layer, x = te.Linear(16, 16), torch.randn(2, 16)
    assert te.make_graphed_callables(layer, _as([x])) is layer
    assert te.make_graphed_callables((layer,), _as([_as([x])])) == (layer,)
    layer.reset()  # frees nothing on a CPU


@pytest.mark.gpu
def test_reset_frees_the_graphs_and_the_module_runs_without_them() -> None:
    import optimized

    layers, x = chain(optimized), torch.randn(4, 2, HIDDEN, device="cuda", dtype=BF16, requires_grad=True)
    eager = copy.deepcopy(layers)
    te.make_graphed_callables(layers, ((x,), (x,)))
    graphs = [one for layer in layers for one in layer.forward.__self__.graphs]
    assert len(graphs) == 4
    for layer in layers:
        layer.reset()
        assert "forward" not in vars(layer)
    for one in graphs:
        with pytest.raises(RuntimeError, match="replay"):
            one.replay()
    for layer, other in zip(layers, eager, strict=True):
        torch.manual_seed(1)
        y = layer(x)
        torch.manual_seed(1)
        assert_same_bits(y, other(x))


@pytest.mark.usefixtures("pretended")
def test_a_module_whose_graph_was_reset_is_as_before() -> None:
    layer, x = te.Linear(HIDDEN, 16), torch.randn(4, HIDDEN)
    te.make_graphed_callables(layer, [x])
    assert "forward" in vars(layer)
    layer.reset()
    assert "forward" not in vars(layer)
    assert torch.equal(layer(x), copy.deepcopy(layer)(x))


@pytest.mark.gpu
def test_a_layer_that_runs_twice_in_one_graph_draws_twice() -> None:
    import optimized

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = optimized.TransformerLayer(HIDDEN, 64, 2, params_dtype=BF16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(te.checkpoint(self.layer, x))
            return out

    torch.manual_seed(2)
    compare((Twice(),), "cuda", RECIPE)


@pytest.mark.parametrize(
    ("error", "sentence", "arguments"),
    [
        (ValueError, "enabled and fp8_enabled, its older name, are given", {"enabled": True, "fp8_enabled": True}),
        (TypeError, "fp8_weight_caching=1; None, True and False are accepted", {"fp8_weight_caching": 1}),
        (TypeError, "retain_graph_in_backward=1; True and False", {"retain_graph_in_backward": 1}),
        (TypeError, "pre_warmup_hook=3; None or a function", {"pre_warmup_hook": 3}),
        (ValueError, r"capture_time_hooks=\[\] for 1 modules; None, or a list", {"capture_time_hooks": []}),
        (ValueError, r"capture_time_hooks\[0\]={'other': {}}; None, or a", {"capture_time_hooks": [{"other": {}}]}),
        (
            ValueError,
            r"capture_time_hooks\[0\]={'forward_hooks': \[\]}; None, or",
            {"capture_time_hooks": [{"forward_hooks": []}]},
        ),
        (ValueError, r"_order=\[1, 1\]; a list of chunks from 1 on", {"_order": [1, 1]}),
        (ValueError, r"_order=\[-1, 1\]; a list of chunks from 1 on", {"_order": [-1, 1]}),
        (ValueError, r"_order=\[1, 3, -3, -1\]; a list of chunks from 1 on", {"_order": [1, 3, -3, -1]}),
        (NotImplementedError, r"_order=\[1, -1, -1.5\] has half steps", {"_order": [1, -1, -1.5]}),
        (ValueError, r"_order=\[1, -1.2\]; a list of chunks", {"_order": [1, -1.2]}),
        (ValueError, r"_order=True; a list of chunks", {"_order": True}),
        (
            ValueError,
            "_num_layers_per_chunk=2 for 1 chunks in _order and 1 modules; None",
            {"_order": [1, -1], "_num_layers_per_chunk": 2},
        ),
        (
            ValueError,
            "sample_args has 1 entries for 1 modules and 2 microbatches in _order; 2 are",
            {"_order": [1, -1] * 2},
        ),
        (
            ValueError,
            "_reuse_graph_input_output_buffers=True with _order=None, where nothing reads it; False is accepted",
            {"_reuse_graph_input_output_buffers": True},
        ),
        (
            ValueError,
            r"_num_layers_per_chunk=\[1\] with _order=None, where nothing reads it; None is accepted, or an _order",
            {"_num_layers_per_chunk": [1]},
        ),
        (ValueError, "enabled has 2 entries for 1 modules", {"enabled": (True, False)}),
        (TypeError, "sample_args=1; a tuple of tensors", {"sample_args": 1}),
        (TypeError, "modules=3; a module, or a tuple or list of them", {"modules": 3}),
        (ValueError, "sample_args has 0 entries for 1 modules", {"modules": (te.Linear(16, 16),), "sample_args": ()}),
    ],
)
def test_refusals(error: type[Exception], sentence: str, arguments: dict[str, Any]) -> None:
    given = {"modules": te.Linear(16, 16), "sample_args": (torch.randn(2, 16),)} | arguments
    with pytest.raises(error, match=sentence):
        te.make_graphed_callables(**given)
