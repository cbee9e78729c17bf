"""Exchanges in each other's memory: what a rank receives is there until it has read it, however streams run."""

import gc
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.streams import CPU, U8, Streams, part

from reference.parallel import peer_memory
from reference.parallel.peer_memory import PeerMemory


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
