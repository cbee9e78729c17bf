"""What stands between a model's layers and their runner while somebody looks on: statistics, recordings.

Every layer's forward and backward passes by the runner of `reference.nn.core.autograd`. A hook takes the runner's place
and hands it what it does not look at. When it is removed the former runner is back: a hook costs nothing while it is
not installed, and no tape of `optimized.tapes` knows of it. Hooks stand in a chain, the latest first, and each of them
sees every pair, whatever the others look at. They may be removed in any order, and in any thread.
"""

import copy
import threading
from collections.abc import Mapping
from typing import Any

import torch

from reference.nn.core import autograd
from reference.nn.core.autograd import Backward, Context, Forward, Runner
from reference.nn.core.context import ModuleContext
from reference.support.nested import Tensors

_chain = threading.Lock()
_plain = Runner()


class ObservedContext(ModuleContext):
    """A context whose quantizers show what they do, so that its pair must run op by op, and not from a tape."""

    __slots__ = ()

    @staticmethod
    def of(context: ModuleContext, quantizers: Mapping[str, Any]) -> "ObservedContext":
        """A copy of a context with these quantizers of its roles."""
        found: Any = copy.copy(context)
        found.__class__ = ObservedContext
        shown = found._precision.with_quantizers(quantizers)
        found._precision, found.quantizers, found.gemms = shown, shown.quantizers, shown.gemms
        return found  # type: ignore[no-any-return]


def observed(context: Context) -> bool:
    """Whether a hook has exchanged quantizers of it."""
    return any(isinstance(one, ObservedContext) for one in context.modules)


class Hook(Runner):
    """Hands everything on; subclasses look at it.

    Attributes:
        names: the modules of the model, with their names in it ("" is the model itself).
        installed: whether it stands in the chain.
        inner: what it hands on to: the runner, or an earlier hook. A removed hook keeps it for threads that run it.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.names = {} if model is None else {module: name for name, module in model.named_modules()}
        self.installed = False
        self.inner: Runner = _plain

    def install(self) -> None:
        """Take the runner's place, in every thread: autograd runs backward on CUDA in one of its own."""
        with _chain:
            self.inner, self.installed = autograd.runner, True
            autograd.register(self)

    def remove(self) -> None:
        """Give it back. Hooks that were installed later stay."""
        with _chain:
            self.installed = False
            outer = autograd.runner
            if outer is self:
                autograd.register(self.inner)
                return
            while isinstance(outer, Hook) and outer.inner is not self:
                outer = outer.inner
            if isinstance(outer, Hook):
                outer.inner = self.inner

    def layers(self, context: Context) -> list[str]:
        """Names of the model's layers whose GEMMs a pair computes."""
        return [self.names[one.module] for one in context.modules if one.module in self.names]

    def _next(self, context: Context) -> Runner:
        """Who runs a pair next. The usual runner would play from a tape what a hook wants to see run."""
        inner = self.inner
        return inner if isinstance(inner, Hook) or not observed(context) else _plain

    def prepare(self, function: Forward, plan: Any, context: Context, tensors: Tensors, backward: Backward) -> None:
        self.inner.prepare(function, plan, context, tensors, backward)

    def forward(
        self, function: Forward, plan: Any, context: Context, tensors: Tensors, backward: Backward
    ) -> tuple[Any, Tensors, Any]:
        return self._next(context).forward(function, plan, context, tensors, backward)

    def backward(
        self, function: Backward, plan: Any, context: Context, saved: Tensors, grads: Tensors, note: Any
    ) -> Tensors:
        return self._next(context).backward(function, plan, context, saved, grads, note)
