"""Watches what a function does on the GPU besides launching; while a tape is recorded, it also places the tensors.

A function may make our own launches, allocations, views and copies, and it may take rows out of a tensor or put rows
into one. It may call cuDNN's attention, whose results lie where PyTorch allocates them: they are copied to their
places. A function that does anything else is not `usable`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimized.tapes.memory import Allocation, Place, TensorRef, Tensors, tensors_of
from optimized.tapes.tape import Copy, Tape

aten = torch.ops.aten
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_VIEWS = {aten._unsafe_view.default, aten.detach.default, aten.alias.default, aten._reshape_alias.default}

# Composite ops, which a mode sees in inference mode alone, say that they are views. Those that are, of every tensor:
_VIEWS_OF_VIEWS = {aten.unflatten.int}
# And those that may copy. Elsewhere their copy comes as `clone`.
_MAY_COPY = {aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints}

# Ops of torch's that a tape may hold, and which of their results are read later.
TORCH_OPS = {
    aten._scaled_dot_product_cudnn_attention.default: (0, 1),
    aten._scaled_dot_product_cudnn_attention_backward.default: (0, 1, 2),
}
MOST_MOVED = 32 << 20  # bytes of such a result: copying more takes longer than a tape saves
_DRAWN = (6, 7)  # results of cuDNN's attention with dropout: what it drew from torch's generator


def _copy(source: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(source)


# Other ops that a tape may hold, each with a function that writes its result to a given tensor. In 16 bits the
# gradients of q, k and v are concatenated; with grouped queries q is taken out of the groups; with a cache of keys and
# values angles are taken from their table.
_OUT_VARIANTS: dict[Any, Any] = {
    aten.cat.default: aten.cat.out,
    aten.clone.default: _copy,
    aten.index_select.default: aten.index_select.out,
}
# And keys and values are put there; places of packed sequences that have no token become zeros.
_IN_PLACE = {aten.index_copy_.default, aten.masked_fill_.Scalar}


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an op consists of others and may copy, although it says that it is a view."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return composite and func not in _VIEWS_OF_VIEWS


def _draws(func: Any, args: Sequence[Any]) -> bool:
    # PyTorch leaves out the last arguments that have their defaults: without dropout and mask, dropout_p as well.
    return func is aten._scaled_dot_product_cudnn_attention.default and len(args) > 5 and args[5] > 0


def _read_later(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    return TORCH_OPS[func] + (_DRAWN if _draws(func, args) else ())


class TorchOp(NamedTuple):
    """An op of torch's that is called again; its results are copied to where they lay."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: dict[int, TensorRef | None]

    @property
    def capturable(self) -> bool:
        """Not if it draws from torch's generator, which only torch's own captures know."""
        return not _draws(self.func, self.args)

    def moved(self, move: Callable[[int], int]) -> "TorchOp":
        results = {position: TensorRef.moved(to, move) for position, to in self.results.items()}
        return self._replace(args=TensorRef.moved(self.args, move), results=results)

    def play(self, stream: int) -> None:
        made = self.func(*tensors_of(self.args), **self.kwargs)
        for position, to in self.results.items():
            if to is not None:
                to.tensor().copy_(made[position])


class TorchOutOp(NamedTuple):
    """An op of torch's that is called again and writes where it wrote."""

    func: Any
    args: list[Any]
    out: TensorRef
    capturable: bool = True

    def moved(self, move: Callable[[int], int]) -> "TorchOutOp":
        return self._replace(args=TensorRef.moved(self.args, move), out=TensorRef.moved(self.out, move))

    def play(self, stream: int) -> None:
        self.func(*tensors_of(self.args), out=self.out.tensor())


class Watch(TorchDispatchMode):
    """Sees what a function does on the GPU besides launching, and places what it allocates."""

    transparent = True  # ops that bypass the dispatcher may go on doing so

    def __init__(self) -> None:
        super().__init__()
        self.usable = True
        self.allocated: list[Allocation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAY_COPY:
            return self.viewed(func, args, kwargs)
        if func in _ALLOCATIONS:
            return self.allocate(func, args, kwargs)
        if func is aten.clone.default and args[0].is_contiguous():
            made = self.allocate(aten.empty_like.default, args, {})
            self.copy(made, args[0])
            return made
        if func in TORCH_OPS:
            return self.call(func, args, kwargs)
        if func in _OUT_VARIANTS:
            return self.call_into(func, args, kwargs)
        if func in _IN_PLACE:
            return self.call_in_place(func, args)
        self.usable = self.usable and (func.is_view or func in _VIEWS) and not _is_composite(func)
        return func(*args, **kwargs)

    def viewed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Call an op of `_MAY_COPY`; its copy is a `clone`."""
        made: torch.Tensor = func(*args, **kwargs)
        if torch._C._is_alias_of(made, args[0]):  # type: ignore[attr-defined]
            return made
        copy: torch.Tensor = self.call_into(aten.clone.default, args[:1], {"memory_format": torch.contiguous_format})
        return copy.view(made.shape)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an op of `TORCH_OPS`; copy its results to allocations that a tape can place."""
        made = list(func(*args, **kwargs))
        for position in _read_later(func, args):
            made[position] = self.moved(made[position])
        return tuple(made)

    def call_into(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an op of `_OUT_VARIANTS`, whose result a tape can place."""
        return self.allocate(func, args, kwargs)

    def call_in_place(self, func: Any, args: Any) -> Any:
        """Call an op of `_IN_PLACE`."""
        return func(*args)

    def moved(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """A copy of a result; None stays None (cuDNN makes no sums of rows where no backward wants them)."""
        if x is None:
            return None
        self.usable = self.usable and x.nbytes <= MOST_MOVED
        like = (x.shape, x.stride())
        to = self.allocate(aten.empty_strided.default, like, {"dtype": x.dtype, "device": x.device})
        return to.copy_(x)

    def allocate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Allocate a tensor as usual, and note it."""
        for one in self.allocated:
            if one.storage.expired():
                one.until = min(one.until, len(self.allocated))
        made: torch.Tensor = func(*args, **kwargs)
        self.allocated.append(Allocation(made))
        return made

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a whole tensor."""
        to.copy_(source)


class TapeRecorder(Watch):
    """Watches a run that is recorded: tensors go to the places that the first run's measurement gave."""

    def __init__(self, places: Sequence[Place], sources: Tensors, tape: Tape) -> None:
        super().__init__()
        self.places, self.sources, self.tape = iter(places), sources, tape

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = super().call(func, args, kwargs)
        results = {position: TensorRef.of(made[position]) for position in _read_later(func, args)}
        self.tape.append(TorchOp(func, TensorRef.of(list(args)), kwargs, results))
        return made

    def call_into(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = self.allocate(func, args, kwargs)
        self.tape.append(TorchOutOp(_OUT_VARIANTS[func], TensorRef.of(list(args)), TensorRef.of(out)))
        return _OUT_VARIANTS[func](*args, out=out)

    def call_in_place(self, func: Any, args: Any) -> Any:
        self.tape.append(TorchOp(func, TensorRef.of(list(args)), {}, {}))
        return func(*args)

    def allocate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        return next(self.places).of(self.sources)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)
        self.tape.append(Copy(to.data_ptr(), source.data_ptr(), to.nbytes))
