"""A tape that an error has ended is played again as if it had not been."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.driver_stub import STREAM, Cuda

from optimized.tapes.tape import Tape
from reference.parallel import ordered_reduce
from reference.support import groups


class Sends:
    """The first half of a sum over ranks, whose second half may be missing."""

    capturable = False

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def play(self, stream: int) -> None:
        ordered_reduce._send(self.x, "some", 1, self.x.nbytes, 0)


class Ends(Sends):
    def play(self, stream: int) -> None:
        ordered_reduce._end([self.x])


class Fails(Sends):
    """The first time."""

    times = 0

    def play(self, stream: int) -> None:
        self.times += 1
        if self.times == 1:
            raise RuntimeError("a rank is gone")


class Work:
    def wait(self) -> None:
        pass


def test_nothing_is_under_way_after_an_error(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "group_of", lambda name: None)
    monkeypatch.setattr(dist, "isend", lambda x, **of: Work())
    x, tape = torch.zeros(4), Tape()
    fails = Fails(x)
    for one in (Sends(x), fails, Ends(x)):
        tape.append(one)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        tape.play(0)
    assert not groups.under_way.works
    tape.play(0)
    assert fails.times == 2
    assert not groups.under_way.works


def test_a_play_that_fails_does_not_count(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are loaded by the first two plays, which no graph may capture."""
    tape, streams = Tape(), []

    class Entry:
        capturable = True

        def play(self, stream: int) -> None:
            streams.append(stream)
            if len(streams) < 4:
                raise RuntimeError("no")

    captured: list[Any] = []
    monkeypatch.setattr(Tape, "_captured", lambda *of: captured.append(of))
    for _ in range(3):
        tape.append(Entry())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            tape.play(0)
    tape.play(0)
    tape.play(0)
    assert streams == [STREAM] * (3 + 2 * 3)
    assert not captured
