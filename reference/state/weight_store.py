"""What a module keeps of its weights between calls: casts for later microbatches, main_grad, delayed gradients.

A context (`reference.nn.core.context`) has the store of its module: a pair of functions asks it for a weight's cast of
an earlier microbatch, and gives it a weight's gradient.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from reference.numbers.formats import WIDE_DTYPES
from reference.recipes.quantized import Accumulation, Operand, Quantized, per_tensor, wgrad
from reference.recipes.quantizer import Quantizer
from reference.state import gradient_places
from reference.support.nested import flatten, rebuild

Compute = Callable[[], torch.Tensor | None]


class WeightStore:
    """The store of one module, which it does not refer to: a circle would keep both in memory.

    Attributes:
        casts: (weight's name, type of the recipe, `Quantizer.kept_key`) → its cast, for later microbatches.
        delayed: of each backward without weights' gradients its context, and how each weight's is computed.
    """

    __slots__ = ("casts", "delayed")

    def __init__(self) -> None:
        self.casts: dict[tuple[Any, ...], Quantized] = {}
        self.delayed: deque[tuple[Any, dict[str, Compute]]] = deque()

    # --- casts ---------------------------------------------------------------------------------------

    def keep(self, name: str, recipe: type, cast: Quantized, quantizer: Quantizer) -> None:
        """Keep a weight's cast for later microbatches, in place of one that another recipe has made.

        Where a backward reads the weight in 16 bits, it is that of its own forward.
        """
        if quantizer.dtype_t is not None:
            cast = cast._replace(column=None)
        for key in [one for one in self.casts if one[0] == name]:
            del self.casts[key]
        self.casts[name, recipe, quantizer.kept_key] = cast

    def cast(self, name: str, recipe: type, quantizer: Quantizer, transpose: bool) -> Quantized | None:
        """The cast of a weight by an earlier microbatch under a recipe of this kind, if it fits this quantizer."""
        found = self.casts.get((name, recipe, quantizer.kept_key))
        if found is None:
            found = self.casts.get((name, recipe))  # out of an older pickle, which does not say what made it
        if found is None or found.row.codes.dtype != quantizer.dtype:
            return None
        column = found.column
        if transpose and quantizer.dtype_t is None and (column is None or column.codes.dtype != quantizer.dtype):
            return None
        if found.row.codes.is_inference() and not torch.is_inference_mode_enabled():  # autograd takes no such tensor
            tensors, form = flatten(found)
            found = rebuild(form, tuple([t if t is None else t.clone() for t in tensors]))
            self.keep(name, recipe, found, quantizer)
        return found

    def packed(self) -> dict[tuple[Any, ...], Any]:
        """The casts for a pickle: their tensors, those of FP8 as bytes with their dtype, and their form."""
        found: dict[tuple[Any, ...], Any] = {}
        for key, cast in self.casts.items():
            tensors, form = flatten(cast)
            of_bytes = [t if t is None or t.dtype.itemsize > 1 else (t.view(torch.uint8), t.dtype) for t in tensors]
            found[key] = (of_bytes, form)
        return found

    def unpack(self, packed: dict[tuple[Any, ...], Any]) -> None:
        """Take what `packed` gave; pickles of 1.0 hold lists of the codes, their transpose, the scale and a layout."""
        for key, one in packed.items():
            tensors, form = (one[:3], None) if isinstance(one, list) else one
            found = tuple([t[0].view(t[1]) if isinstance(t, tuple) else t for t in tensors])
            self.casts[key] = per_tensor(*found) if form is None else rebuild(form, found)

    def delay(self, context: Any, name: str, compute: Compute) -> None:
        """Keep the gradient of weight `name` for `backward_dw`; those of one forward's context belong together."""
        if not (self.delayed and self.delayed[-1][0] is context and name not in self.delayed[-1][1]):
            self.delayed.append((context, {}))
        self.delayed[-1][1][name] = compute


def main_grad_of(module: Any, name: str) -> torch.Tensor | None:
    """The tensor to which the gradient of a module's weight is added, with `fuse_wgrad_accumulation`; else None."""
    if not module.fuse_wgrad_accumulation:
        return None
    weight = getattr(module, name)
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            f"{type(module).__name__}: fuse_wgrad_accumulation=True and {name} has no main_grad; "
            f"a float32, bfloat16 or float16 tensor of the weight's shape is accepted."
        )
    fits = main_grad.shape == weight.shape and main_grad.device == weight.device
    if main_grad.dtype not in WIDE_DTYPES or not fits:
        raise RuntimeError(
            f"{type(module).__name__}: {name}.main_grad is {main_grad.dtype} {list(main_grad.shape)} on "
            f"{main_grad.device}; a float32, bfloat16 or float16 tensor {list(weight.shape)} on {weight.device} is "
            f"accepted."
        )
    return main_grad


def weight_gradient(
    module: Any, name: str, g: Quantized, x: Operand | None, dtype: torch.dtype, how: Accumulation, is_first: bool
) -> torch.Tensor | None:
    """dw in `dtype`; with `fuse_wgrad_accumulation` dw is added to main_grad, and the result is what .grad gets.

    `is_first`: main_grad is zeroed first.
    """
    main_grad = main_grad_of(module, name)
    if main_grad is None:
        if torch.compiler.is_compiling() or not gradient_places.here.taken or how.tokens is not None:
            return wgrad(g, x, dtype, how, None)
        with gradient_places.written_to(module._parameters.get(name)):
            return wgrad(g, x, dtype, how, None)
    weight = getattr(module, name)
    if is_first or getattr(weight, "overwrite_main_grad", False):
        main_grad.zero_()
    wgrad(g, x, dtype, how, main_grad)
    return grad_of_accumulated(weight)


def grad_of_accumulated(weight: Any) -> torch.Tensor | None:
    """What a weight's `.grad` gets whose gradient was added to main_grad: nothing, or zeros in Megatron's convention.

    A weight with an attribute `grad_added_to_main_grad` belongs to a data parallelism that waits for its hooks, which
    run only if there is a gradient. Transformer Engine returns memory without numbers, or zeros with `zero_out_wgrad`.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "a weight with an attribute grad_added_to_main_grad under torch.compile is not offered: a compiled "
            "backward would set the attribute once, when it is traced; eager mode is accepted."
        )
    weight.grad_added_to_main_grad = True
    return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
