"""Flips in a recorded step: each is named or has no effect, and a reader that sees nothing is found out."""

import pytest
import torch

from reference.inspect.drills import drill
from reference.inspect.drills.drill import KINDS, MEMORY, OUTCOMES, Drill, Outcome

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def ready() -> Drill:
    return Drill()


def flips(ready: Drill, kind: str, count: int, seed: int) -> list[Outcome]:
    generator = torch.Generator().manual_seed(seed)
    return [ready.fault(kind, generator) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_flip_is_missed(kind: str, ready: Drill) -> None:
    found = flips(ready, kind, 3, 3)
    assert {one.what for one in found} <= set(OUTCOMES) - {"missed"}
    if kind in MEMORY:  # somebody reads it
        assert {one.what for one in found} == {"word"}
    assert all(one.changed == (one.what != "no effect") or one.what in ("word", "op", "later") for one in found)
    assert all(bool(one.at) == (one.what in ("word", "op", "later")) for one in found)
    assert flips(ready, kind, 1, 3) == found[:1]


def test_a_reader_that_sees_nothing_misses(ready: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "_first_difference", lambda recording: None)
    for kind in ("weight", "code", "accumulator"):
        assert "missed" in {one.what for one in flips(ready, kind, 6, 4)}, kind


def test_the_step_without_a_fault_is_the_same_each_time(ready: Drill) -> None:
    again = ready.record(drill.Fault(-1, "before"))
    assert list(drill._results(again)) == ready._results
    assert drill._first_difference(again) is None
    assert all(ready._places[kind] for kind in KINDS)
