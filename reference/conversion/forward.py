"""A model's forward inside autocast, for programs whose training loop belongs to somebody else."""

from typing import Any

import torch

from reference.autocast import autocast
from reference.recipe import Recipe
from reference.threads import here


class _Forward:
    """The forward of `model`, in `autocast(recipe=recipe)` where no autocast is open.

    It is an attribute of the model, as Accelerate's, because not everybody calls a model: PEFT calls `model.forward`.
    """

    def __init__(self, model: torch.nn.Module, inner: Any, recipe: Recipe) -> None:
        self.model, self.inner, self.recipe = model, inner, recipe

    @property
    def __wrapped__(self) -> Any:
        """What it calls: `inspect.signature` reads the arguments from here."""
        return type(self.model).forward.__get__(self.model) if self.inner is None else self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if here().autocasts:
            return self.__wrapped__(*args, **kwargs)
        with autocast(recipe=self.recipe):
            return self.__wrapped__(*args, **kwargs)


def run_in_autocast(model: torch.nn.Module, recipe: Recipe) -> None:
    """Let `model.forward` run under `recipe` from now on; a second call gives it another recipe."""
    present = vars(model).get("forward")
    if isinstance(present, _Forward) and present.model is model:
        present.recipe = recipe
    else:
        vars(model)["forward"] = _Forward(model, present, recipe)
