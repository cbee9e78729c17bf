"""What stands between a model's layers and their player while somebody looks on: statistics, anomalies.

Every layer's forward and backward passes by the player of `reference.nn.autograd`. A hook takes the player's place and
hands it what it does not look at. When it is removed the former player is back: a hook costs nothing while it is not
installed, and no tape of `optimized.replay` knows of it.
"""

from typing import Any

import torch

from reference.nn import autograd
from reference.nn.autograd import Backward, Context, Forward, Plain
from reference.nn.context import Saved


class Hook(Plain):
    """Hands everything on; subclasses look at it.

    Attributes:
        names: the modules of the model, with their names in it ("" is the model itself).
        inner: the player, or another hook, that it has replaced; None while it is not installed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.inner: Plain | None = None

    @property
    def installed(self) -> bool:
        return self.inner is not None

    def install(self) -> None:
        """Take the player's place, in every thread: autograd runs backward on CUDA in one of its own."""
        self.inner = autograd.player
        autograd.register(self)

    def remove(self) -> None:
        """Give it back. Hooks that were installed later stay."""
        outer, inner = autograd.player, self.player
        if outer is self:
            autograd.register(inner)
        else:
            while isinstance(outer, Hook) and outer.inner is not self:
                outer = outer.player
            if isinstance(outer, Hook):
                outer.inner = inner
        self.inner = None

    @property
    def player(self) -> Plain:
        """What it has replaced."""
        assert self.inner is not None
        return self.inner

    def layers(self, context: Context) -> list[str]:
        """Names of the model's layers whose GEMMs a pair computes."""
        return [self.names[one.module] for one in context.modules if one.module in self.names]

    def prepare(self, function: Forward, plan: Any, context: Context, tensors: Saved, backward: Backward) -> None:
        self.player.prepare(function, plan, context, tensors, backward)

    def forward(
        self, function: Forward, plan: Any, context: Context, tensors: Saved, backward: Backward
    ) -> tuple[Any, Saved, Any]:
        return self.player.forward(function, plan, context, tensors, backward)

    def backward(self, function: Backward, plan: Any, context: Context, saved: Saved, grads: Saved, note: Any) -> Saved:
        return self.player.backward(function, plan, context, saved, grads, note)
