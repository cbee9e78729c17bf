"""Tapes with collectives, and the process groups in which these were recorded."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from optimized.cuda import launch
from optimized.tapes import call_groups, collective, collectives
from optimized.tapes.tape import Tape


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collectives, "world", None)
    monkeypatch.setattr(call_groups, "_groups", {"a call": call_groups.CallGroup()})
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_tapes_with_collectives_end_with_the_default_process_group() -> None:
    alone()
    with launch.recording(Tape()):
        collective(dist.all_reduce, [torch.ones(2)])
    assert not collectives.outdated()
    dist.destroy_process_group()
    alone()
    x, ran = torch.ones(2), []
    call_groups.relaunch("another call", [x], lambda: ran.append(True))
    assert ran == [True]
    assert len(call_groups._groups) == 1, "of the new group alone"
    assert "a call" not in call_groups._groups
    assert not collectives.outdated(), "said once"


def test_tapes_without_collectives_stay() -> None:
    alone()
    dist.destroy_process_group()
    alone()
    assert not collectives.outdated()
