"""`autocast`: where FP8 is on, and under which recipe.

The state is one object for the process: not thread-local and not a context variable, because autograd runs
CUDA's backward (and a checkpoint's recomputation) on a thread of its own.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from reference import scaling
from reference.recipe import DelayedScaling

__all__ = ["autocast", "fp8_autocast"]


@dataclass(frozen=True)
class AutocastState:
    """What a module reads when it runs forward."""

    enabled: bool = False
    calibrating: bool = False
    recipe: DelayedScaling = field(default_factory=DelayedScaling)
    group: Any = None


class _Process:
    """The current state, how many contexts are open, and whether an FP8 module has run in the outermost one."""

    def __init__(self) -> None:
        self.state = AutocastState()
        self.depth = 0
        self.first_module_pending = False


_PROCESS = _Process()


def current() -> AutocastState:
    """The innermost open context's settings."""
    return _PROCESS.state


def first_module_pending() -> bool:
    """True until the first FP8 module has run in an outermost context: its backward updates the gradients' scales."""
    return _PROCESS.first_module_pending


def take_first_module() -> None:
    """Note that the first FP8 module has run."""
    _PROCESS.first_module_pending = False


@contextlib.contextmanager
def restored(state: AutocastState) -> Iterator[None]:
    """Run with `state` and update nothing: a checkpoint's recomputation, the capture of a CUDA graph.

    The depth is raised so that a context opened inside is not an outermost one either.
    """
    outer, pending = _PROCESS.state, _PROCESS.first_module_pending
    _PROCESS.state, _PROCESS.first_module_pending = state, False
    _PROCESS.depth += 1
    try:
        yield
    finally:
        _PROCESS.state, _PROCESS.first_module_pending = outer, pending
        _PROCESS.depth -= 1


class autocast(contextlib.ContextDecorator):
    """Run the modules inside in FP8.

    When the outermost context ends, and it was enabled with gradients on, the scales of the forward tensors of
    every module are updated (`reference.scaling.update`). The gradients' scales are updated after the backward
    of the first FP8 module that ran forward.

    Args:
        enabled: FP8 on; off inside an enabled context runs those modules in their 16-bit form.
        calibrating: with FP8 off, still collect amaxes.
        recipe: a `DelayedScaling`; None is `DelayedScaling()`.
        amax_reduction_group: process group over which amaxes are maximised; None is the default group.

    A module that runs twice in one context keeps the larger of its amaxes.
    Source: Transformer Engine's `autocast`.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: DelayedScaling | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if recipe is not None and not isinstance(recipe, DelayedScaling):
            raise TypeError(f"autocast: recipe={recipe!r}; a recipe.DelayedScaling or None is accepted.")
        self._settings = AutocastState(
            enabled=bool(enabled),
            calibrating=bool(calibrating),
            recipe=DelayedScaling() if recipe is None else recipe,
            group=amax_reduction_group,
        )
        self._outer: list[AutocastState] = []

    def __enter__(self) -> "autocast":
        self._outer.append(_PROCESS.state)
        if _PROCESS.depth == 0:
            _PROCESS.first_module_pending = True
        _PROCESS.depth += 1
        _PROCESS.state = self._settings
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _PROCESS.state = self._outer.pop()
        _PROCESS.depth -= 1
        if _PROCESS.depth == 0 and self._settings.enabled and torch.is_grad_enabled():
            scaling.update(forward=True)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: DelayedScaling | None = None,
    fp8_group: Any = None,
) -> autocast:
    """`autocast` under its older name and argument names."""
    return autocast(enabled=enabled, calibrating=calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group)
