"""`convert`: the linear layers and norms of a model become Twin Engine's, in place, with the same parameters.

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    print(te.convert(model, recipe=te.DelayedScaling(), filter={"lm_head": False}))

A replaced module keeps its name, its parameters (the same objects, so what is tied stays tied and an optimizer made
before stays right), its place in the state dict, and its class: it is a `te.Linear` and a `torch.nn.Linear`, so code
that asks for either finds it. Inside `quantized_model_init` weights are cast to FP8 instead, except tied ones.

Nothing here is Hugging Face's own, and nothing imports it: docs/hugging_face.md says how the two work together.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from reference.conversion.blocks import NOTE, block_replacement, fill_block, is_block, rotary_of
from reference.conversion.forward import run_in_autocast
from reference.conversion.layers import Layers, Replacement, become, fill, replacement_for
from reference.conversion.report import Conversion, Entry
from reference.nn.layers.layernorm import LayerNorm, RMSNorm
from reference.nn.layers.linear import Linear
from reference.nn.transformer.transformer_layer import TransformerLayer
from reference.recipe import Recipe
from reference.recipes.by_layer import matching

__all__ = ["Conversion", "Entry", "convert", "convert_into"]

Key = str | torch.nn.Module
Filter = None | Key | Iterable[Key] | Mapping[Key, bool] | Callable[[torch.nn.Module, str], bool]


def convert(
    model: torch.nn.Module, *, recipe: Recipe | None = None, filter: Filter = None, blocks: bool = False
) -> Conversion:
    """Replace the linear layers and norms of `model` by `te.Linear`, `te.LayerNorm` and `te.RMSNorm`.

    Replaced are `torch.nn.Linear` and transformers' `Conv1D` of fp32, bf16 or fp16 whose sizes are multiples of 16,
    `torch.nn.LayerNorm` over the last dimension, subclasses with these forwards, and every module that computes an
    RMSNorm, whatever its name: a copy of it is tried on small numbers. The report says of every other module with
    parameters why it stays.

    Args:
        model: a module with such modules inside; they may be on the meta device.
        recipe: the model's forward runs in `autocast(recipe=recipe)` from now on, except where an autocast is open
            already. None leaves autocast to the caller.
        filter: which modules may be replaced. A name, a pattern (`*`, `?`, `[...]`) or a module, or several: these and
            all inside. A mapping from them to True or False: all but those with False; a later entry wins. A function
            `filter(module, name)`: those for which it returns True. None: all.
        blocks: also replace whole decoder layers, where they are Llama's or Mistral's and all their modules may be
            replaced, by `te.TransformerLayer` (`reference.conversion.blocks`).

    Returns:
        `Conversion`: print it.

    Raises:
        TypeError, ValueError: an argument is not accepted, or an entry of `filter` names nothing that could be
            replaced. Nothing has changed then.
    """
    return convert_into(Layers(Linear, LayerNorm, RMSNorm, TransformerLayer), model, recipe, filter, blocks)


def convert_into(
    layers: Layers, model: torch.nn.Module, recipe: Recipe | None, filter: Filter, blocks: bool
) -> Conversion:
    """`convert` into the layers of one side."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert: model={model!r}; a torch.nn.Module is accepted.")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"convert: recipe={recipe!r}; a recipe of te.recipe or None is accepted.")
    if not isinstance(blocks, bool):
        raise TypeError(f"convert: blocks={blocks!r}; True and False are accepted.")
    places = _places(model)
    tied = _tied(model)
    found = {
        name: replacement_for(layers, module, places[module], tied.get(f"{name}.weight", ()))
        for name, module in model.named_modules()
        if module._parameters
    }
    if isinstance(found.get(""), Replacement):
        raise ValueError(
            f"convert: model is itself a {type(model).__name__}, which cannot be replaced in place; a module that "
            f"holds it is accepted."
        )
    passed = _filtered(model, filter, {name for name, one in found.items() if isinstance(one, Replacement)})
    entries = _with_blocks(layers, model, places, tied, found, passed) if blocks else {}
    inside = tuple(f"{name}." for name, entry in entries.items() if entry.now is not None)
    for name, replacement in found.items():
        if name.startswith(inside):
            continue
        module = model.get_submodule(name)
        was = type(module).__name__
        if isinstance(replacement, str):
            entries[name] = Entry(was, None, replacement)
        elif name not in passed:
            entries[name] = Entry(was, None, "filter leaves it out")
        else:
            fill(replacement.layer, module)
            for owner, attribute in places.pop(module):  # which frees it, and a weight that is kept in FP8 now
                owner._modules[attribute] = replacement.layer
            entries[name] = Entry(was, f"te.{type(replacement.layer).__name__}", replacement.note)
    if recipe is not None:
        run_in_autocast(model, recipe)
    return Conversion(entries)


def _with_blocks(
    layers: Layers,
    model: torch.nn.Module,
    places: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]],
    tied: Mapping[str, Iterable[str]],
    found: Mapping[str, Replacement | str],
    passed: set[str],
) -> dict[str, Entry]:
    """Replace the decoder layers that can be; an entry for each, replaced or not."""
    entries = {}
    for name in [name for name, module in model.named_modules() if is_block(module)]:
        block, rotary = model.get_submodule(name), rotary_of(model, name)
        names = {one.removeprefix(f"{name}."): one for one in found if one.startswith(f"{name}.")}
        parts = {
            short: found[one] if one in passed or isinstance(found[one], str) else "filter leaves it out"
            for short, one in names.items()
        }
        shared = {short for short, one in names.items() if tied.get(f"{one}.weight")}
        if len(places[block]) != 1:
            replacement: Any = "it is in several places"
        else:
            replacement = block_replacement(layers.TransformerLayer, block, parts, shared, rotary)
        was = type(block).__name__
        if isinstance(replacement, str):
            entries[name] = Entry(was, None, f"module by module; {replacement}")
            continue
        fill_block(replacement, block, rotary)
        become(replacement, type(block))
        for owner, attribute in places[block]:
            owner._modules[attribute] = replacement
        for module in block.modules():  # which frees the weights that became one
            places.pop(module, None)
        entries[name] = Entry(was, "te.TransformerLayer", NOTE)
    return entries


def _places(model: torch.nn.Module) -> dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]]:
    """Module → where it is: its owners and their attributes' names; a shared module has several."""
    places: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
    for owner in model.modules():
        for attribute, module in owner._modules.items():
            if module is not None:
                places[module].append((owner, attribute))
    return places


def _tied(model: torch.nn.Module) -> dict[str, list[str]]:
    """Parameters that are one, or will be: name → the other names."""
    same: dict[int, list[str]] = defaultdict(list)
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(owner, recurse=False):
            same[id(parameter)].append(name)
    groups = [set(names) for names in same.values()]
    for owner, module in model.named_modules():
        start = f"{owner}." if owner else ""
        # From the meta device transformers ties after it has loaded, by this table of a model.
        table = vars(module).get("all_tied_weights_keys", {})
        groups += [{start + name, start + source} for name, source in table.items()]
    tied: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        for name in group:
            tied[name] += sorted(group - {name, *tied[name]})
    return {name: others for name, others in tied.items() if others}


def _filtered(model: torch.nn.Module, filter: Any, names: set[str]) -> set[str]:
    """Those of `names` that `filter` lets pass."""
    if filter is None:
        return names
    if callable(filter) and not isinstance(filter, torch.nn.Module):
        answers = {name: filter(model.get_submodule(name), name) for name in sorted(names)}
        for name, answer in answers.items():
            if not isinstance(answer, bool):
                raise TypeError(f"convert: filter returned {answer!r} for {name!r}; True and False are accepted.")
        return {name for name, answer in answers.items() if answer}
    if isinstance(filter, Mapping):
        choices, passed = list(filter.items()), set(names)
    else:
        one = isinstance(filter, (str, torch.nn.Module))
        if not one and not isinstance(filter, Iterable):
            raise TypeError(
                f"convert: filter={filter!r}; names, patterns, modules, a mapping from them to True or False, a "
                f"function and None are accepted."
            )
        choices, passed = [(key, True) for key in ([filter] if one else filter)], set()
    for key, choice in choices:
        shown = repr(key) if isinstance(key, str) else f"a {type(key).__name__}"
        if not isinstance(key, (str, torch.nn.Module)):
            raise TypeError(f"convert: filter has {key!r}; names, patterns and modules are accepted.")
        if not isinstance(choice, bool):
            raise TypeError(f"convert: filter has {choice!r} for {shown}; True and False are accepted.")
        named = {name for name in matching(model, key) if name in names}
        if not named:
            raise ValueError(
                f"convert: filter has {shown}, which is or holds nothing that convert replaces; "
                f"{', '.join(sorted(names)) or 'there is nothing of that kind'}."
            )
        passed = passed | named if choice else passed - named
    return passed
