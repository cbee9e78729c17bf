"""Messages in each other's memory: what a rank receives is what was sent, however streams run, in a graph or not."""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.streams import CPU, U8, Streams, part

from reference.parallel import messages, ordered_reduce
from reference.parallel.messages import ROOMS, Messages
from reference.parallel.ordered_reduce import Band, Part
from reference.support import groups

SIZE = 300


def joined(streams: Streams, ranks: int, rooms: int = ROOMS) -> list[Messages]:
    """The messages of all ranks, with rooms to each other."""
    members = []
    for streams.rank in range(ranks):
        members.append(Messages(None, CPU))
        assert members[-1].prepare(range(1, ranks), SIZE)
        assert members[-1].prepare([1], SIZE, rooms)
    return members


def chains(streams: Streams, ranks: int, draw: random.Random, rooms: int = ROOMS) -> list[bool]:
    """Of some chains of `ordered_reduce`, one after the other: whether each band is what the rank before has sent."""
    found: list[bool] = []
    drawn = [(draw.randint(1, 3), draw.randint(1, ordered_reduce.BANDS)) for _ in range(4)]
    members = joined(streams, ranks, rooms)
    for streams.rank in range(ranks):
        member, before = members[streams.rank], (streams.rank - 1) % ranks
        for number, (rounds, bands) in enumerate(drawn):
            due: dict[int, Any] = {}
            for what, piece, band in ordered_reduce.schedule(streams.rank, ranks, rounds, bands):
                key = 64 * number + 8 * piece + band
                if what == "send":
                    x = part(streams.rank, 0, key, SIZE)
                    member.send(x, (streams.rank + 1) % ranks, SIZE, rooms, band)
                elif what == "receive":
                    # What the first rank gets is of the round before.
                    wanted, room = part(before, 0, key if streams.rank else key - 8, SIZE), torch.zeros(SIZE, dtype=U8)
                    due[band] = member.receive(room, before, SIZE, rooms, band), room, wanted
                elif piece or streams.rank:
                    work, room, wanted = due.pop(band)
                    work.wait()
                    streams.enqueue(lambda x=room, y=wanted: found.append(torch.equal(x, y)))  # type: ignore[misc]
    streams.run(draw)
    assert len(found) == sum(bands * (rounds * ranks - 1) for rounds, bands in drawn)
    return found


@pytest.mark.parametrize("rooms", [1, ROOMS])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_pass_through_ranks_whatever_is_late(ranks: int, rooms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer rooms than bands, too."""
    for seed in range(20):
        assert all(chains(Streams(ranks, monkeypatch), ranks, random.Random(seed), rooms))


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_one_rank_replays_another_may_call(ranks: int, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is the work of one call, done again; each rank draws when it calls and when it replays its graph.

    Without the words nothing holds a rank back, and the streams of this test find it.
    """
    wrong = 0
    for seed in range(20):
        draw, streams, found = random.Random(seed), Streams(ranks, monkeypatch), list[bool]()
        if not guarded:
            monkeypatch.setattr("reference.parallel.peer_memory.swap", lambda *args: None)
        members = joined(streams, ranks)
        for streams.rank in range(ranks):
            rank, member, graph = streams.rank, members[streams.rank], list[Any]()
            step = torch.zeros(1, dtype=torch.int64)  # a graph reads what is in memory when it is replayed
            own, places = torch.zeros(SIZE, dtype=U8), [torch.zeros(SIZE, dtype=U8) for _ in range(ranks)]

            def write(rank: int = rank, step: torch.Tensor = step, own: torch.Tensor = own) -> None:
                own.copy_(part(rank, 0, int(step), SIZE))

            def check(
                rank: int = rank,
                step: torch.Tensor = step,
                places: list[torch.Tensor] = places,
                found: list[bool] = found,
            ) -> None:
                others = [other for other in range(len(places)) if other != rank]
                found.append(all(torch.equal(places[other], part(other, 0, int(step), SIZE)) for other in others))
                step.add_(1)

            for _ in range(8):
                if graph and draw.random() < 0.5:
                    streams.queues[rank].extend(graph)
                    continue
                before = len(streams.queues[rank])
                streams.enqueue(write)
                for distance in range(1, ranks):
                    member.send(own, (rank + distance) % ranks, SIZE)
                for distance in range(1, ranks):
                    source = (rank - distance) % ranks
                    member.receive(places[source], source, SIZE)
                streams.enqueue(check)
                graph = list(streams.queues[rank])[before:]
        streams.run(draw)
        assert len(found) == 8 * ranks
        wrong += found.count(False)
    assert bool(wrong) is not guarded


def test_messages_of_several_sizes_have_rooms_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(2, monkeypatch)
    members, sizes = joined(streams, 2), (1, messages.LEAST, messages.LEAST + 1, 3 * messages.LEAST)
    for streams.rank in range(2):
        for size in sizes:
            assert members[streams.rank].prepare([1], size)
        members[streams.rank].prepare([1], 5)  # that are there
    assert streams.asked[0] == streams.asked[1] == 2 + 2  # two of `joined`, of which one fits; two and four times it
    places = []
    for streams.rank in range(2):
        for size in sizes:
            members[streams.rank].send(part(streams.rank, 0, size, size), 1 - streams.rank, size)
            places.append((torch.zeros(size, dtype=U8), part(1 - streams.rank, 0, size, size)))
            members[streams.rank].receive(places[-1][0], 1 - streams.rank, size)
    streams.run(random.Random(1))
    assert all(torch.equal(found, wanted) for found, wanted in places)


def test_a_capture_makes_no_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(2, monkeypatch)
    member = joined(streams, 2)[1]
    monkeypatch.setattr(member, "_device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made = list(streams.asked)
    assert member.prepare([1], SIZE)
    assert not member.prepare([1], 2 * messages.LEAST)
    assert streams.asked == made


def test_after_an_error_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun is forgotten, so a rank could take one band for another."""
    streams = Streams(2, monkeypatch)
    member = joined(streams, 2)[0]
    streams.rank = 0
    groups.under_way.works[0] = member.send(torch.zeros(SIZE, dtype=U8), 1, SIZE)
    groups.abandon()
    assert not groups.under_way.works
    with pytest.raises(RuntimeError, match="a sum over these ranks has ended by an error"):
        member.prepare([1], SIZE)


def over(streams: Streams, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ordered_reduce` send the messages of these streams."""
    members = joined(streams, ranks)
    monkeypatch.setattr(messages, "of_group", lambda group, device: members[streams.rank])
    monkeypatch.setattr(ordered_reduce, "ranks_of", lambda group: (streams.rank, ranks))


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 512), (3, 1536), (2, 200), (4, 4096)])
def test_a_sum_has_the_words_of_one_process(
    ranks: int, rows: int, scatter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, or a rank's rows, twice; work of streams is done later, so parts are computed then, too."""
    for seed in range(5):
        streams = Streams(ranks, monkeypatch)
        over(streams, ranks, monkeypatch)
        given = torch.randn(2, ranks, 2, rows, 3, generator=torch.Generator().manual_seed(seed))
        outs = []

        def later(to: torch.Tensor, compute: Callable[[], torch.Tensor], streams: Streams = streams) -> torch.Tensor:
            def act() -> None:
                to.copy_(compute())

            streams.enqueue(act)
            return to

        for streams.rank, turn in itertools.product(range(ranks), range(2)):
            mine = given[turn, streams.rank]

            def add(piece: int, band: Band, start: torch.Tensor | None, mine: torch.Tensor = mine) -> torch.Tensor:
                added = mine[piece, slice(*band)]
                return later(torch.empty_like(added), lambda: added if start is None else start + added)

            def last(piece: int, band: Band, start: torch.Tensor | None, add: Part = add) -> torch.Tensor:
                sums = add(piece, band, start)
                return later(torch.empty(sums.shape, dtype=torch.float16), lambda: sums)

            out = ordered_reduce.passed_on("some", (rows, 3), add, last, 2, torch.float16, scatter, CPU)
            outs.append((streams.rank, turn, out))
        streams.run(random.Random(seed))
        for rank, turn, out in outs:
            sums = torch.zeros(rows, 3)
            for piece, one in itertools.product(range(2), range(ranks)):
                sums = sums + given[turn, one, piece]
            assert torch.equal(out, sums.half().chunk(ranks)[rank] if scatter else sums.half())


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_computes_something_else_before_it_waits(
    ranks: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: rank 0 when it has sent its first parts, the others before theirs."""
    streams, rows = Streams(ranks, monkeypatch), 768
    over(streams, ranks, monkeypatch)
    for streams.rank in range(ranks):
        done: list[str] = []

        def add(piece: int, band: Band, start: torch.Tensor | None, done: list[str] = done) -> torch.Tensor:
            done.append("a part")
            return torch.zeros(band[1] - band[0], 3)

        meanwhile = functools.partial(done.append, "something else")
        ordered_reduce.passed_on("some", (rows, 3), add, add, rounds, torch.float32, True, CPU, meanwhile)
        parts, before = rounds * len(ordered_reduce.bands(rows)), 0 if streams.rank else len(ordered_reduce.bands(rows))
        assert done == ["a part"] * before + ["something else"] + ["a part"] * (parts - before)
    streams.run(random.Random(0))


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_are_gathered_in_the_order_of_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, outs = Streams(ranks, monkeypatch), []
    over(streams, ranks, monkeypatch)
    for streams.rank in range(ranks):
        for turn in range(2):
            outs.append((turn, ordered_reduce.gathered_rows("some", part(streams.rank, 0, turn, 60).view(20, 3))))
    streams.run(random.Random(0))
    for turn, out in outs:
        assert torch.equal(out, torch.cat([part(rank, 0, turn, 60).view(20, 3) for rank in range(ranks)]))
