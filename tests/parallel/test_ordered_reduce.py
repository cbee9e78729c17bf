"""Sums that pass through ranks: the room that they need, their last part, and what is left after an error."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits

from reference.parallel import messages, ordered_reduce
from reference.parallel.tensor import _last_part
from reference.recipes.quantized import PER_TENSOR, Operand, gemm, pieces_of, products
from reference.support import groups

BF16 = torch.bfloat16


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


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_room_is_as_large_as_the_largest_message(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums in fp32, and of results, which have half as many bytes here."""
    asked: set[int] = set()
    sent: list[int] = []

    class Rooms:
        def prepare(self, distances: range, size: int, rooms: int = 1) -> bool:
            asked.add(size)
            return False  # so the group sends

    def begins(x: torch.Tensor, **of: Any) -> Work:
        sent.append(x.nbytes)
        return Work(False)

    monkeypatch.setattr(ordered_reduce, "ranks_of", lambda group: (rank, 3))
    monkeypatch.setattr(groups, "group_of", lambda name: None)
    monkeypatch.setattr(messages, "of_group", lambda group, device: Rooms())
    monkeypatch.setattr(dist, "isend", begins)
    monkeypatch.setattr(dist, "irecv", begins)
    monkeypatch.setattr(dist, "broadcast", lambda x, **of: None)

    def part(piece: int, band: ordered_reduce.Band, accumulator: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(band[1] - band[0], 6)

    def last(piece: int, band: ordered_reduce.Band, accumulator: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(band[1] - band[0], 6, dtype=BF16)

    ordered_reduce.passed_on("some", (600, 6), part, last, 1, BF16, False, torch.device("cpu"))
    assert asked == {max(sent), max(sent) // 2}


@pytest.mark.parametrize("fp8", [False, True])
def test_the_last_part_and_what_follows_it_end_the_product(fp8: bool) -> None:
    """Whether an op does both at once or not."""
    g = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(shape, generator=g).to(BF16) for shape in ((5, 256), (16, 256), (16,)))
    a, b = Operand(x), Operand(w)
    if fp8:
        a, b = (Operand(one.to(torch.float8_e4m3fn), torch.tensor([0.75]), PER_TENSOR) for one in (x, w))
    found = products(a, b)
    assert found.part is not None
    assert (found.part_and_end is not None) is fp8
    first, rest = zip(pieces_of(a, [128, 128]), pieces_of(b, [128, 128]), strict=True)
    sums = found.part(*first, None, "split")
    assert_same_bits(_last_part(found, *rest, sums, bias, BF16, "split"), gemm(a, b, bias, BF16, "split"))
