"""`auto_precision`: which layers run in FP8, in which recipe, and which in 16 bits, chosen from statistics.

    plan = te.auto_precision(model, train_ten_steps)
    print(plan)                                   # for each layer what was chosen, and why
    plan.save("precision.json")
    te.PrecisionPlan.load("precision.json").apply(model)

A layer keeps its recipe if every tensor that its GEMMs read is within the limits; otherwise it gets the first other
recipe in which every one is. If in none of them the gradients are, it gets the first in which input and weight are, in
forward alone: fprop in FP8, dgrad and wgrad in 16 bits (`backward_override`). Otherwise it gets 16 bits. A choice is
one of `te.recipe.by_layer`, which `apply` calls. Finer ones are not offered, and no GEMM multiplies FP8 by 16 bits.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reference import recipe
from reference.arguments import is_int, is_real
from reference.inspect.sample import Sample, recipe_name, shown
from reference.inspect.statistics import Statistics, collect_stats
from reference.numbers import formats
from reference.recipes.base import Format, Recipe
from reference.recipes.by_layer import AUTOCAST, by_layer, layers_of, matching
from reference.recipes.current_scaling import Float8CurrentScaling
from reference.support import files

__all__ = ["PrecisionPlan", "auto_precision"]

_FORMAT, _VERSION = "twin-engine precision", 1
_SIXTEEN, _AUTOCAST = "16 bits", "autocast"  # choices in a file that are no recipes


class Choice(NamedTuple):
    """What a layer runs in: a choice of `te.recipe.by_layer`; and why."""

    recipe: Recipe | str | None
    why: str

    @property
    def name(self) -> str:
        """The choice in texts."""
        return "autocast's recipe" if isinstance(self.recipe, str) else recipe_name(self.recipe)


class PrecisionPlan:
    """What each layer of a model runs in, by the layer's name, and why; `str(plan)` is the report."""

    def __init__(self, layers: Mapping[str, Choice]) -> None:
        self.layers = dict(layers)

    def __str__(self) -> str:
        names = [shown(name) for name in self.layers]
        choices = [one.name for one in self.layers.values()]
        wide, runs = max(map(len, ["layer", *names])), max(map(len, ["runs in", *choices]))
        lines = [f"{'layer':{wide}}  {'runs in':{runs}}  why"]
        for name, choice, one in zip(names, choices, self.layers.values(), strict=True):
            lines.append(f"{name:{wide}}  {choice:{runs}}  {one.why}")
        return "\n".join(lines)

    def apply(self, model: torch.nn.Module) -> None:
        """Let the layers of `model` run so from now on, through `te.recipe.by_layer`.

        Raises:
            ValueError: the model's layers are not those of the plan. Nothing has changed then.
        """
        layers = layers_of(model)
        wrong = [name for name in self.layers if name not in layers] + [
            name for name in layers if name not in self.layers
        ]
        if wrong:
            where = "the plan has" if wrong[0] in self.layers else "the model has"
            raise ValueError(
                f"apply: {where} {shown(wrong[0])!r} and the {'model' if where == 'the plan has' else 'plan'} does not "
                f"({len(wrong)} names differ); a model with the layers of the plan is accepted."
            )
        shared: dict[Any, Any] = {}  # one object for equal recipes: a half of a layer with one recipe runs fused
        choices = {name: shared.setdefault(one.recipe, one.recipe) for name, one in self.layers.items()}
        by_layer(model, {layers[name]: choice for name, choice in choices.items()})

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON: the whole file or nothing.

        Raises:
            TypeError: a recipe is not one of `te.recipe`.
            files.NotWritten: the file could not be written.
        """
        layers = {name: {"choice": _packed(one.recipe), "why": one.why} for name, one in self.layers.items()}
        plan = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(layers), "layers": layers}
        files.write(Path(path), json.dumps(plan, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "PrecisionPlan":
        """The plan that `save` wrote; one that was edited by hand is read without its `sha256`.

        Raises:
            FileNotFoundError: there is no such file.
            files.Damaged: the file does not hold a plan of this version.
        """
        found = files.record(Path(path))
        if found.get("format") != _FORMAT:
            raise files.Damaged(f"{path} is no precision plan: its format is {found.get('format')!r}, not {_FORMAT!r}.")
        if found.get("version") != _VERSION or isinstance(found.get("version"), bool):
            raise files.Damaged(f"{path} has version {found.get('version')!r} of the format; {_VERSION} is accepted.")
        layers = found.get("layers")
        if not isinstance(layers, dict):
            raise files.Damaged(f"{path} is damaged: its layers are a {type(layers).__name__}, not an object.")
        unknown = sorted(found.keys() - {"format", "version", "sha256", "layers"})
        if unknown:
            raise files.Damaged(f"{path} is damaged, at {unknown[0]!r}: a plan has format, version, sha256 and layers.")
        if "sha256" in found and found["sha256"] != _digest(layers):
            raise files.Damaged(
                f"{path} is damaged, at 'layers': they are not those that were written; where they were edited by "
                f"hand, take the line with sha256 out."
            )
        return cls({name: _unpacked_choice(path, name, one) for name, one in layers.items()})


def _digest(layers: dict[str, Any]) -> str:
    """A SHA-256 of the layers as JSON has them."""
    return hashlib.sha256(json.dumps(layers, sort_keys=True).encode()).hexdigest()


def _packed(choice: Recipe | str | None) -> Any:
    """A choice as JSON has it: a recipe with the arguments that differ from their defaults."""
    if not isinstance(choice, Recipe):
        return _SIXTEEN if choice is None else _AUTOCAST
    if getattr(recipe, type(choice).__name__, None) is not type(choice):
        raise TypeError(f"save: {choice!r} is not one of te.recipe's recipes, which are accepted.")
    given: dict[str, Any] = {}
    for one in dataclasses.fields(choice):  # type: ignore[arg-type]
        value = getattr(choice, one.name)
        if value != one.default:
            given[one.name] = value.name if isinstance(value, Format) else value
    return {"recipe": type(choice).__name__, **given}


def _is_recipe(one: Any) -> bool:
    return isinstance(one, type) and issubclass(one, Recipe) and one is not Recipe


def _unpacked_choice(path: str | Path, name: str, entry: Any) -> Choice:
    if not isinstance(entry, dict) or set(entry) != {"choice", "why"} or not isinstance(entry["why"], str):
        raise files.Damaged(f"{path} is damaged: layer {name!r} has {entry!r}; a choice and why are accepted.")
    packed = entry["choice"]
    if packed in (_SIXTEEN, _AUTOCAST):
        return Choice(None if packed == _SIXTEEN else AUTOCAST, entry["why"])
    arguments = dict(packed) if isinstance(packed, dict) else {}
    recipe_name = arguments.pop("recipe", None)
    known = [name for name in recipe.__all__ if _is_recipe(getattr(recipe, name))]
    if recipe_name not in known:
        accepted = ", ".join(map(repr, (_SIXTEEN, _AUTOCAST, *known)))
        raise files.Damaged(f"{path} is damaged: layer {name!r} has the choice {packed!r}; {accepted} are accepted.")
    try:
        if "fp8_format" in arguments:
            arguments["fp8_format"] = Format[arguments["fp8_format"]]
        return Choice(getattr(recipe, recipe_name)(**arguments), entry["why"])
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise files.Damaged(f"{path} is damaged: layer {name!r} has the choice {packed!r} ({error}).") from error


class _Limits(NamedTuple):
    """What a tensor in FP8 may lose; see `auto_precision`."""

    saturated: float
    underflowed: float
    sqnr_loss: float

    def complaint(self, one: Sample) -> str | None:
        """What is beyond a limit, in words; None where nothing is."""
        found = []
        if one.nan or one.inf:
            found.append(f"{one.nan + one.inf} of {one.elements} elements are NaN or infinite")
        if one.recipe is not None:
            if one.saturated_share > self.saturated:
                found.append(f"{one.saturated_share:.2%} saturate (at most {self.saturated:.2%})")
            if one.underflowed_share > self.underflowed:
                found.append(f"{one.underflowed_share:.2%} underflow (at most {self.underflowed:.2%})")
            least = ideal_sqnr(one.dtype) - self.sqnr_loss
            if one.sqnr is not None and not one.sqnr >= least:  # NaN where the scale is
                found.append(f"SQNR {one.sqnr:.1f} dB (at least {least:.1f} dB in {one.format})")
        return f"{_tensor(one)}, read by {' and '.join(one.gemms)}: {', '.join(found)}" if found else None


def _tensor(one: Sample) -> str:
    """A tensor of a layer, in texts."""
    return f"{one.part}'s {one.role}" if one.part else f"its {one.role}"


def ideal_sqnr(dtype: torch.dtype) -> float:
    """The SQNR in dB of rounding alone in a format: 32.5 in E4M3, 26.5 in E5M2, 20.5 in E2M1 (uint8).

    Of normal numbers with m bits of mantissa whose significands s are uniform in [1, 2): the error is uniform in a
    spacing of 2^-m, so SQNR = E[s²] / (2^-2m / 12) = (7/3) · 12 · 4^m.
    """
    return 10 * math.log10(28 * 4 ** (1 if dtype == torch.uint8 else formats.format_of(dtype).mantissa_bits))


def _chosen(layer: Any, samples: Sequence[Sample], limits: _Limits) -> Choice:
    """The first recipe in which every tensor of a layer is within the limits; the one that it ran in comes first.

    If there is none: the first in which the tensors of fprop are, for that GEMM alone.
    """
    if not any(one.elements for one in samples if one.role != "weight"):  # empty batches say nothing, either
        kept = None if layer.in_high_precision else layer.own_recipe or AUTOCAST
        return Choice(kept, "No number of it was measured: its choice stays as it was.")
    reasons = []
    half: Recipe | None = None
    for found in dict.fromkeys((one.recipe, one.ran) for one in sorted(samples, key=lambda one: not one.ran)):
        mine = [one for one in samples if (one.recipe, one.ran) == found]
        complaints = [text for one in mine if (text := limits.complaint(one)) is not None]
        tried, ran = found
        name = recipe_name(tried)
        if complaints:
            reasons.append(f"{name} does not suit {'; '.join(complaints)}")
            if half is None and tried is not None and _suits_forward(mine, limits):
                half = tried
        elif tried is None:
            reasons.append(f"{name}, in which it ran: no NaN and no infinity")
        else:
            worst = min(mine, key=lambda one: (one.sqnr or 0.0) - ideal_sqnr(one.dtype))
            good = f"In {name} every tensor is within the limits ({_tensor(worst)} the least: {worst.sqnr:.1f} dB)"
            why = ". ".join([*reasons, good]) + "."
            return Choice((AUTOCAST if layer.own_recipe is None else layer.own_recipe) if ran else tried, why)
    if half is not None:
        reasons.append("Input and weight are within the limits, so fprop is in FP8, and dgrad and wgrad in 16 bits")
        recipe_of_forward: Any = dataclasses.replace(half, backward_override="high_precision")  # type: ignore[type-var]
        return Choice(recipe_of_forward, ". ".join(reasons) + ".")
    return Choice(None, ". ".join(reasons) + ".")


def _suits_forward(samples: Sequence[Sample], limits: _Limits) -> bool:
    """Whether the input and the weight were measured in a recipe, and are within the limits."""
    mine = [one for one in samples if one.role != "grad_output"]
    finite = not any(one.nan or one.inf for one in samples)  # 16 bits have these, too
    return finite and bool(mine) and all(limits.complaint(one) is None for one in mine)


def auto_precision(
    model: torch.nn.Module,
    evidence: Statistics | Callable[[], Any],
    *,
    recipes: Iterable[Recipe] | None = None,
    first: int = 1,
    max_saturated: float = 1e-3,
    max_underflowed: float = 0.05,
    max_sqnr_loss: float = 6.0,
    disable: str | Iterable[str] = (),
) -> PrecisionPlan:
    """Choose what each layer of a model runs in, from statistics of its training. Nothing is applied.

    Args:
        model: the module that the training loop calls.
        evidence: statistics of this model (`te.collect_stats`), or a function that trains for some steps under the
            autocast that is meant. It is called once, every step is measured, and its steps change the model as any do.
        recipes: with a function, what is tried where the layer's own recipe does not suit, in this order; None is
            `Float8CurrentScaling()`. Statistics bring their own (`collect_stats(recipes=...)`).
        first: forwards before this one are not judged. In forward 0 delayed scaling has no amax yet, and its scale 1
            makes most gradients underflow.
        max_saturated: share of a tensor's elements. Those that saturate are its largest, and their error has no bound;
            a scale that fits leaves none. One in a thousand is what a growing amax may cost between two steps.
        max_underflowed: share of a tensor's elements that become 0. A normal distribution scaled to its amax loses
            0.001 % in E4M3, and tensors of a healthy GPT less than 0.5 %. Beyond 5 % the scale serves a few
            large elements at the cost of the others, which no SQNR shows: it is dominated by the large ones.
        max_sqnr_loss: dB below the SQNR of rounding alone (`ideal_sqnr`). 6 dB are four times the noise of rounding:
            three quarters of the noise come from what does not fit the format.
        disable: names or patterns (`*`, `?`, `[...]`) of layers that run in 16 bits whatever was measured.

    Returns:
        `PrecisionPlan`: print it, `save` it, `apply` it.

    Raises:
        TypeError, ValueError: an argument is not accepted, or a pattern names no layer.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"auto_precision: model={model!r}; a torch.nn.Module is accepted.")
    if not is_int(first) or first < 0:
        raise ValueError(f"auto_precision: first={first!r}; an int of at least 0 is accepted.")
    limits = _Limits(max_saturated, max_underflowed, max_sqnr_loss)
    for name, value in zip(("max_saturated", "max_underflowed", "max_sqnr_loss"), limits, strict=True):
        if not is_real(value) or not value >= 0:
            raise ValueError(f"auto_precision: {name}={value!r}; a number of at least 0 is accepted.")
    layers = layers_of(model)
    disabled = _disabled(model, layers, disable)
    samples = _evidence(model, evidence, recipes).summary(int(first))
    plan = {}
    for name, layer in layers.items():
        if name in disabled:
            plan[name] = Choice(None, f"It is disabled by {disabled[name]!r}.")
        else:
            plan[name] = _chosen(layer, [one for one in samples if one.layer == name], limits)
    return PrecisionPlan(plan)


def _disabled(model: torch.nn.Module, layers: Mapping[str, Any], disable: Any) -> dict[str, str]:
    """The layers that run in 16 bits in any case, with the pattern that says so."""
    found: dict[str, str] = {}
    if not isinstance(disable, Iterable):
        raise TypeError(f"auto_precision: disable={disable!r}; a name, a pattern, or several are accepted.")
    for pattern in [disable] if isinstance(disable, str) else disable:
        if not isinstance(pattern, str):
            raise TypeError(f"auto_precision: disable has {pattern!r}; names and patterns are accepted.")
        named = [name for name in matching(model, pattern) if name in layers]
        if not named:
            raise ValueError(
                f"auto_precision: disable has {pattern!r}, which is or holds no layer of the model that casts to FP8; "
                f"its layers are {', '.join(layers) or 'none'}."
            )
        found |= {name: pattern for name in named if name not in found}
    return found


def _evidence(model: torch.nn.Module, evidence: Any, recipes: Iterable[Recipe] | None) -> Statistics:
    """The statistics that `auto_precision` judges."""
    if isinstance(evidence, Statistics):
        if evidence.model is not model:
            raise ValueError("auto_precision: evidence is of another model; statistics of this one are accepted.")
        if recipes is not None:
            raise ValueError(
                f"auto_precision: recipes={recipes!r} with statistics, which were measured already; give it to "
                f"collect_stats, and None here."
            )
        return evidence
    if not callable(evidence):
        raise TypeError(
            f"auto_precision: evidence={evidence!r}; statistics of collect_stats and functions are accepted."
        )
    with collect_stats(model, 1, (Float8CurrentScaling(),) if recipes is None else recipes) as stats:
        evidence()
    return stats
