"""What a function does on the GPU besides launching: seen once, and placed while a tape is recorded (`tape.py`)."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from optimized import launch

aten = torch.ops.aten
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_VIEWS = {aten._unsafe_view.default, aten.detach.default, aten.alias.default, aten._reshape_alias.default}

# Ops of torch's that a tape may hold, and which of their results are tensors that are read later.
FOREIGN = {
    aten._scaled_dot_product_cudnn_attention.default: (0, 1),
    aten._scaled_dot_product_cudnn_attention_backward.default: (0, 1, 2),
}
MOST_MOVED = 32 << 20  # bytes of such a result: copying more takes longer than what a tape saves
_DRAWN = (6, 7)  # of cuDNN's attention with dropout: what it drew from torch's generator

# Others, with their variants that write where a tape says: in 16 bits the gradients of q, k and v are put side by side.
_INTO = {aten.cat.default: aten.cat.out}


def _draws(func: Any, args: Sequence[Any]) -> bool:
    return func is aten._scaled_dot_product_cudnn_attention.default and args[5] > 0


def _read_later(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    return FOREIGN[func] + (_DRAWN if _draws(func, args) else ())


class Place(NamedTuple):
    """A tensor in the storage of another: arena, scratch, input or state, by number."""

    number: int
    offset: int  # bytes from the other's first
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, sources: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The tensor."""
        whole = sources[self.number]
        assert whole is not None
        if (self.offset, self.shape, self.stride, self.dtype) == (0, whole.shape, whole.stride(), whole.dtype):
            return whole
        first = (whole.storage_offset() * whole.element_size() + self.offset) // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), first, self.shape, self.stride)  # type: ignore[call-overload]


def storage_of(x: torch.Tensor) -> int:
    """Which storage a tensor lies in."""
    return x.untyped_storage().data_ptr()


def place_of(x: torch.Tensor, sources: Sequence[torch.Tensor | None]) -> Place:
    """Where a tensor lies (number -1: in none of them)."""
    storage = storage_of(x)
    for number, whole in enumerate(sources):
        if whole is not None and storage_of(whole) == storage:
            # Not from addresses: that of a tensor without elements is 0.
            offset = int(x.storage_offset()) * x.itemsize - int(whole.storage_offset()) * whole.itemsize
            return Place(number, offset, x.shape, x.stride(), x.dtype)
    return Place(-1, 0, x.shape, x.stride(), x.dtype)


class Lying(NamedTuple):
    """A tensor by its address, which does not keep its memory."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Any) -> Any:
        """Where a tensor lies, or each of a list; what is no tensor, as it is."""
        if isinstance(x, list):
            return [cls.of(one) for one in x]
        return cls(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.stride, strict=True))
        whole = torch._C._construct_storage_from_data_pointer(self.address, self.device, size * self.dtype.itemsize)
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        return made.set_(whole, 0, self.shape, self.stride)  # type: ignore[call-overload]


def _tensors(x: Any) -> Any:
    """What `Lying.of` was given."""
    if isinstance(x, list):
        return [_tensors(one) for one in x]
    return x.tensor() if isinstance(x, Lying) else x


class Foreign(NamedTuple):
    """An op of torch's to be called again, its results copied to where they lay."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: dict[int, Lying | None]

    @property
    def capturable(self) -> bool:
        """Not if it draws from torch's generator, of which only torch's own captures know."""
        return not _draws(self.func, self.args)

    def again(self, stream: int) -> None:
        """Call it on torch's current stream."""
        made = self.func(*_tensors(self.args), **self.kwargs)
        for position, to in self.results.items():
            if to is not None:
                to.tensor().copy_(made[position])


class Into(NamedTuple):
    """An op of torch's to be called again, writing where it wrote."""

    func: Any
    args: list[Any]
    out: Lying

    @property
    def capturable(self) -> bool:
        """Always."""
        return True

    def again(self, stream: int) -> None:
        """Call it on torch's current stream."""
        self.func(*_tensors(self.args), out=self.out.tensor())


class Allocation:
    """A tensor that a function allocated: `until` is the number of the first allocation after its end."""

    def __init__(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        self.storage, self.size, self.address = StorageWeakRef(storage), storage.nbytes(), x.data_ptr()
        self.like = (x.shape, x.stride(), x.dtype)
        self.until = sys.maxsize


class Watch(TorchDispatchMode):
    """Sees what a function does on the GPU besides launching, and places what it allocates."""

    transparent = True  # ops past the dispatcher may stay there

    def __init__(self) -> None:
        super().__init__()
        self.usable = True
        self.allocated: list[Allocation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            return self.allocate(func, args, kwargs)
        if func is aten.clone.default and args[0].is_contiguous():
            made = self.allocate(aten.empty_like.default, args, {})
            self.copy(made, args[0])
            return made
        if func in FOREIGN:
            return self.call(func, args, kwargs)
        if func in _INTO:
            return self.call_into(func, args)
        self.usable = self.usable and (func.is_view or func in _VIEWS)
        return func(*args, **kwargs)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op of torch's that a tape may hold: its results where ours would lie."""
        made = list(func(*args, **kwargs))
        for position in _read_later(func, args):
            made[position] = self.moved(made[position])
        return tuple(made)

    def call_into(self, func: Any, args: Any) -> Any:
        """An op of torch's that a tape may hold, and that can write where ours would."""
        return self.allocate(func, args, {})

    def moved(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """A copy (cuDNN makes no sums of rows where no backward wants them)."""
        if x is None:
            return None
        self.usable = self.usable and x.nbytes <= MOST_MOVED
        like = (x.shape, x.stride())
        to = self.allocate(aten.empty_strided.default, like, {"dtype": x.dtype, "device": x.device})
        return to.copy_(x)

    def allocate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """An ordinary tensor, noted."""
        for one in self.allocated:
            if one.storage.expired():
                one.until = min(one.until, len(self.allocated))
        made: torch.Tensor = func(*args, **kwargs)
        self.allocated.append(Allocation(made))
        return made

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """A whole tensor."""
        to.copy_(source)


class Record(Watch):
    """The second and later runs: tensors go where the kind's measurement said."""

    def __init__(self, rooms: Sequence[Place], sources: Sequence[torch.Tensor | None], tape: launch.Launches) -> None:
        super().__init__()
        self.rooms, self.sources, self.tape = iter(rooms), sources, tape

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = super().call(func, args, kwargs)
        results = {position: Lying.of(made[position]) for position in _read_later(func, args)}
        self.tape.append(Foreign(func, Lying.of(list(args)), kwargs, results))
        return made

    def call_into(self, func: Any, args: Any) -> Any:
        out = self.allocate(func, args, {})
        self.tape.append(Into(_INTO[func], Lying.of(list(args)), Lying.of(out)))
        return _INTO[func](*args, out=out)

    def allocate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        return next(self.rooms).of(self.sources)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)
        self.tape.append(launch.Copy(to.data_ptr(), source.data_ptr(), to.nbytes))
