"""What watches a model and cannot begin, or cannot write, leaves nothing behind, and may be opened again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared.recorded_steps import RECIPES, given, made, step

import reference as te
from reference.inspect.recorded_step import recorder
from reference.nn.core import autograd


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("fails", ["_look_at", "_follow"])
def test_an_anomaly_watch_that_cannot_begin(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    watch = te.detect_anomaly(model)
    whole, calls = getattr(te.detect_anomaly, fails), []

    def second_fails(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("not now")
        whole(*given)

    monkeypatch.setattr(te.detect_anomaly, fails, second_fails)
    with pytest.raises(RuntimeError, match="not now"), watch:
        pytest.fail("it began")
    assert hooks_of(model) == 0
    model(torch.full((1, 4), float("nan")))
    with pytest.raises(FloatingPointError, match="detect_anomaly: no op made a NaN"), watch:
        model(torch.full((1, 4), float("nan")))


def sgd() -> tuple[torch.nn.Module, Any]:
    model = made("Linear")
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        step(model, given(), RECIPES["delayed"], optimizer)


@pytest.mark.parametrize("number", [1, 2])
def test_a_recording_that_waits_for_a_step_and_cannot_begin(number: int, tmp_path: Path) -> None:
    """Another one is open. Nothing of the one that was refused stays with the optimizer, and it may be opened then."""
    model, optimizer = sgd()
    runner = autograd.runner
    refused = te.record(model, tmp_path / "a", optimizer, step=number)
    with te.record(model, tmp_path / "b"):
        with pytest.raises(RuntimeError, match="record: another step is being recorded"), refused:
            train(model, optimizer, number - 1)
        assert not optimizer._optimizer_step_post_hooks
        train(model, optimizer, 3)
    assert autograd.runner is runner
    assert not (tmp_path / "a").exists()
    if number == 1:
        with refused:
            train(model, optimizer)
        assert (tmp_path / "a").exists()


def test_a_recording_that_cannot_begin_or_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = sgd()
    runner = autograd.runner

    def fails() -> Any:
        raise RuntimeError("not now")

    one = te.record(model, tmp_path / "a", optimizer)
    with monkeypatch.context() as m:
        m.setattr(recorder, "_uncompiled", fails)
        with pytest.raises(RuntimeError, match="not now"), one:
            pytest.fail("it began")
    assert autograd.runner is runner
    with one:
        train(model, optimizer)
    assert (tmp_path / "a").exists()
    with pytest.raises(RuntimeError, match="record: no op ran"), te.record(model, tmp_path / "b") as nothing:
        pass
    assert not nothing._storages
