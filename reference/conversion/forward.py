"""A model's forward inside autocast, for programs whose training loop belongs to somebody else."""

from typing import Any

import torch

from reference.recipe import Recipe
from reference.state.autocast import autocast
from reference.state.threads import here


class _Forward:
    """The forward of `model`, in `autocast(recipe=recipe)` where no autocast is open.

    It is an attribute of the model, as Accelerate's, because not everybody calls a model: PEFT calls `model.forward`.
    `__func__` and `__wrapped__` are those of a method, for libraries that wrap one in turn.
    """

    def __init__(self, model: torch.nn.Module, inner: Any, recipe: Recipe) -> None:
        self.model, self.inner, self.recipe = model, inner, recipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.model, *args, **kwargs)

    def _run(self, model: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        forward = self._of(model)
        if here().autocasts:
            return forward(*args, **kwargs)
        with autocast(recipe=self.recipe):
            return forward(*args, **kwargs)

    def _of(self, model: torch.nn.Module) -> Any:
        """The forward of a model without autocast."""
        return type(model).forward.__get__(model) if self.inner is None else self.inner

    @property
    def __func__(self) -> Any:
        return self._run

    @property
    def __wrapped__(self) -> Any:
        return self._of(self.model)  # `inspect.signature` reads the arguments here


def run_in_autocast(model: torch.nn.Module, recipe: Recipe) -> None:
    """Let `model.forward` run under `recipe` from now on; a second call gives it another recipe."""
    present = vars(model).get("forward")
    if isinstance(present, _Forward) and present.model is model:
        present.recipe = recipe
    else:
        vars(model)["forward"] = _Forward(model, present, recipe)
