"""The loop of `twin train`: after each step exactly what is due, whatever the periods. The trainer only takes notes."""

import argparse
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

from optimized.commands import ranks, train_loop
from optimized.commands.train_loop import CHECKPOINT, Loop

STEPS = 6


class NotedTrainer:
    """Counts steps; `noted` says what it was asked for after which."""

    def __init__(self) -> None:
        self.step, self.noted = 0, list[tuple[str, int]]()
        self.settings = types.SimpleNamespace(steps=STEPS, tokens=100, flops=10**12, rate=lambda step: 0.5**step)
        self.model = self.optimizer = None
        self.norm: torch.Tensor | None = None
        self.losses = lambda step: torch.tensor([float(step), step + 2.0])

    def note(self, what: str) -> None:
        self.noted.append((what, self.step))

    def train(self, capture: bool) -> torch.Tensor:
        self.step += 1
        self.note("captured" if capture else "not captured")
        self.norm = torch.tensor(2.0 * self.step)
        return self.losses(self.step)

    def evaluate(self) -> float:
        self.note("evaluate")
        return 10.0 * self.step

    def digest(self) -> str:
        self.note("verify")
        return f"digest {self.step}"

    def save(self, path: Path) -> None:
        assert path.name == CHECKPOINT
        self.note("save")


class NotedDigests:
    def __init__(self, trainer: NotedTrainer) -> None:
        self.trainer = trainer

    def add(self) -> None:
        self.trainer.note("digest added")

    def compared(self, gather: Any) -> None:
        self.trainer.note("compared")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> NotedTrainer:
    monkeypatch.setattr(train_loop, "RankDigests", NotedDigests)
    monkeypatch.setattr(train_loop, "unfinite", lambda trainer: None)
    monkeypatch.setattr(train_loop, "first_unfinite", lambda trainer, step, path: f"Made by op {step}, from {path}.")
    return NotedTrainer()


def loop(trainer: NotedTrainer, folder: Path, count: int = 1, rank: int = 0, **given: Any) -> Loop:
    periods = {"log": 10, "evaluate": 10, "save": 10, "verify": None, "compare_every": 0, "record": None}
    args = argparse.Namespace(output=folder, fsdp=False, tensor_parallel=1, context_parallel=1, **{**periods, **given})
    me = types.SimpleNamespace(
        rank=rank, count=count, gather=lambda x: [x] * count, wait=lambda: trainer.note("waited")
    )
    return Loop(args, trainer, Progress(disable=True), me)  # type: ignore[arg-type]


def run(one: Loop) -> None:
    for _ in range(STEPS):
        one.step()


@pytest.mark.parametrize("every", [1, 2, 4, 5])
@pytest.mark.parametrize("name", ["log", "evaluate", "save", "verify", "compare_every"])
def test_what_is_due_after_each_step(name: str, every: int, trainer: NotedTrainer, tmp_path: Path) -> None:
    """One period alone: at its multiples and at the end; what was trained since the last time is written then."""
    one = loop(trainer, tmp_path, **{name: every})
    written = []
    for _ in range(STEPS):
        one.step()
        assert one.metrics is not None
        written.append(sum("loss" in line for line in one.metrics.lines))
    due = [step for step in range(1, STEPS + 1) if step % every == 0 or step == STEPS]
    found = {what: [step for one, step in trainer.noted if one == what] for what, _ in trainer.noted}
    assert found["captured"] == list(range(1, STEPS + 1))
    for what in ("evaluate", "save", "verify", "compared"):
        asked = what == {"compare_every": "compared"}.get(name, name)
        always = what in ("evaluate", "save")
        assert found.get(what, []) == (due if asked else [STEPS] if always else []), what
    assert found.get("digest added", []) == (list(range(1, STEPS + 1)) if name == "compare_every" else [])
    flushed = [STEPS] if name == "compare_every" else due
    assert written == [max((step for step in flushed if step <= now), default=0) for now in range(1, STEPS + 1)]
    assert one.saved == STEPS


def test_a_checkpoint_is_of_a_step_that_was_compared(trainer: NotedTrainer, tmp_path: Path) -> None:
    one = loop(trainer, tmp_path, compare_every=4, save=3)
    run(one)
    assert [step for what, step in trainer.noted if what == "compared"] == [3, 4, 6]
    order = [what for what, step in trainer.noted if step == 3]
    assert order.index("compared") < order.index("save") < order.index("waited")


def test_the_lines_of_a_run_have_the_numbers_of_each_step(trainer: NotedTrainer, tmp_path: Path) -> None:
    one = loop(trainer, tmp_path, log=2, verify=3, evaluate=4)
    run(one)
    assert one.metrics is not None
    for name, wanted in {
        "loss": {step: step + 1.0 for step in range(1, 7)},
        "rate": {step: 0.5 ** (step - 1) for step in range(1, 7)},
        "norm": {step: 2.0 * step for step in range(1, 7)},
        "held_out": {4: 40.0, 6: 60.0},
        "sha256": {3: "digest 3", 6: "digest 6"},
    }.items():
        assert dict(zip(*one.metrics.of(name), strict=True)) == wanted, name
    at, speeds = one.metrics.of("tokens_per_second")
    assert at == one.metrics.of("tflops")[0] == [2, 3, 4, 6]
    for speed, tflops in zip(speeds, one.metrics.of("tflops")[1], strict=True):
        assert tflops / speed == pytest.approx(1 / 100)  # a tera-FLOP in a step of 100 tokens


@pytest.mark.parametrize("what", ["loss", "norm"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_nan_stops_the_run_in_a_sentence(what: str, count: int, trainer: NotedTrainer, tmp_path: Path) -> None:
    """Of its step, though the numbers are read later; nothing is saved after it."""
    one = loop(trainer, tmp_path, count=count, save=4, log=3)
    train = trainer.train

    def broken(capture: bool) -> torch.Tensor:
        losses = train(capture)
        if trainer.step == 5 and what == "norm":
            trainer.norm = torch.tensor(math.inf)
        return losses * (math.nan if trainer.step == 5 and what == "loss" else 1)

    trainer.train = broken  # type: ignore[method-assign]
    with pytest.raises(
        Exception, match=f"^the {'loss' if what == 'loss' else 'norm of the gradient'} of step 5 is "
    ) as error:
        run(one)
    assert trainer.step == 6
    assert [step for name, step in trainer.noted if name == "save"] == [4]
    assert str(error.value).endswith(f"{CHECKPOINT} is that of step 4.")
    assert ("Made by op 5" in str(error.value)) == (count == 1)
    assert isinstance(error.value, ranks.Everywhere) == (count == 2)


def test_only_the_first_rank_writes(trainer: NotedTrainer, tmp_path: Path) -> None:
    one = loop(trainer, tmp_path, count=2, rank=1, save=2)
    run(one)
    assert one.metrics is None
    assert not list(tmp_path.iterdir())
    assert {what for what, _ in trainer.noted} == {"captured", "waited"}


def test_states_that_differ_stop_the_run(trainer: NotedTrainer, tmp_path: Path) -> None:
    one = loop(trainer, tmp_path, count=2, verify=2)
    one.me.gather = lambda x: [x, f"{x}!"]  # type: ignore[method-assign]
    one.step()
    said = (
        r"the state of rank 1 after step 2 has the SHA-256 digest 2!, and that of rank 0 has digest 2: .* No checkpoint"
    )
    with pytest.raises(ranks.Everywhere, match=said):
        one.step()
