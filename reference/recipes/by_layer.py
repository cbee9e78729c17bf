"""Precision by layer: which layers of a model use another recipe than autocast's, or none.

    te.recipe.by_layer(model, {
        "layers.0.*": None,                                     16 bits
        "*.layernorm_mlp": te.recipe.Float8CurrentScaling(),
        model.head: te.recipe.AUTOCAST,                         autocast's recipe, the default
    })

The choice is an attribute of the layers: it holds in every autocast until it is changed, copies and pickles of the
model keep it, and state dicts do not. Outside of FP8 autocast it has no effect.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from reference.recipes.base import Recipe

AUTOCAST = "autocast's"
"""The default choice: the recipe of the autocast."""


def by_layer(
    model: torch.nn.Module, choices: Mapping[str | torch.nn.Module, Recipe | str | None]
) -> dict[str, Recipe | str | None]:
    """Let layers of `model` run in a recipe of their own inside FP8 autocast.

    Args:
        model: a layer, or a module with layers inside.
        choices: for a module of the model, its name, or a pattern of names (`*`, `?`, `[...]`): a recipe, None for 16
            bits, or `AUTOCAST`. A choice holds for the module and all layers inside, attention without weights of its
            own (`fp8_dpa`) among them; a later entry wins.

    Returns:
        name → present choice of every layer with weights that it casts to FP8.

    Raises:
        ValueError: an entry names no layer. Nothing has changed then.
        TypeError: a key or a choice has another type. Nothing has changed then.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"by_layer: model={model!r}; a torch.nn.Module is accepted.")
    if not isinstance(choices, Mapping):
        raise TypeError(f"by_layer: choices={choices!r}; a dictionary of names or modules is accepted.")
    named = layers_of(model)
    layers = named | {name: one for name, one in model.named_modules() if hasattr(one, "attends_in_fp8")}
    decided: dict[str, Recipe | str | None] = {}
    for key, choice in choices.items():
        if choice is not None and choice != AUTOCAST and not isinstance(choice, Recipe):
            raise TypeError(
                f"by_layer: the choice for {_shown(key)} is {choice!r}; a recipe, None and te.recipe.AUTOCAST are "
                f"accepted."
            )
        found = [name for name in matching(model, key) if name in layers]
        if not found:
            raise ValueError(
                f"by_layer: choices has {_shown(key)}, which is or holds no layer of the model that casts to FP8; its "
                f"layers are {', '.join(named) or 'none'}."
            )
        decided |= dict.fromkeys(found, choice)
    for name, choice in decided.items():
        layers[name].own_recipe = choice.fixed if isinstance(choice, Recipe) else None  # type: ignore[assignment]
        layers[name].in_high_precision = choice is None  # type: ignore[assignment]
    return {name: _choice(layer) for name, layer in named.items()}


def layers_of(model: torch.nn.Module) -> dict[str, Any]:
    """The layers of a model that cast to FP8, by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, "fp8_weights", None)}


def _shown(key: Any) -> str:
    return repr(key) if isinstance(key, str) else f"a {type(key).__name__}"


def matching(model: torch.nn.Module, key: Any) -> list[str]:
    """Names of the modules that `key` denotes, and of all modules inside."""
    modules = dict(model.named_modules())
    if isinstance(key, str):
        roots = [name for name in modules if fnmatchcase(name, key)]
    elif isinstance(key, torch.nn.Module):
        roots = [name for name, module in modules.items() if module is key]
    else:
        raise TypeError(f"by_layer: choices has the key {key!r}; names, patterns and modules are accepted.")
    return [name for name in modules if any(not root or name == root or name.startswith(f"{root}.") for root in roots)]


def _choice(layer: Any) -> Recipe | str | None:
    if layer.in_high_precision:
        return None
    return AUTOCAST if layer.own_recipe is None else layer.own_recipe
