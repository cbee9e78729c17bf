"""`te.record(..., step=N)`: one step of a training loop, found by counting the optimizer's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared.recorded_steps import RECIPES, given, made, replayed, step

import reference as te
from reference.inspect.recorded_step import file
from reference.nn.core import autograd


def loop(context: Any, model: torch.nn.Module, optimizer: Any, steps: int = 3) -> list[torch.Tensor]:
    """A training loop of two microbatches and a schedule; the parameters after it."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    torch.manual_seed(4)
    with context:
        for _ in range(steps):
            optimizer.zero_grad()
            for scale in (1.0, 2.0):
                step(model, given(scale=scale), RECIPES["delayed"])
            optimizer.step()
            schedule.step()
    return [p.detach().clone() for p in model.parameters()]


def prepared() -> tuple[torch.nn.Module, Any]:
    model = made("TransformerLayer")
    return model, te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)


def results(recording: file.Recording) -> dict[str, list[tuple[int, int]]]:
    """By op, the digests of what it wrote, in order; zero_grad may stand before the first op or after it."""
    found: dict[str, list[tuple[int, int]]] = {}
    for op in recording.ops:
        if op.kind == "twin":
            found.setdefault(op.name, []).extend(
                recording.digests[one.digest] for one in op.writes if one.digest is not None
            )
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_step_of_a_loop_is_recorded_with_its_bits(number: int, tmp_path: Path, same_bits) -> None:
    runner = autograd.runner
    model, optimizer = prepared()
    found = loop(te.record(model, tmp_path / "a", optimizer, step=number), model, optimizer)
    recording, result = replayed(tmp_path / "a")
    assert result.equal
    assert sum(op.name == "twin::adam" for op in recording.ops) == 1
    assert sum(op.name == "twin::attention" for op in recording.ops) == 2  # microbatches
    assert autograd.runner is runner

    # As if the block were around that step alone, and as if nothing were recorded.
    model, optimizer = prepared()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    torch.manual_seed(4)
    for i in range(1, 4):
        optimizer.zero_grad()
        with te.record(model, tmp_path / f"{i}", optimizer):
            for scale in (1.0, 2.0):
                step(model, given(scale=scale), RECIPES["delayed"])
            optimizer.step()
        schedule.step()
    assert results(recording) == results(file.read(tmp_path / f"{number}"))
    for one, two in zip(found, model.parameters(), strict=True):
        same_bits(one, two)


def test_a_step_that_does_not_come_is_said(tmp_path: Path) -> None:
    for number, steps in ((5, 3), (3, 2)):  # never begun; begun, and not ended
        model, optimizer = prepared()
        with pytest.raises(RuntimeError, match=rf"step={number}, and the optimizer made {steps} steps in the block"):
            loop(te.record(model, tmp_path / "a", optimizer, step=number), model, optimizer, steps)
    model, optimizer = prepared()
    with pytest.raises(KeyError, match="of the loop"), te.record(model, tmp_path / "a", optimizer, step=1):
        raise KeyError("of the loop")
    assert not list(tmp_path.iterdir())
    once = te.record(model, tmp_path / "a", optimizer, step=1)
    loop(once, model, optimizer, 2)
    assert replayed(tmp_path / "a")[1].equal
    with pytest.raises(RuntimeError, match="this recording has been opened"), once:
        pass
    loop(te.record(model, tmp_path / "b", optimizer, step=1), model, optimizer, 1)  # after all that


def test_bad_steps(tmp_path: Path) -> None:
    model, optimizer = prepared()
    for bad in (0, -1, True, 1.5, "2"):
        with pytest.raises(ValueError, match=r"record: step=.*; None or an int of at least 1 is accepted"):
            te.record(model, tmp_path / "a", optimizer, step=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="record: step=2 without an optimizer, whose steps are counted"):
        te.record(model, tmp_path / "a", step=2)
