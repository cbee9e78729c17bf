"""Recomputation and offloading after an error: the next step is as if there had been none."""

import contextlib
from typing import Any

import pytest
import torch

import reference as te
from reference.memory import offload
from reference.state import autocast
from reference.state.threads import here


def test_a_recomputation_that_cannot_begin_leaves_its_thread_as_it_was() -> None:
    """The user's own context refuses, in backward."""
    model = te.Linear(16, 16)
    refusals: list[int] = []

    @contextlib.contextmanager
    def refuses() -> Any:
        refusals.append(1)
        raise RuntimeError("not now")
        yield

    x = torch.randn(4, 16, requires_grad=True)
    with te.autocast(recipe=te.DelayedScaling()):
        y = te.checkpoint(model, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), refuses()))
    with pytest.raises(RuntimeError, match="not now"):
        y.sum().backward()
    assert refusals
    assert not here().recomputations
    assert not here().autocasts
    assert not autocast.current().enabled


def test_a_recomputation_that_cannot_end_leaves_its_thread_as_it_was() -> None:
    class Refuses(contextlib.AbstractContextManager[None]):
        def __exit__(self, *error: Any) -> None:
            raise RuntimeError("not now")

    x = torch.randn(4, 16, requires_grad=True)
    with te.autocast(recipe=te.DelayedScaling()):
        y = te.checkpoint(
            te.Linear(16, 16), x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), Refuses())
        )
    with pytest.raises(RuntimeError, match="not now"):
        y.sum().backward()
    assert not here().recomputations
    assert not here().autocasts


def test_offloading_begins_with_the_first_layer_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer fails, or PyTorch refuses hooks there; the step after it moves what any step moves."""
    monkeypatch.setattr(offload, "_moves", lambda t, _: not isinstance(t, torch.nn.Parameter))
    moved: list[str] = []
    whole = offload._Kept.__init__

    def noted(self: Any, t: torch.Tensor) -> None:
        moved.append(name)
        whole(self, t)

    monkeypatch.setattr(offload._Kept, "__init__", noted)
    context, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
    layers = {name: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for name in "abc"}
    x = torch.randn(2, 4)
    name = "a"
    with pytest.raises(ValueError, match="in the layer"), context:
        raise ValueError("in the layer")
    with (
        pytest.raises(RuntimeError, match="no hooks here"),
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        context,
    ):
        layers["a"](x)
    for _ in range(2):
        moved.clear()
        y = x
        for name in layers:
            with context:
                y = layers[name](y)
            y = synchronize(y)
        y.sum().backward()
        assert set(moved) == {"a"}
