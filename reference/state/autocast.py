"""`autocast`: where FP8 is on, and under which recipe, in the thread that opened it (`reference.state.threads`)."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from reference.arguments import check_arguments, is_group
from reference.recipe import DelayedScaling, Recipe
from reference.state import scaling
from reference.state.threads import Thread, ThreadContextManager, close, here

__all__ = ["autocast", "fp8_autocast"]


@dataclass(frozen=True)
class AutocastState:
    """The settings that a module reads in its forward."""

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe = field(default_factory=DelayedScaling)
    group: Any = None


OFF = AutocastState()
_DEFAULT = DelayedScaling()  # frozen, so one serves all; checking a new one takes microseconds


def current() -> AutocastState:
    """The settings of this thread's innermost open context."""
    opened = here().autocasts
    found: AutocastState = opened[-1].settings if opened else OFF
    return found


@contextlib.contextmanager
def restored(state: AutocastState) -> Iterator[None]:
    """Run with `state` and update nothing, in a recomputation or the capture of a CUDA graph.

    A context opened inside is not an outermost one either.
    """
    thread, entry = here(), SimpleNamespace(settings=state)
    pending, thread.first_module_pending = thread.first_module_pending, False
    thread.autocasts.append(entry)
    try:
        yield
    finally:
        close(thread.autocasts, entry)
        thread.first_module_pending = pending


class autocast(ThreadContextManager):
    """Run the modules inside in FP8.

    When the outermost context of a thread ends without an error, and it was enabled with gradients on, the scales of
    the forward tensors of every module that last ran in the thread are updated (`reference.state.scaling.update`). The
    gradients' scales are updated after the backward of the first FP8 module that ran forward. A module that runs twice
    in one context keeps the larger of its amaxes.

    A context belongs to the thread that opened it. Contexts of a thread must end in reverse order; the one that ends
    too early raises RuntimeError.

    Args:
        enabled: FP8 on; off inside an enabled context runs those modules in 16 bits.
        calibrating: with FP8 off, still collect amaxes, for recipes that keep them; with FP8 on they are anyway.
        recipe: one of `te.recipe`, as it is now (its fields may be set later); None is `DelayedScaling()`. With FP8 and
            calibration off it is not read and may be any object.
        amax_reduction_group: process group over which amaxes are maximised, by a recipe that keeps them and has
            reduce_amax; None is the default group. Nothing else reads it, as in Transformer Engine, whose layers reduce
            over tp_group under current scaling: Megatron always gives it.
        _graph: only False is offered.

    Source: Transformer Engine's `autocast`.
    """

    what, where = "autocast", "autocasts"

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        if not (type(enabled) is type(calibrating) is bool and _graph is False):
            # Not locals(): a compiler of PyTorch 2.11 does not trace it.
            check_arguments("autocast", {"enabled": enabled, "calibrating": calibrating, "_graph": _graph})
        if not (enabled or calibrating or isinstance(recipe, Recipe)):
            recipe = None  # no layer reads it: a recipe that is not offered is accepted where it is not used
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"autocast: recipe={recipe!r}; a recipe of te.recipe or None is accepted.")
        if amax_reduction_group is not None and not is_group(amax_reduction_group):
            raise TypeError(
                f"autocast: amax_reduction_group={amax_reduction_group!r}; a process group or None is accepted."
            )
        recipe = (_DEFAULT if recipe is None else recipe).fixed
        self.settings = AutocastState(enabled, calibrating, recipe, amax_reduction_group)
        super().__init__()

    def begun(self, thread: Thread) -> None:
        if not thread.autocasts:
            thread.first_module_pending = True

    def ended(self, thread: Thread) -> None:
        if thread.autocasts or not self.settings.enabled or not torch.is_grad_enabled():
            return
        # Inside a backward pass it was opened in a recomputation, which records no amax.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            scaling.update(forward=True, thread=thread.number)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` under its older name and argument names."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
