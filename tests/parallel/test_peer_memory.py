"""Exchanges in each other's memory: what a rank receives is there until it has read it, however streams run."""

import contextlib
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reference.parallel import ordered_reduce, peer_memory
from reference.parallel.peer_memory import Messages, PeerMemory

CPU, U8 = torch.device("cpu"), torch.uint8
Work = tuple[Callable[[], bool], Callable[[], None]]  # whether it may begin, and what it does


def _do(change: Callable[[Any], Any], value: Any) -> None:
    change(value)


class Streams:
    """The streams of some ranks, whose work is done later, in any order that they allow."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queues: list[deque[Work]] = [deque() for _ in range(ranks)]
        self.rank = 0  # whose calls are made
        self.memory: dict[int, list[torch.Tensor]] = {}
        for name in ("copy", "write", "wait", "shared"):
            monkeypatch.setattr(peer_memory, name, getattr(self, name))
        monkeypatch.setattr(dist, "get_rank", lambda group: self.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
        monkeypatch.setattr(dist, "barrier", lambda group: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        # All streams of a rank are one, as with CUDA_DEVICE_MAX_CONNECTIONS=1.
        stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: None)
        stream.wait_event = lambda event: None
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: stream)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *device, priority: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda one: contextlib.nullcontext())

    def enqueue(self, act: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.queues[self.rank].append((ready, act))

    def shared(self, size: int, device: torch.device, group: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        every = self.memory.setdefault(size, [torch.zeros(size, dtype=U8) for _ in self.queues])
        return every[self.rank], every

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.enqueue(lambda: _do(to.copy_, source))

    def _word(self, address: int) -> torch.Tensor:
        """The int32 at an address."""
        for memory in (x for every in self.memory.values() for x in every):
            if 0 <= address - memory.data_ptr() < peer_memory.WORDS:
                return memory.view(torch.int32)[(address - memory.data_ptr()) // 4]
        raise AssertionError(address)

    def write(self, address: int, value: int) -> None:
        self.enqueue(lambda: _do(self._word(address).fill_, value))

    def wait(self, address: int, value: int) -> None:
        self.enqueue(lambda: None, lambda: int(self._word(address)) >= value)

    def run(self, draw: random.Random) -> None:
        """Do all work; a rank may be as far ahead of the others as its waits allow."""
        while any(self.queues):
            ready = [queue for queue in self.queues if queue and queue[0][0]()]
            assert ready, "all ranks wait"
            # One rank for some time, so that ranks are far apart.
            queue = draw.choice(ready)
            for _ in range(draw.randint(1, 9)):
                if queue and queue[0][0]():
                    queue.popleft()[1]()


def part(sender: int, receiver: int, number: int, size: int) -> torch.Tensor:
    return torch.full((size,), (37 * sender + 11 * receiver + 5 * number) % 256, dtype=U8)


def wrong(streams: Streams, ranks: int, draw: random.Random) -> int:
    """How many parts a rank reads that are not what was sent."""
    members = []
    for streams.rank in range(ranks):
        members.append(PeerMemory(None, CPU))
        members[-1]._grow(4096)
    found = []
    sizes = [[draw.randint(0, 300) for _ in range(ranks)] for _ in range(12)]
    for streams.rank in range(ranks):
        for number, size in enumerate(sizes):
            own = [part(streams.rank, receiver, number, size[streams.rank]) for receiver in range(ranks)]
            received = members[streams.rank].exchange(own, size)
            wanted = [part(sender, streams.rank, number, size[sender]) for sender in range(ranks)]
            for x, y in zip(received, wanted, strict=True):
                streams.enqueue(lambda x=x, y=y: found.append(torch.equal(x, y)))  # type: ignore[misc]
    streams.run(draw)
    assert len(found) == ranks * ranks * len(sizes)
    return found.count(False)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_is_received_stays_until_it_is_read(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        assert wrong(Streams(ranks, monkeypatch), ranks, random.Random(seed)) == 0


def test_one_half_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of this test find a rank that writes where another still reads."""
    streams = Streams(3, monkeypatch)
    monkeypatch.setattr(peer_memory, "HALVES", 1)
    assert any(wrong(streams, 3, random.Random(seed)) for seed in range(5))


def chains(streams: Streams, ranks: int, draw: random.Random) -> list[bool]:
    """Of some chains of `ordered_reduce`, one after the other: whether each band is what the rank before has sent."""
    found: list[bool] = []
    drawn = [(draw.randint(1, 3), draw.randint(1, ordered_reduce.BANDS)) for _ in range(4)]
    members = []
    for streams.rank in range(ranks):
        members.append(Messages(None, CPU))
        members[-1]._fit(512)
    for streams.rank in range(ranks):
        member, before = members[streams.rank], (streams.rank - 1) % ranks
        for number, (rounds, bands) in enumerate(drawn):
            due: list[Any] = []
            for what, piece, band in ordered_reduce.schedule(streams.rank, ranks, rounds, bands):
                key = 64 * number + 8 * piece + band
                if what == "send":
                    member.send(part(streams.rank, 0, key, 300))
                elif what == "receive":
                    # What the first rank gets is of the round before.
                    wanted, room = part(before, 0, key if streams.rank else key - 8, 300), torch.zeros(300, dtype=U8)
                    due.append((member.receive(room), room, wanted))
                elif piece or streams.rank:
                    work, room, wanted = due.pop(0)
                    work.wait()
                    streams.enqueue(lambda x=room, y=wanted: found.append(torch.equal(x, y)))  # type: ignore[misc]
    streams.run(draw)
    assert len(found) == sum(bands * (rounds * ranks - 1) for rounds, bands in drawn)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_pass_through_ranks_whatever_is_late(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        assert all(chains(Streams(ranks, monkeypatch), ranks, random.Random(seed)))


def test_fewer_rooms_than_bands_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "ROOMS", 2)
    waiting = 0
    for seed in range(5):
        try:
            chains(Streams(2, monkeypatch), 2, random.Random(seed))
        except AssertionError as error:
            waiting += "all ranks wait" in str(error)
    assert waiting


def test_there_are_as_many_rooms_as_bands() -> None:
    assert peer_memory.ROOMS >= ordered_reduce.BANDS
