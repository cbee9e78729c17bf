"""What a forward hands to its pair's functions, and to its backward, besides the plan and the pair's tensors.

A plan contains everything but tensors that launches depend on; a context contains the tensors that come from the
module: quantizers with their scales and amax histories, cached weights, gradients to add to, random states, masks. A
pair's functions see a plan, a context and tensors, but no module, so `optimized.tapes` can repeat their launches for
the same plan and the same addresses.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from reference.float8.kept_tensor import KeptTensor, operand
from reference.float8.quantized_tensor import QuantizedTensor
from reference.memory.offload_marks import mark_not_offload
from reference.recipe import Recipe
from reference.recipes.quantized import (
    Accumulation,
    Operand,
    Parts,
    Quantized,
    Stacked,
    Weight,
    as_dtype,
    dequantize,
    stacked,
)
from reference.recipes.quantizer import Gemm, Quantizer
from reference.recipes.roles import Roles
from reference.state.threads import here
from reference.state.weight_store import weight_gradient
from reference.support.nested import tensors_of
from reference.support.notice import say_once

State = tuple[list[torch.Tensor], list[torch.Tensor]]  # tensors read besides the pair's, and those of them changed


class Precision:
    """The quantizers of a module's roles, kept from forward to forward.

    Attributes:
        quantizers: role's name → its quantizer.
        gemms: part → those of a linear map.
        of_columns: column of the forward's state → the quantizer of the weight that has it.
        recipe, forward, backward: in FP8 the recipe and the state of each direction that they are made of; else None.
        dtype: of what a backward reads, where the recipe leaves it in high precision.
        key: hashable; everything but tensors that their launches depend on.
        fp8: whether tensors of the forward are cast to FP8.
        stateful: whether scales are updated after a step.
        grad_max: of a stateful one, what its gradients' scales are for (`FP8TensorMeta.scaled_max`).
    """

    def __init__(
        self,
        roles: Roles,
        quantizers: Mapping[str, Quantizer],
        recipe: Recipe | None = None,
        forward: Any = None,
        backward: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.roles, self.quantizers, self.dtype = roles, quantizers, dtype
        self.recipe, self.forward, self.backward = recipe, forward, backward
        self.gemms = {
            one.part: Gemm(
                quantizers[one.input.name],
                quantizers[one.weight.name],
                quantizers[one.grad.name],
                (Accumulation() if recipe is None else recipe.accumulation(one.part))._replace(
                    shared=one.shared, tokens=one.tokens
                ),
                one.parameter,
            )
            for one in roles.gemms
        }
        self.stateful = recipe is not None and recipe.history_rows is not None
        self.grad_max = recipe.scaled_max(False) if recipe is not None and self.stateful else None
        self.of_columns = {one.weight.column: quantizers[one.weight.name] for one in roles.gemms}
        keys = tuple([one.key for one in quantizers.values()])
        self.key: Hashable = (keys, tuple([one.how for one in self.gemms.values()]))
        self._forward_ones = [quantizers[role.name] for role in roles.all if role.is_forward]
        self.fp8 = True in [one.fp8 for one in self._forward_ones]
        self._distinct: list[list[Quantizer]] | None = None  # made later: a compiler would guard the tensors' identity

    def with_quantizers(self, quantizers: Mapping[str, Quantizer]) -> "Precision":
        """The same with other quantizers of its roles, which show what these do."""
        return Precision(self.roles, quantizers, self.recipe, self.forward, self.backward, self.dtype)

    def state(self, backward: bool) -> State:
        """The tensors of its quantizers in one direction."""
        if self._distinct is None:
            grads = [self.quantizers[role.name] for role in self.roles.all if not role.is_forward]
            self._distinct = [_distinct(self._forward_ones), _distinct(grads)]
        read: list[torch.Tensor] = []
        changed: list[torch.Tensor] = []
        for one in self._distinct[backward]:
            read += one.tensors()
            changed += one.changes()
        return read, changed


def _distinct(quantizers: list[Quantizer]) -> list[Quantizer]:
    """One quantizer for each set of tensors: quantizers of different columns share a state's tensors."""
    found = {tuple(map(id, one.tensors())): one for one in quantizers}
    return [one for tensors, one in found.items() if tensors]


class ModuleContext:
    """One forward of one module.

    Attributes:
        module: whose forward it is; a backward may be all that still holds it.
        store: what the module keeps of its weights.
        quantizers, gemms: of its roles, and of its linear maps (`Precision`).
        key: for plans; everything but tensors that its launches depend on.
        playable: False where a weight is cast for later microbatches, its gradient is delayed or added to main_grad,
            ranks share its tokens, or results are no plain tensors.
    """

    reads: tuple[torch.Tensor | None, ...] = ()  # the interface of a BlockContext

    __slots__ = (
        *("_is_first", "_precision", "fp8", "gemms", "is_first_microbatch", "key", "module", "quantizers", "store"),
    )

    def __init__(self, module: Any, precision: Precision, is_first_microbatch: bool | None = None) -> None:
        self.module, self.store, self._precision = module, module._store, precision
        self.quantizers, self.gemms, self.fp8 = precision.quantizers, precision.gemms, precision.fp8
        self._is_first = is_first_microbatch is True
        self.is_first_microbatch = is_first_microbatch if precision.fp8 else None
        self.key: Hashable = (precision.key, self.is_first_microbatch)

    @property
    def modules(self) -> "tuple[ModuleContext, ...]":
        return (self,)

    @property
    def gemm(self) -> Gemm:
        """The one of a layer with one linear map."""
        return self.gemms[""]

    @property
    def playable(self) -> bool:
        """See the attributes of the class."""
        module = self.module
        reads_all = self.is_first_microbatch is None or len(self._kept()) == len(self._cast_weights())
        communicates = getattr(module, "cp_name", None) is not None
        later = module.fuse_wgrad_accumulation or module.delay_wgrad_compute
        return reads_all and module.taped and not (later or communicates)

    @property
    def settled(self) -> bool:
        """Whether a backward reads the gradients' scales as they are: no other recipe has come since its forward."""
        precision = self._precision
        return precision.grad_max is None or precision.backward.scaled_max == precision.grad_max

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of its quantizers; None in 16 bits."""
        return self._precision.recipe

    @property
    def stateful(self) -> Any:
        """The module, if its scales are updated after a step; else None."""
        return self.module if self._precision.stateful else None

    def state(self, backward: bool) -> State:
        """The tensors that the pair's functions read besides their arguments, and those that they change."""
        read, changed = self._precision.state(backward)
        if not backward and self.is_first_microbatch is not None:
            read += [t for one in self._kept() for t in tensors_of(one)]
        return read, changed

    def unwrap_weight(self, x: Any, trains: bool) -> Any:
        """A weight kept in FP8, in the form for the pair's functions: quantized, or dequantized outside of FP8.

        A quantized tensor that is no weight is read: a layer casts its input by its own recipe.
        """
        if isinstance(x, tuple):
            return self._unwrap_parts(x, trains)
        if not isinstance(x, QuantizedTensor):
            return x
        if not (isinstance(x, KeptTensor) and x.is_weight and self.gemms):
            say_once("quantized input", "a layer's input is quantized: it is read, and cast by the layer's own recipe")
            return x.numbers()
        quantizer = self._quantizer_of(x)
        wide = quantizer.dtype_t
        found = operand(x, transpose=trains and quantizer.fp8 and wide is None)
        if quantizer.fp8 and (wide is None or not trains):
            return found
        numbers = dequantize(found.row, x.shape[1], x.dtype)
        if wide is not None:
            return found._replace(column=Operand(as_dtype(numbers, wide).t()))
        say_once("dequantized", "a weight that is kept in FP8 is used outside of FP8 autocast: it is dequantized")
        return numbers

    def _unwrap_parts(self, parts: tuple[Any, ...], trains: bool) -> Any:
        """A weight of several parts, each kept in FP8: `Parts`, or dequantized outside of FP8."""
        found: Any = [self.unwrap_weight(one, trains) for one in parts]
        quantizer = self._quantizer_of(parts[0])
        if not quantizer.fp8:
            return stacked(found)
        row, columns = Stacked(tuple([one.row for one in found])), [one.column for one in found]
        if columns[0] is None:
            return Parts(row, None)
        if quantizer.dtype_t is not None:
            return Parts(row, Operand(stacked([one.codes.t() for one in columns]).t()))
        return Parts(row, Stacked(tuple(columns)))

    def _quantizer_of(self, kept: Any) -> Quantizer:
        """That of a weight which is kept in FP8; parts of one weight, and a weight shared with a layer in which it has
        another place, have that of the first."""
        of_columns = self._precision.of_columns
        return of_columns.get(kept._kept.column) or next(iter(of_columns.values()))

    def weight(self, gemm: Gemm, w: torch.Tensor | Weight, transpose: bool) -> Any:
        """A quantized weight: `w` itself, the copy that an earlier microbatch made under its name, or a new cast.

        It is a `Quantized`, except where `w` is `Parts`.
        """
        if isinstance(w, Parts):
            _stay(w)
            return w
        name, quantizer, recipe, cached = gemm.parameter, gemm.weight, type(self.recipe), None
        first = self.is_first_microbatch if quantizer.fp8 else None
        if first is False:
            cached = self.store.cast(name, recipe, quantizer, transpose)
        if cached is None:
            found = w if isinstance(w, Quantized) else quantizer.quantize(w.contiguous(), transpose)
            if first is not None:
                self.store.keep(name, recipe, found, quantizer)
        elif quantizer.dtype_t is None:
            found = cached
        else:
            of_backward = None
            if transpose and not isinstance(w, Quantized):
                of_backward = quantizer.of_backward(w, cached.row)
            found = cached._replace(column=w.column if isinstance(w, Quantized) else of_backward)
        _stay(found)
        return found

    def weight_grad(self, gemm: Gemm, g: Quantized, x: Operand | None, dtype: torch.dtype) -> torch.Tensor | None:
        """dw in `dtype`; None where the module computes it later (`delay_wgrad_compute`)."""
        module, name, how, is_first = self.module, gemm.parameter, gemm.how, self._is_first
        if module.delay_wgrad_compute:
            self.store.delay(self, name, lambda: weight_gradient(module, name, g, x, dtype, how, is_first))
            return None
        return weight_gradient(module, name, g, x, dtype, how, is_first)

    def weight_grad_once(
        self, gemm: Gemm, g: Quantized, x: Operand | None, dtype: torch.dtype, wanted: bool
    ) -> Callable[[], torch.Tensor | None]:
        """`weight_grad` at its first call, or None if it is not wanted; later calls return the same tensor."""
        found: list[torch.Tensor | None] = []

        def once() -> torch.Tensor | None:
            if not found:
                found.append(self.weight_grad(gemm, g, x, dtype) if wanted else None)
            return found[0]

        return once

    def _kept(self) -> list[Quantized]:
        """The weights that an earlier microbatch has cast, if this one uses them."""
        if self.is_first_microbatch is not False:
            return []
        store, recipe = self.store, type(self.recipe)
        found = [store.cast(one.parameter, recipe, one.weight, transpose=True) for one in self._cast_weights()]
        return [one for one in found if one is not None]

    def _cast_weights(self) -> list[Gemm]:
        """The linear maps whose weights are cast to FP8."""
        return [one for one in self.gemms.values() if one.weight.fp8]


def _stay(weight: Weight) -> None:
    """Keep FP8 copies of a weight where they are, although a context of `get_cpu_offload_context` is open."""
    if here().offloading:
        for codes in tensors_of(weight.column):
            if codes.dtype.itemsize == 1:  # numbers of 16 bits are put together anew
                mark_not_offload(codes)


class WeightRequest(NamedTuple):
    """Arguments of `ModuleContext.weight`, and the context."""

    context: ModuleContext
    gemm: Gemm
    w: Any
    transpose: bool


def quantize_weights(*wanted: WeightRequest) -> list[Any]:
    """Several modules' weights, in one launch if all of them are cast now, with their transposes."""
    casts = [one for one in wanted if one.gemm.weight.fp8 and one.context.is_first_microbatch is not False]
    xs = [one.w.contiguous() for one in wanted if one.transpose and not isinstance(one.w, (Quantized, Parts))]
    ws: Sequence[Any] = [one.w for one in wanted]
    if len(casts) == len(xs) == len(wanted) and len({x.dtype for x in xs}) == 1:
        first, *others = [one.gemm.weight for one in wanted]
        ws = first.quantize_together(others, xs)
    return [one.context.weight(one.gemm, w, one.transpose) for one, w in zip(wanted, ws, strict=True)]


class BlockContext(NamedTuple):
    """One forward of several modules' GEMMs and of the ops between them.

    Attributes:
        modules: their contexts.
        random: states that forward draws from and advances; None where nothing is dropped.
        reads: other tensors that are no arguments, such as a mask, or angles.
    """

    modules: tuple[ModuleContext, ...] = ()
    random: tuple[torch.Tensor | None, ...] = ()
    reads: tuple[torch.Tensor | None, ...] = ()

    @property
    def playable(self) -> bool:
        """Whether every module's part is."""
        for one in self.modules:  # noqa: SIM110 (without a generator's calls, in each step)
            if not one.playable:
                return False
        return True

    @property
    def settled(self) -> bool:
        """Whether every module's part is."""
        for one in self.modules:  # noqa: SIM110
            if one._precision.stateful and not one.settled:
                return False
        return True

    @property
    def stateful(self) -> Any:
        """The first module whose scales are updated after a step."""
        for one in self.modules:
            if one._precision.stateful:
                return one.module
        return None

    def state(self, backward: bool) -> State:
        read: list[torch.Tensor] = []
        changed: list[torch.Tensor] = []
        for one in self.modules:
            # Without weights cast earlier, a module's state is that of its quantizers.
            some, of_them = (one._precision if one.is_first_microbatch is None else one).state(backward)
            read += some
            changed += of_them
        if not backward:
            drawn = [t for t in self.random if t is not None]
            read += drawn
            changed += drawn
        read += [t for t in self.reads if t is not None]
        return read, changed

    def unwrap_weight(self, x: Any, trains: bool) -> Any:
        """`ModuleContext.unwrap_weight` of the module that x's scales belong to, else of the first; without modules, x
        is read."""
        if len(self.modules) > 1 and isinstance(x, KeptTensor) and x.is_weight:
            for one in self.modules:
                if one.module.says_scales(x):
                    return one.unwrap_weight(x, trains)
        if self.modules:
            return self.modules[0].unwrap_weight(x, trains)
        return x.numbers() if isinstance(x, QuantizedTensor) else x
