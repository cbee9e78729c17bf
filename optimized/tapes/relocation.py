"""A tape at other addresses: what was recorded once is launched again wherever a call's tensors lie.

Launches depend on addresses in one way only: their arguments contain them. Each address is that of a byte in one of the
call's tensors (its results, arena, scratch, inputs and state), or of memory that stays where it is. So all arguments of
a tape are packed into one buffer, and beside it stands where in the buffer there are addresses, of which tensor, and
how far from its first byte. At other addresses the tape is a copy of the buffer with these words written anew, and with
tensor maps that the driver has given the other address.

A Python function may look at an address, too: whether vectors of 16 bytes may be read, or whether two tensors are one.
So a tape serves only calls whose tensors start at the same remainders of 16 and are the same ones twice.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch

from optimized.cuda import launch, tensor_map
from optimized.tapes.memory import storage_of
from optimized.tapes.tape import Tape

_WORD, _STRUCT, _MAP = 8, 64, 128  # bytes of a scalar, of what a struct starts at a multiple of, of a tensor map
_REMAINDER = 15  # of an address, in a mask


class NotRelocatable(Exception):
    """A tape that serves its own addresses only."""


class RecordedTensors:
    """Where the tensors of the recorded call lay.

    Args:
        tensors: all of them; a call at other addresses has the like in the same order.
        apart: of which the storage also holds what is no matter of the call; it counts as one of their own.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], apart: Sequence[torch.Tensor] = ()) -> None:
        self.addresses = [x.data_ptr() for x in tensors]
        self._bytes = [_extent(x) for x in tensors]
        alone = [any(x is one for one in apart) for x in tensors]
        self.storages = [x.data_ptr() if own else storage_of(x) for x, own in zip(tensors, alone, strict=True)]
        self._sizes = [
            _extent(x) if own else x.untyped_storage().nbytes() for x, own in zip(tensors, alone, strict=True)
        ]
        self._least = min(filter(None, self.storages), default=0)
        self.first = [self.storages.index(one) for one in self.storages]  # of those that share its storage

    def find(self, address: int) -> tuple[int, int] | None:
        """The number of a tensor and the offset in it; None where it lies elsewhere.

        Raises:
            NotRelocatable: it lies in a tensor's storage, outside of the tensor.
        """
        if address < self._least:  # it is another number
            return None
        for number, (start, size) in enumerate(zip(self.addresses, self._bytes, strict=True)):
            if start <= address < start + size:
                return number, address - start
        for start, size in zip(self.storages, self._sizes, strict=True):
            if start <= address < start + size:
                raise NotRelocatable
        return None

    def are_like(self, addresses: Sequence[int], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the recorded launches are those of a call with other tensors, but for addresses."""
        if _ones(addresses) != _ones(self.addresses):
            return False
        for now, then in zip(addresses, self.addresses, strict=True):
            if (now ^ then) & _REMAINDER:
                return False
        for number, first in enumerate(self.first):
            if number != first and not (
                addresses[number] - addresses[first] == self.addresses[number] - self.addresses[first]
                and storage_of(tensors[number]) == storage_of(tensors[first])
            ):
                return False
        return True


def _extent(x: torch.Tensor) -> int:
    """Bytes from the first to the last of a tensor's elements."""
    if not x.numel():
        return 0
    return (1 + sum((n - 1) * abs(step) for n, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _ones(addresses: Sequence[int]) -> list[int]:
    """For each address the number of the last that is equal."""
    last = dict(zip(addresses, range(len(addresses)), strict=True))
    return [last[one] for one in addresses]


class RelocatableTape:
    """A recorded tape by the tensors of its call.

    Its arguments are packed when it moves for the first time: where addresses repeat at once it never does.
    """

    def __init__(self, tape: Tape, tensors: Sequence[torch.Tensor], apart: Sequence[torch.Tensor] = ()) -> None:
        self._tensors = RecordedTensors(tensors, apart)
        self._entries = tape.entries
        self._packed = False

    def _pack(self) -> None:
        self._places: list[tuple[int, int, int]] = []  # of an address: its word, the tensor, the offset
        self._maps: list[tuple[int, int, int]] = []  # of a tensor map: its first byte, the tensor, the offset
        packed = bytearray()
        starts: list[int] = []  # of each argument: its first byte in the buffer
        self._first: list[int] = []  # of each entry: the number of its first argument
        for entry in self._entries:
            self._first.append(len(starts))
            if not isinstance(entry, launch.Launch):
                if not hasattr(entry, "moved"):
                    raise NotRelocatable
                entry.moved(lambda address: self._moved(address, self._tensors.addresses))  # may be NotRelocatable, too
                continue
            for argument, scalar in zip(entry.args, entry.scalars, strict=True):
                is_struct = isinstance(argument, launch.ByValue)
                packed += bytes(-len(packed) % (_STRUCT if is_struct else _WORD))
                starts.append(len(packed))
                if is_struct:
                    self._add_struct(len(packed), argument)
                elif type(argument) is int:
                    self._add_address(len(packed), argument)
                packed += argument.storage.tobytes() if is_struct else scalar.to_bytes(_WORD, "little")
        packed += bytes(-len(packed) % _WORD)
        self._buffer = np.frombuffer(packed, np.int64)
        self._starts = np.array(starts, np.int64)
        words = np.array(self._places, np.int64).reshape(-1, 3)
        self._words, self._numbers, self._offsets = np.ascontiguousarray(words.T)
        self._packed = True

    def _add_address(self, start: int, address: int) -> None:
        found = self._tensors.find(address)
        if found is not None:
            self._places.append((start // _WORD, *found))

    def _add_struct(self, start: int, struct: launch.ByValue) -> None:
        storage, maps = struct.storage, dict(struct.maps)
        if not storage.flags.c_contiguous or (storage.dtype == np.uint8 and storage.nbytes != _MAP * len(maps)):
            raise NotRelocatable
        for first, address in maps.items():
            found = self._tensors.find(address)
            if found is not None:
                self._maps.append((start + first, *found))
        data, size = storage.tobytes(), storage.dtype.itemsize
        for at in (begin + field for begin in range(0, storage.nbytes, size) for field in _integers(storage.dtype)):
            if any(first <= at < first + _MAP for first in maps):
                continue
            if at % _WORD:
                raise NotRelocatable
            self._add_address(start + at, int.from_bytes(data[at : at + _WORD], "little"))

    def _moved(self, address: int, addresses: Sequence[int]) -> int:
        found = self._tensors.find(address)
        return address if found is None else addresses[found[0]] + found[1]

    def at(self, addresses: Sequence[int], tensors: Sequence[torch.Tensor]) -> Tape | None:
        """The tape for a call whose tensors lie at other addresses; None if it is not the same but for these.

        Raises:
            NotRelocatable: it cannot be moved at all.
        """
        if not self._tensors.are_like(addresses, tensors):
            return None
        if not self._packed:
            self._pack()
        room = np.empty(len(self._buffer) + _STRUCT // _WORD, np.int64)
        skipped = -room.ctypes.data % _STRUCT // _WORD
        buffer = room[skipped : skipped + len(self._buffer)]
        buffer[:] = self._buffer
        buffer[self._words] = np.array(addresses, np.int64)[self._numbers] + self._offsets
        base = buffer.ctypes.data
        for start, number, offset in self._maps:
            if addresses[number] != self._tensors.addresses[number]:
                tensor_map.replace_address(base + start, addresses[number] + offset)
        pointers = self._starts + base
        first, kept = pointers.ctypes.data, (pointers, room)
        tape = Tape()
        for entry, number in zip(self._entries, self._first, strict=True):
            if isinstance(entry, launch.Launch):
                tape.append(entry.with_arguments(first + _WORD * number, kept))
            else:
                tape.append(entry.moved(lambda address: self._moved(address, addresses)))
        return tape


@functools.cache
def _integers(dtype: np.dtype) -> tuple[int, ...]:
    """Where in a struct of that type there are integers of 64 bits: their first bytes."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return tuple(i * base.itemsize + at for i in range(int(np.prod(shape))) for at in _integers(base))
    if dtype.fields is not None:
        return tuple(offset + at for one, offset, *_ in dtype.fields.values() for at in _integers(one))
    return (0,) if dtype.kind in "iu" and dtype.itemsize == _WORD else ()
