"""Rows of which each rank computes its own: what is read is what was sent, however streams run, in a graph or not."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.streams import CPU, U8, Streams, part

from reference.parallel import exchange, messages, ordered_reduce
from reference.parallel.messages import Messages
from reference.parallel.tensor import Shared
from reference.recipes.quantized import Operand
from reference.support import groups

SIZE = 300


def over(streams: Streams, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `exchange` send messages of these streams."""
    members = []
    for streams.rank in range(ranks):
        members.append(Messages(None, CPU))
        for kind in exchange.KINDS:
            assert members[-1].prepare(range(1, ranks), SIZE, kind=kind)
    monkeypatch.setattr(messages, "of_group", lambda group, device: members[streams.rank])
    monkeypatch.setattr(ordered_reduce, "ranks_of", lambda group: (streams.rank, ranks))


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_reads_what_the_others_sent_it(ranks: int, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two operands at once, many times in the same rooms; some of the work is a graph's, which is done again.

    Without the words nothing holds a rank back, and the streams of this test find it.
    """
    wrong = 0
    for seed in range(20):
        draw, streams, found = random.Random(seed), Streams(ranks, monkeypatch), list[bool]()
        over(streams, ranks, monkeypatch)
        if not guarded:
            monkeypatch.setattr("reference.parallel.peer_memory.swap", lambda *args: None)
        for streams.rank in range(ranks):
            rank, graph = streams.rank, list[Any]()
            step = torch.zeros(1, dtype=torch.int64)  # a graph reads what is in memory when it is replayed
            given = {kind: [torch.zeros(SIZE, dtype=U8) for _ in range(ranks)] for kind in ("a", "b")}

            def write(rank: int = rank, step: torch.Tensor = step, given: Any = given) -> None:
                for number, parts in enumerate(given.values()):
                    for to, x in enumerate(parts):
                        x.copy_(part(rank, to, 2 * int(step) + number, SIZE))

            def check(
                x: torch.Tensor,
                source: int,
                number: int,
                rank: int = rank,
                step: torch.Tensor = step,
                found: Any = found,
            ) -> None:
                found.append(torch.equal(x, part(source, rank, 2 * int(step) + number, SIZE)))

            for _ in range(8):
                if graph and draw.random() < 0.5:
                    streams.queues[rank].extend(graph)
                    continue
                before = len(streams.queues[rank])
                streams.enqueue(write)
                arriving = [exchange.begin(parts, "some", kind) for kind, parts in given.items()]
                for source in range(ranks):
                    for number, one in enumerate(arriving):
                        x = one.of(source)
                        streams.enqueue(lambda x=x, source=source, number=number, check=check: check(x, source, number))  # type: ignore[misc]
                for one in arriving:
                    one.end()
                streams.enqueue(lambda step=step: step.add_(1))  # type: ignore[misc]
                graph = list(streams.queues[rank])[before:]
        streams.run(draw)
        assert len(found) == 8 * ranks * ranks * 2
        wrong += found.count(False)
    assert bool(wrong) is not guarded
    assert not groups.under_way.works


def test_all_is_work_of_streams_where_ranks_write_to_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a CUDA graph may hold it, and whoever repeats the calls is told so."""
    told: list[Any] = []
    monkeypatch.setattr(groups, "_run", lambda function, args: told.append(function(*args)))
    streams = Streams(2, monkeypatch)
    over(streams, 2, monkeypatch)
    streams.rank = 0
    arriving = exchange.begin([torch.zeros(SIZE, dtype=U8) for _ in range(2)], "some", "b")
    for rank in range(2):
        arriving.of(rank)
    arriving.end()
    assert told
    assert all(one is True for one in told)


def test_many_rows_are_those_whose_weights_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each other rank, and a rank's rows are whole blocks."""
    for ranks, rows, many in ((2, 2048, True), (2, 1920, False), (2, 2176, False), (4, 6144, True), (4, 5632, False)):
        monkeypatch.setattr(ordered_reduce, "ranks_of", lambda group, ranks=ranks: (0, ranks))
        assert exchange.pays("some", rows) is many


def test_without_each_others_memory_the_group_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun at once, and waited for at the first use alone."""
    begun: list[Any] = []
    waited: list[str] = []

    class Work:
        def wait(self) -> None:
            waited.append("one")

    def sends(some: list[Any]) -> list[Work]:
        begun.extend(some)
        return [Work() for _ in some]

    monkeypatch.setattr(ordered_reduce, "ranks_of", lambda group: (1, 3))
    monkeypatch.setattr(groups, "group_of", lambda name: None)
    monkeypatch.setattr(dist, "P2POp", lambda op, x, group, group_peer: (op, group_peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", sends)
    arriving = exchange.begin([torch.zeros(4), torch.ones(4), torch.zeros(4)], "some", "b")
    assert begun == [(dist.isend, 2), (dist.isend, 0), (dist.irecv, 0), (dist.irecv, 2)]
    assert not waited
    assert torch.equal(arriving.of(1), torch.ones(4))  # its own
    assert not waited
    arriving.of(0)
    arriving.of(2)
    arriving.end()
    assert len(waited) == 4
    assert not groups.under_way.works


def test_what_an_error_left_under_way_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight was sent ahead, and its product was never asked for: rooms are not known to be free, so all is ended."""
    streams = Streams(2, monkeypatch)
    over(streams, 2, monkeypatch)
    monkeypatch.setattr(exchange, "ROWS", 256)
    streams.rank = 0
    shared, w = Shared("some", splits_input=True, sequence=False, sizes=(8,)), Operand(torch.ones(4, 8))
    shared.send_ahead(w, 128)  # few rows, whose sums are passed on
    assert not groups.under_way.ahead
    shared.send_ahead(w, 256)
    assert len(groups.under_way.ahead) == 1
    with pytest.raises(RuntimeError, match="a sum over these ranks has ended by an error"):
        shared.send_ahead(w, 256)
    assert not groups.under_way.ahead
    assert not groups.under_way.works
