"""Messages between ranks of one host in the memory of their GPUs, which a CUDA graph may hold.

A message goes to a room of the receiver's memory (`reference.parallel.peer_memory`). A room has one sender, and is
guarded by two words: FULL in the receiver's memory, BUSY in the sender's. Both begin as 0:

    send        wait until BUSY is 0, write 1 to it;  copy;      write 1 to FULL
    receive     wait until FULL is 1, write 0 to it;  copy out;  write 0 to BUSY

Each is done on another stream, which begins when torch's current stream is at the call, and for which that waits
where the result is used. So a message arrives and is copied while something else is computed. Sends take turns on two,
by their numbers, so that the link is in use while words are written.

What arrives may also be used where it is. Then torch's current stream waits, and says when the room is free again:

    arrive      wait until FULL is 1, write 0 to it        used        write 0 to BUSY

Nothing is counted: which room a message takes follows from its distance (how many ranks on the receiver is), its
size, kind and number, which are in the call. So ranks agree about it even where one replays a graph while another makes
the calls one by one, and a graph may be replayed any number of times. Words wait for words alone, so the host waits for
nothing.

No wait comes before what the other rank needs to end it, even if a GPU does the work of all streams in the order in
which the host gave it (`CUDA_DEVICE_MAX_CONNECTIONS=1`): ranks send before they receive what depends on it, and receive
before they compute.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reference.parallel import peer_memory
from reference.support import groups, streams

ROOMS = 4
"""Of a distance and a size, where messages have numbers."""
LEAST = 1 << 16  # bytes of a room; others are twice as large, and so on
FULL, BUSY, BOTH = 0, 4, 8  # bytes: where a room's words are, and how many they are
BEATS = 16  # of as many calls one has a beat


_Key = tuple[int, str, int, int]  # of a box: distance, kind, how many rooms, and bytes of each


class _Box(NamedTuple):
    """The rooms for messages of one distance, kind and size.

    Attributes:
        own: this rank's memory: words, then rooms for what it receives.
        there: the memory of the rank to which it sends.
        back: that of the rank from which it receives.
        size: bytes of a room.
    """

    own: torch.Tensor
    there: torch.Tensor
    back: torch.Tensor
    size: int

    def room(self, memory: torch.Tensor, number: int, size: int) -> torch.Tensor:
        first = peer_memory.WORDS + number * self.size
        return memory[first : first + size]


class UnderWay(NamedTuple):
    """As `dist.isend` and `dist.irecv` return it: what is sent or received."""

    events: tuple[torch.cuda.Event, ...]
    abandoned: Callable[[], None]

    def wait(self) -> None:
        """Let torch's current stream wait until it is there, or until what was sent may be written again."""
        for event in self.events:
            streams.current().wait_event(event)


class Messages:
    """What the ranks of a group send each other.

    Args:
        group: a process group of ranks of one host.
        device: this rank's.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._name, self._device = groups.name_of(group), device  # a name: the group is a weak key
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._boxes: dict[_Key, _Box] = {}
        self._streams: Any = None  # two of sends, one of receives
        self._broken = False
        self._calls = 0
        self._beat = peer_memory.Beat()

    def prepare(self, distances: Iterable[int], size: int, rooms: int = 1, kind: str = "") -> bool:
        """Have rooms for messages of up to `size` bytes; all ranks of the group call it alike.

        Those of different kinds have rooms of their own.

        Returns:
            False in a CUDA graph's capture if there are none yet: to make them the ranks wait for each other.
        """
        if self._broken:
            raise RuntimeError(
                "a sum over these ranks has ended by an error, and their messages no longer agree; a new process group "
                "is accepted."
            )
        keys = [(distance, kind, rooms, _class_of(size)) for distance in distances]
        missing = [key for key in keys if key not in self._boxes]
        if missing and self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        for key in missing:
            distance, _, rooms, room = key
            own, every = peer_memory.fresh(rooms * room, self._device, self._name)
            there, back = every[(self.rank + distance) % self.ranks], every[(self.rank - distance) % self.ranks]
            self._boxes[key] = _Box(own, there, back, room)
        return True

    def abandoned(self) -> None:
        """After an error: it is not known which words are written."""
        self._broken = True

    def _beside(self, which: int) -> Any:
        """A stream of sends (0, 1) or that of receives (2), which begins when torch's current stream is here."""
        if self._streams is None:
            self._streams = [torch.cuda.Stream(self._device, priority=-1) for _ in range(3)]
        stream = self._streams[which]
        stream.wait_stream(streams.current(self._device))
        return stream

    def _box(self, distance: int, kind: str, rooms: int, size: int) -> _Box:
        return self._boxes[distance % self.ranks, kind, rooms, _class_of(size)]

    def send(self, x: torch.Tensor, to: int, size: int, rooms: int = 1, number: int = 0, kind: str = "") -> UnderWay:
        """Send contiguous uint8 [n] to a rank; its memory stays until the result has been waited for.

        Args:
            x: at most `size` bytes.
            to: the rank.
            size, rooms, kind: as they were given to `prepare`.
            number: of the message; with each number the next room is taken, and the other stream, in turn.
        """
        box, stream = self._box(to - self.rank, kind, rooms, size), self._beside(number % 2)
        number %= rooms
        with streams.On(stream):
            peer_memory.swap(box.own.data_ptr() + BOTH * number + BUSY, 0, 1)
            peer_memory.copy(box.room(box.there, number, x.numel()), x)
            peer_memory.write(box.there.data_ptr() + BOTH * number + FULL, 1)
            return UnderWay((stream.record_event(),), self.abandoned)

    def receive(self, x: torch.Tensor, source: int, size: int, rooms: int = 1, number: int = 0) -> UnderWay:
        """Receive contiguous uint8 [n] from a rank, in the order of calls; the other arguments are `send`'s."""
        box, number = self._box(self.rank - source, "", rooms, size), number % rooms
        stream = self._beside(2)
        with streams.On(stream):
            peer_memory.swap(box.own.data_ptr() + BOTH * number + FULL, 1, 0)
            peer_memory.copy(x, box.room(box.own, number, x.numel()))
            peer_memory.write(box.back.data_ptr() + BOTH * number + BUSY, 0)
            return UnderWay((stream.record_event(),), self.abandoned)

    def room(self, source: int, size: int, kind: str) -> torch.Tensor:
        """Where messages from a rank arrive, uint8 [size]; of a kind with one room."""
        box = self._box(self.rank - source, kind, 1, size)
        return box.room(box.own, 0, size)

    def arrive(self, source: int, size: int, kind: str) -> None:
        """Let torch's current stream wait until a message from a rank is in `room`."""
        peer_memory.swap(self._box(self.rank - source, kind, 1, size).own.data_ptr() + FULL, 1, 0)

    def used(self, source: int, size: int, kind: str) -> None:
        """`room` may be written again when torch's current stream is here."""
        peer_memory.write(self._box(self.rank - source, kind, 1, size).back.data_ptr() + BUSY, 0)

    def beat(self) -> None:
        """In one of `BEATS` calls start a `Beat`; all ranks call it alike."""
        self._calls += 1
        if self._calls % BEATS == 1 and not torch.cuda.is_current_stream_capturing():
            self._beat.start(groups.group_of(self._name), self._device)


def _class_of(size: int) -> int:
    """Bytes of a room for so many: a power of two, so that there are few sizes."""
    return max(LEAST, 1 << max(0, size - 1).bit_length())


def of_group(group: str, device: torch.device) -> Messages | None:
    """The messages of a group, if its ranks can write to each other's memory.

    Whether they can is found out by the first call, which is none in a capture.
    """
    if device.type != "cuda":
        return None
    return peer_memory.member(groups.group_of(group), device, Messages)
