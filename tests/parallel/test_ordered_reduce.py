"""Sums that pass through ranks: what is left of one that an error has ended."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from reference.parallel import ordered_reduce
from reference.support import groups


class Work:
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def wait(self) -> None:
        if self.fails:
            raise RuntimeError("a rank is gone")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("fails", ["part", "wait"])
def test_an_error_leaves_nothing_under_way(rank: int, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def begins(x: torch.Tensor, **of: Any) -> Work:
        begun.append(x)
        return Work(fails == "wait")

    monkeypatch.setattr(ordered_reduce, "ranks_of", lambda group: (rank, 3))
    monkeypatch.setattr(groups, "group_of", lambda name: None)
    monkeypatch.setattr(dist, "isend", begins)
    monkeypatch.setattr(dist, "irecv", begins)

    def part(piece: int, band: ordered_reduce.Band, accumulator: torch.Tensor | None) -> torch.Tensor:
        if fails == "part" and band[0]:
            raise RuntimeError("no room")
        return torch.zeros(band[1] - band[0], 2)

    with pytest.raises(RuntimeError, match="no room" if fails == "part" else "a rank is gone"):
        ordered_reduce.passed_on("some", (512, 2), part, part, 1, torch.float32, False, torch.device("cpu"))
    assert begun
    assert not groups.under_way.works
