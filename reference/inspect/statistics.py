"""`collect_stats`: what the quantizers of a model's layers do to its tensors in training.

    with te.collect_stats(model, every=100) as stats:
        train(model)
    print(stats.table())

For each layer and each role (input, weight, grad_output), of each `every`-th forward and its backward: the amax, the
scale, how many elements saturate, underflow, are NaN or infinite, and the SQNR (`reference.ops.casts.cast_stats`
defines them). They compare the codes that the GEMMs read with the tensor that they would read in 16 bits: the result of
a norm or an activation in the activation dtype; a weight in its own dtype.

A measured step runs op by op and has the bits of any other step. Between two measured steps nothing is different: the
runner of `reference.nn.core.autograd` is the usual one, so tapes are played. Values stay on the device until they are
read.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from reference.arguments import is_int
from reference.inspect.sample import GEMMS, Sample
from reference.memory import recompute
from reference.nn.core.autograd import Backward, Context, Forward
from reference.nn.core.context import BlockContext, ModuleContext
from reference.nn.core.hook import Hook, ObservedContext, observed
from reference.nn.core.observed_quantizer import Observed
from reference.ops.casts.cast_stats import add_lost
from reference.ops.library import twin
from reference.recipe import Recipe
from reference.recipes.block_scaling import ROWS, SQUARES
from reference.recipes.quantized import NUMBERS, PER_TENSOR, PLAIN, Operand, Quantized
from reference.recipes.quantizer import Quantizer
from reference.recipes.rowwise_scaling import ROWWISE
from reference.support.nested import Form, Tensors

__all__ = ["Sample", "Statistics", "collect_stats"]


STATISTICS: dict[str, Callable[[torch.Tensor, Operand], tuple[torch.Tensor, torch.Tensor]]] = {
    PLAIN: lambda x, row: twin.cast_stats(x, None, None),
    PER_TENSOR: lambda x, row: twin.cast_stats(x, row.codes, row.scales),
    ROWWISE: lambda x, row: twin.cast_stats(x, row.codes, row.scales),
    ROWS: lambda x, row: twin.cast_stats_blocks(x, row.codes, row.scales, False),
    SQUARES: lambda x, row: twin.cast_stats_blocks(x, row.codes, row.scales, True),
}
"""What a cast lost, by the layout of its codes: (x, the codes) → counts and sums of `twin::cast_stats`."""


def _of_numbers(x: torch.Tensor, row: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a layout that only the CPU has, by the numbers that its codes stand for."""
    counts, sums = twin.cast_stats(x, None, None)
    add_lost(counts, sums, x, NUMBERS[row.layout](row)[:, : x.shape[1]])
    return counts, sums


class _Key(NamedTuple):
    """What a sample is of."""

    layer: str
    part: str
    role: str
    recipe: Recipe | None
    ran: bool


class _Measured(NamedTuple):
    """A sample whose values are still on the device."""

    key: _Key
    dtype: torch.dtype
    step: int
    elements: int
    scale: torch.Tensor | None
    counts: torch.Tensor
    sums: torch.Tensor


class _Observer(Hook):
    """Runs pairs with quantizers whose results are measured."""

    def __init__(self, model: torch.nn.Module, beside: Sequence[Recipe]) -> None:
        super().__init__(model)
        self.beside = beside
        self.step = 0
        self.found: list[_Measured] = []

    def forward(
        self, function: Forward, plan: Any, context: Context, tensors: Tensors, backward: Backward
    ) -> tuple[Any, Tensors, Any]:
        if recompute.recomputing() or not self.layers(context):
            return super().forward(function, plan, context, tensors, backward)
        if not observed(context):
            self.prepare(function, plan, context, tensors, backward)
        return super().forward(function, plan, self._observed(context), tensors, backward)

    def backward(
        self, function: Backward, plan: Any, context: Context, saved: Tensors, grads: Tensors, note: Any
    ) -> Tensors:
        if isinstance(note, Form) and self.layers(context):  # otherwise its forward was played from a tape
            context = self._observed(context)
        return super().backward(function, plan, context, saved, grads, note)

    def _observed(self, context: Context) -> Context:
        """A copy of a context whose quantizers are measured."""
        if isinstance(context, BlockContext):
            return context._replace(modules=tuple([self._of_module(one) for one in context.modules]))
        return self._of_module(context)

    def _of_module(self, context: ModuleContext) -> ModuleContext:
        module = context.module
        if module not in self.names:
            return context
        others = {
            recipe: recipe.quantizers(module.roles, None, None, torch.bfloat16)  # measured are FP8 codes alone
            for recipe in self._beside(module, context)
        }
        found = {}
        for role in module.roles.all:
            quantizer = context.quantizers[role.name]
            beside = {recipe: one for recipe, its in others.items() if (one := its[role.name]).fp8}
            recipe = context.recipe if quantizer.fp8 else None
            key = _Key(self.names[module], role.part, role.tensor, recipe, True)
            found[role.name] = Observed(quantizer, self._recorder(key, beside))
        return ObservedContext.of(context, found)

    def _beside(self, module: Any, context: ModuleContext) -> list[Recipe]:
        """The recipes that are measured besides the layer's own; none where its sizes do not fit FP8."""
        if any(getattr(module, name) % 16 for name in module.fp8_sizes):
            return []
        return [recipe for recipe in self.beside if recipe != context.recipe]

    def _recorder(self, key: _Key, beside: dict[Recipe, Quantizer]) -> Any:
        def record(quantizer: Quantizer, x: torch.Tensor, quantized: Quantized, scale: torch.Tensor | None) -> None:
            self._note(key, x, quantized, scale)
            for recipe, other in beside.items():
                with torch.random.fork_rng(devices=[]):  # a gradient that is rounded by chance draws a seed
                    quantized = other.quantize(x, False)
                self._note(key._replace(recipe=recipe, ran=False), x, quantized, other.scale(x))

        return record

    def _note(self, key: _Key, x: torch.Tensor, quantized: Quantized, scale: torch.Tensor | None) -> None:
        row = quantized.row
        counts, sums = STATISTICS.get(row.layout, _of_numbers)(x, row)
        self.found.append(_Measured(key, row.codes.dtype, self.step, x.numel(), scale, counts, sums))


class Statistics:
    """The statistics of a model; see `collect_stats`."""

    def __init__(self, model: torch.nn.Module, every: int, recipes: Sequence[Recipe]) -> None:
        self.model, self.every, self.recipes = model, every, tuple(recipes)
        self.forwards = 0
        self._observer: _Observer | None = None
        self._measured: list[_Measured] = []
        self._samples: list[Sample] = []
        self._handle: Any = None

    def __enter__(self) -> "Statistics":
        if self._handle is not None:
            raise RuntimeError("collect_stats: it is open already; one `with` at a time is accepted.")
        for name, module in self.model.named_modules():
            if getattr(module, "tp_name", None) is not None:
                raise NotImplementedError(
                    f"collect_stats: {name or 'the model'} is shared by the ranks of a tensor-parallel group, none of "
                    f"which has its tensors; a model with tp_size=1 is accepted."
                )
        self._observer = _Observer(self.model, self.recipes)
        self._handle = self.model.register_forward_pre_hook(self._forward_begins)
        self._before = self.forwards
        return self

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        assert self._observer is not None
        self._handle.remove()
        self._handle = None
        if self._observer.installed:
            self._observer.remove()
        if error_type is None and self.forwards == self._before:
            raise RuntimeError(
                f"collect_stats: {type(self.model).__name__} was not called inside; give the module that the training "
                f"loop calls."
            )
        self._measured, self._observer.found = [*self._measured, *self._observer.found], []
        if error_type is None and not self._measured and not self._samples:
            raise RuntimeError(
                f"collect_stats: {type(self.model).__name__} was called, and none of its layers could be measured; "
                f"layers of this package are, outside of torch.compile and of CUDA graphs."
            )

    def _forward_begins(self, *_: Any) -> None:
        """Called before each forward of the model: measure it, or stop measuring."""
        if recompute.recomputing():  # `te.checkpoint(model, x)` runs its forward again in backward
            return
        observer = self._observer
        assert observer is not None
        observer.step, self.forwards = self.forwards, self.forwards + 1
        wanted = observer.step % self.every == 0
        if wanted and not observer.installed:
            observer.install()
        elif observer.installed and not wanted:
            observer.remove()

    def samples(self) -> list[Sample]:
        """Every sample, in the order in which they were measured. Reading waits for the device."""
        new = [*self._measured, *(self._observer.found if self._observer is not None else [])]
        if self._observer is not None:
            self._observer.found = []
        self._measured = []
        self._samples += _read(new)
        return list(self._samples)

    def summary(self, first: int = 0) -> list[Sample]:
        """One sample for each layer, part, role and recipe: counts and sums are added, the amax is the largest.

        `first`: leave out the forwards before. 1 leaves out the one in which delayed scaling has no scale but 1.
        """
        found: dict[_Key, Sample] = {}
        for one in self.samples():
            if one.step < first:
                continue
            key = _Key(one.layer, one.part, one.role, one.recipe, one.ran)
            found[key] = found[key].merged(one) if key in found else one
        order = {name: i for i, (name, _) in enumerate(self.model.named_modules())}
        roles = list(GEMMS)
        return sorted(found.values(), key=lambda one: (order[one.layer], one.part, roles.index(one.role), not one.ran))

    def table(self, first: int = 0) -> str:
        """The summary as text. In parentheses: recipes that were measured beside the layer's own."""
        head = ("layer", "role", "GEMMs", "recipe", "format", "amax", "scale", "saturated", "underflowed", "SQNR dB")
        rows = [(*head, "NaN", "inf"), *map(Sample.row, self.summary(first))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        left = 5
        lines = (
            "  ".join(
                cell.ljust(width) if i < left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> str:
        """All samples as a JSON object: `{"samples": [...]}`. A number that is not finite is a string."""
        return json.dumps({"samples": [one.plain() for one in self.samples()]}, indent=1)


def _read(measured: Sequence[_Measured]) -> list[Sample]:
    """Samples of what is on devices, with three copies from each."""
    values: dict[int, tuple[list[int], list[float], float | None]] = {}
    for device in dict.fromkeys(one.counts.device for one in measured):
        here = [i for i, one in enumerate(measured) if one.counts.device == device]
        counts = torch.stack([measured[i].counts for i in here]).tolist()
        sums = torch.stack([measured[i].sums for i in here]).tolist()
        scaled = [i for i in here if measured[i].scale is not None]
        scales = torch.cat([measured[i].scale for i in scaled]).tolist() if scaled else []  # type: ignore[misc]
        of = dict(zip(scaled, scales, strict=True))
        values |= {i: (counts[k], sums[k], of.get(i)) for k, i in enumerate(here)}
    found = []
    for i, one in enumerate(measured):
        (saturated, underflowed, nan, inf), (signal, noise, amax), scale = values[i]
        of_all = (one.dtype, one.step, one.elements, amax, scale)
        found.append(Sample(*one.key, *of_all, saturated, underflowed, nan, inf, signal, noise))
    return found


def collect_stats(model: torch.nn.Module, every: int = 100, recipes: Iterable[Recipe] = ()) -> Statistics:
    """Measure what the quantizers of a model do to its tensors, inside a `with`.

    Measured are the model's layers that cast to FP8 (in 16 bits: what FP8 would cast), on a CPU or a GPU, during the
    first and then every `every`-th forward of the model, up to its next forward: so in a training loop with the
    backward. A recomputation by `te.checkpoint` is not measured again; a weight that is kept in FP8, or was cast by an
    earlier microbatch, has no number to compare with and is not measured. Nothing is measured inside of torch.compile
    and of CUDA graphs. In a distributed run each process measures its own.

    Args:
        model: the module that the training loop calls.
        every: an int of at least 1.
        recipes: measured besides: what each of them would make of the same tensors. Recipes without state, such as
            `Float8CurrentScaling()`.

    Returns:
        `Statistics`: `samples()`, `summary()`, `table()`, `to_json()`, inside of the `with` and after it.

    Raises:
        TypeError, ValueError: an argument is not accepted.
        RuntimeError: at the end, where the model was not called, or nothing of it could be measured.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"collect_stats: model={model!r}; a torch.nn.Module is accepted.")
    if not is_int(every) or every < 1:
        raise ValueError(f"collect_stats: every={every!r}; an int of at least 1 is accepted.")
    recipes = list(recipes)
    for recipe in recipes:
        if not isinstance(recipe, Recipe) or recipe.history_rows is not None:
            raise ValueError(
                f"collect_stats: recipes has {recipe!r}; recipes without state between steps are accepted, such as "
                f"Float8CurrentScaling()."
            )
    if not any(getattr(module, "fp8_sizes", None) for module in model.modules()):
        raise ValueError(f"collect_stats: model is a {type(model).__name__} without a layer that casts to FP8.")
    return Statistics(model, int(every), recipes)
