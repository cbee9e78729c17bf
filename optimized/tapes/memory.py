"""Where the tensors of a played call lie: in its arena, its scratch, a result, an input or its module's state."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# The storages that a call's tensors lie in have numbers. The arena has what is saved for backward, the scratch has the
# temporaries. From `FIRST` on come the call's results, or its inputs, state and results where a saved tensor is.
ARENA, SCRATCH, FIRST = range(3)
_ALIGNMENT = 512  # bytes, as of PyTorch's allocator

Tensors = Sequence[torch.Tensor | None]
Places = Mapping[int, torch.Tensor]  # by a result's number
NOWHERE: Places = {}


class Place(NamedTuple):
    """Where a tensor lies in the storage of another tensor, which has `number` in a list."""

    number: int
    offset: int  # bytes from the other tensor's first
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, sources: Tensors) -> torch.Tensor:
        """The tensor in this place."""
        whole = sources[self.number]
        assert whole is not None
        if (self.offset, self.shape, self.stride, self.dtype) == (0, whole.shape, whole.stride(), whole.dtype):
            return whole
        first = (whole.storage_offset() * whole.element_size() + self.offset) // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), first, self.shape, self.stride)  # type: ignore[call-overload]


def storage_of(x: torch.Tensor) -> int:
    """The address of a tensor's storage."""
    return x.untyped_storage().data_ptr()


def place_of(x: torch.Tensor, sources: Tensors) -> Place:
    """Where a tensor lies; the number is -1 if it is in none of `sources`."""
    storage = storage_of(x)
    for number, whole in enumerate(sources):
        if whole is not None and storage_of(whole) == storage:
            # Not computed from addresses: a tensor without elements has the address 0.
            offset = int(x.storage_offset()) * x.itemsize - int(whole.storage_offset()) * whole.itemsize
            return Place(number, offset, x.shape, x.stride(), x.dtype)
    return Place(-1, 0, x.shape, x.stride(), x.dtype)


class TensorRef(NamedTuple):
    """A tensor by its address; it does not keep the memory."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Any) -> Any:
        """The reference to a tensor, or to each of a list; anything else is returned as it is."""
        if isinstance(x, list):
            return [cls.of(one) for one in x]
        return cls(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x

    @classmethod
    def moved(cls, x: Any, move: Callable[[int], int]) -> Any:
        """What `of` gave, at other addresses; `move` gives an address its other one."""
        if isinstance(x, list):
            return [cls.moved(one, move) for one in x]
        return x._replace(address=move(x.address)) if isinstance(x, TensorRef) else x

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.stride, strict=True))
        whole = torch._C._construct_storage_from_data_pointer(self.address, self.device, size * self.dtype.itemsize)
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        return made.set_(whole, 0, self.shape, self.stride)  # type: ignore[call-overload]


def tensors_of(x: Any) -> Any:
    """The inverse of `TensorRef.of`."""
    if isinstance(x, list):
        return [tensors_of(one) for one in x]
    return x.tensor() if isinstance(x, TensorRef) else x


class Allocation:
    """A tensor that a function allocated; `until` is the number of the first allocation after its end."""

    def __init__(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        self.storage, self.size, self.address = StorageWeakRef(storage), storage.nbytes(), x.data_ptr()
        self.like = (x.shape, x.stride(), x.dtype)
        self.until = sys.maxsize


def arrange(
    allocated: Sequence[Allocation], results: dict[int, int], saved: set[int | None]
) -> tuple[list[Place], tuple[int, int]]:
    """A place for each allocation, and the bytes of the arena and of the scratch.

    A temporary lies in memory of a result or of the arena that is used later, or else in the scratch: the largest one
    first, each at the first place that is free while it lives.

    Args:
        allocated: all allocations in their order.
        results: by the number of an allocation, which result it is.
        saved: the numbers of the allocations that are saved for backward.
    """
    sizes = [max(1, -(-one.size // _ALIGNMENT)) * _ALIGNMENT for one in allocated]
    where: dict[int, tuple[int, int]] = {}
    taken: dict[int, list[_Taken]] = {}  # by the number of a storage
    room: dict[int, int] = {}  # bytes in which temporaries may lie, besides the scratch
    arena = 0
    for i, one in enumerate(allocated):
        if i in results:
            number, first = FIRST + results[i], 0
            room[number] = one.size
        elif i in saved or not one.size:  # all tensors without elements have the address 0
            number, first = ARENA, arena
            room[ARENA] = arena = arena + sizes[i]
        else:
            continue
        where[i] = number, first
        taken.setdefault(number, []).append(_Taken(first, first + sizes[i], i, sys.maxsize))
    scratch = 0
    for i in sorted(set(range(len(allocated))) - set(where), key=lambda i: -sizes[i]):
        one = allocated[i]
        for number in (*room, SCRATCH):
            others = taken.setdefault(number, [])
            first = _first_free(others, i, one.until, sizes[i])
            if number == SCRATCH or first + one.size <= room[number]:
                break
        if number == SCRATCH:
            scratch = max(scratch, first + sizes[i])
        where[i] = number, first
        others.append(_Taken(first, first + sizes[i], i, one.until))
    return [Place(*where[i], *one.like) for i, one in enumerate(allocated)], (arena, scratch)  # type: ignore[arg-type]


class _Taken(NamedTuple):
    """Bytes of a storage, from allocation `since` on and before allocation `until`."""

    first: int
    end: int
    since: int
    until: int


def _first_free(taken: Sequence[_Taken], since: int, until: int, size: int) -> int:
    """The first byte of `size` bytes that nothing has taken at any time in between."""
    first = 0
    for other in sorted(taken):
        if other.since >= until or other.until <= since:
            continue
        if first + size <= other.first:
            break
        first = max(first, other.end)
    return first


class Results:
    """How a call's results are allocated.

    The first has memory of its own, since it may live longer. The others share one tensor if they have one dtype; each
    starts at a multiple of 512 bytes. Those that have a place (`reference.state.gradient_places`) lie there.

    Args:
        results: of the first call.
        places: by a result's number where it lies, if that has its shape and dtype.

    Attributes:
        like: shape and dtype of each, or None.
        placed: the numbers of those that lie in a place.
        sizes: elements of those that share a tensor, and of the padding between them.
    """

    def __init__(self, results: Tensors = (), places: Places = NOWHERE) -> None:
        self.like = [None if x is None else (x.shape, x.dtype) for x in results]
        self.placed = [i for i, place in places.items() if self.like[i] == (place.shape, place.dtype)]
        self.sizes: list[int] = []
        self._dtype = torch.uint8
        self._parts: list[
            tuple[int, torch.Size] | None
        ] = []  # for each but the first: its number in `sizes`, its shape
        others = [None if i in self.placed else x for i, x in enumerate(results)][1:]
        shared = [x for x in others if x is not None]
        if len(shared) > 1 and len({x.dtype for x in shared}) == 1:
            self._dtype = shared[0].dtype
            for x in others:
                self._parts.append(None if x is None else (len(self.sizes), x.shape))
                if x is not None:
                    padding = -x.numel() % (_ALIGNMENT // x.element_size())
                    self.sizes += [x.numel(), padding] if padding else [x.numel()]

    def allocate(
        self, device: torch.device, places: Places = NOWHERE
    ) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
        """The results, and what they lie in."""
        at = {i: places[i] for i in self.placed}
        own = self.like[:1] if self.sizes else self.like
        first = tuple(
            [
                None if x is None else at[i] if i in at else torch.empty(x[0], dtype=x[1], device=device)
                for i, x in enumerate(own)
            ]
        )
        if not self.sizes:
            return first, first
        whole = torch.empty(sum(self.sizes), dtype=self._dtype, device=device)
        parts = whole.unsafe_split_with_sizes(self.sizes)  # unsafe: autograd does not see them as views
        others = [
            at.get(i) if part is None else parts[part[0]] if len(part[1]) == 1 else parts[part[0]].view(*part[1])
            for i, part in enumerate(self._parts, 1)
        ]
        return (*first, *others), (*first, whole, *[place for i, place in at.items() if i])
