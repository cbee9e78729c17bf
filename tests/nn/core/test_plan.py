"""A plan is all that a pair's launches depend on besides tensors: whatever public attribute changes between two calls.

Every forward and backward of a layer passes by a runner that remembers what came out of which plan, inputs and state,
and fails where the same come with other results. That is what a tape (optimized/tapes) would have played.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.plan_cases import LAYERS, RECIPES, attributes, step

import reference as te
from reference.nn.core import autograd


class Remembering(autograd.Runner):
    """Runs pairs, and compares what comes out with what came out of the same before."""

    def __init__(self) -> None:
        self.seen: dict[Any, list[bytes]] = {}
        self.repeated = 0

    def _check(self, function: Any, plan: Any, context: Any, inputs: Any, backward: bool, run: Any) -> Any:
        state, _ = context.state(backward)
        key = (function, plan, *(_words(t) for t in (*inputs, *state)))
        found = run()
        words = [_words(t) for t in torch.utils._pytree.tree_leaves(found) if t is None or isinstance(t, torch.Tensor)]
        if context.playable:
            self.repeated += key in self.seen
            assert self.seen.setdefault(key, words) == words, (
                f"{function.__module__}: the same plan, other results: {plan}"
            )
        return found

    def forward(self, function: Any, plan: Any, context: Any, tensors: Any, backward: Any) -> Any:
        usual = super().forward
        flat = [t for x in tensors for t in (x if isinstance(x, tuple) else (x,))]
        return self._check(
            function, plan, context, flat, False, lambda: usual(function, plan, context, tensors, backward)
        )

    def backward(self, function: Any, plan: Any, context: Any, saved: Any, grads: Any, note: Any) -> Any:
        usual = super().backward
        run = lambda: usual(function, plan, context, saved, grads, note)  # noqa: E731
        return self._check(function, plan, context, (*saved, *grads), True, run)


def _words(t: Any) -> Any:
    if not isinstance(t, torch.Tensor):
        return t
    return t.dtype, t.shape, t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""


@pytest.fixture
def runner() -> Iterator[Remembering]:
    before = autograd.runner
    made = Remembering()
    autograd.register(made)
    yield made
    autograd.register(before)


@pytest.mark.sample(1)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", LAYERS)
@given(data=st.data())
def test_equal_plans_have_equal_results(name: str, runner: Remembering, data: st.DataObject) -> None:
    runner.seen.clear()
    torch.manual_seed(1)
    layer = LAYERS[name](te)
    recipe = data.draw(st.sampled_from([None, *RECIPES]))
    step(layer, recipe, 3)
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    for where, key, values in data.draw(st.lists(st.sampled_from(attributes(layer)), min_size=1, max_size=4)):
        part = layer.get_submodule(where)
        changed.append((part, key, getattr(part, key)))
        setattr(part, key, data.draw(st.sampled_from(values)))
        for one in (recipe, data.draw(st.sampled_from([None, *RECIPES])), recipe):
            try:
                step(layer, one, 3)
            except AssertionError:
                raise
            except Exception:  # a value that the layer refuses, now or later, or that does not fit its tensors
                while changed:
                    setattr(*changed.pop())
    runner.repeated = 0
    step(layer, recipe, 3)
    step(layer, recipe, 3)
    assert runner.repeated > 0, "equal steps are the same to it"


def test_it_would_notice_an_attribute_that_no_plan_has(runner: Remembering, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm whose plan always says the same eps."""
    from reference.nn.layers import layernorm

    layer = LAYERS["LayerNorm"](te)
    step(layer, None, 3)
    usual = layernorm.twin.norm
    monkeypatch.setattr(layernorm.twin, "norm", lambda x, w, b, eps, *rest: usual(x, w, b, layer.eps, *rest))
    monkeypatch.setattr(layernorm, "norm_plan", lambda layer: layernorm.NormPlan(1e-5, False, "layernorm"))
    layer.eps = 1.0
    with pytest.raises(AssertionError, match="the same plan, other results"):
        step(layer, None, 3)
