"""Exchanges in each other's memory: what a rank receives is there until it has read it, however streams run."""

import contextlib
import gc
import itertools
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
from reference.support import groups

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
        monkeypatch.setattr(groups, "name_of", lambda group: "some")
        monkeypatch.setattr(groups, "group_of", lambda name: None)
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
    monkeypatch.setattr(peer_memory, "ROOMS", 1)
    waiting = 0
    for seed in range(5):
        try:
            chains(Streams(2, monkeypatch), 2, random.Random(seed))
        except AssertionError as error:
            waiting += "all ranks wait" in str(error)
    assert waiting


def test_there_are_as_many_rooms_as_bands() -> None:
    assert peer_memory.ROOMS >= ordered_reduce.BANDS


def test_after_an_error_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun is forgotten, so a rank could take one band for another."""
    Streams(2, monkeypatch)
    member, room = Messages(None, CPU), torch.zeros(300, dtype=U8)
    groups.under_way.works[0] = member.receive(room)
    groups.abandon()
    assert not groups.under_way.works
    for again in (member.send, member.receive):
        with pytest.raises(RuntimeError, match="a sum over these ranks has ended by an error"):
            again(room)


def test_the_memory_of_a_group_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Streams(2, monkeypatch)
    monkeypatch.setattr(peer_memory, "obstacle", lambda group, device: "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x: Any = SimpleNamespace(is_cuda=True, device=CPU)

    class Group:
        """With a weak reference."""

    group = Group()
    made = peer_memory.of_group(group, x, PeerMemory)
    assert peer_memory.of_group(group, x, PeerMemory) is made
    del group
    gc.collect()
    assert not [one for one in peer_memory._OF_GROUPS if isinstance(one, Group)]


@pytest.mark.parametrize(
    ("of_ranks", "wanted", "found"),
    [
        ([("a", 0, None), ("b", 1, None)], None, "the ranks are on several hosts"),
        ([("a", 0, None), ("a", 0, None)], None, "two ranks have a GPU of one number"),
        ([("a", 0, False), ("a", 1, False)], False, "peer_memory=False"),
        ([("a", 0, None), ("a", 1, None)], None, "a GPU cannot write to the memory of another"),
        ([("a", 0, True), ("a", 1, False)], True, None),
    ],
)
def test_what_is_in_the_way_is_the_same_for_all_ranks(
    of_ranks: list[Any], wanted: bool | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(into: list[Any], mine: Any, group: Any) -> None:
        into[:] = of_ranks if isinstance(mine, tuple) else [mine, False]

    monkeypatch.setattr(dist, "get_world_size", lambda group: len(of_ranks))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    device = torch.device("cuda", 0)
    if found is not None:
        assert peer_memory.obstacle(None, device, wanted) == found
        return
    with pytest.raises(RuntimeError, match=r"peer_memory is \[True, False\] on the ranks of a group"):
        peer_memory.obstacle(None, device, wanted)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("short", [0, 5])
def test_a_gather_has_the_parts_of_all_ranks_in_order(
    in_place: bool, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some bytes, twice, into an output that may lack the last of them."""
    for seed in range(10):
        ranks, streams, outs = 3, Streams(3, monkeypatch), []
        members = []
        for streams.rank in range(ranks):
            members.append(PeerMemory(None, CPU))
            members[-1]._grow(4096)
        for streams.rank, number in itertools.product(range(ranks), range(2)):
            out = torch.zeros(3 * 40 - short, dtype=U8)
            place = out[40 * streams.rank : 40 * streams.rank + 40]
            own = part(streams.rank, 0, number, 40)
            if in_place and place.numel() == 40:
                own = place.copy_(own)
            members[streams.rank].gather(own, out)
            outs.append((out, torch.cat([part(sender, 0, number, 40) for sender in range(ranks)])[: 120 - short]))
        streams.run(random.Random(seed))
        assert all(torch.equal(found, wanted) for found, wanted in outs)
