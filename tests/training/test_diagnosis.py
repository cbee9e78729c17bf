"""`twin train` with a NaN or an infinity: its first op is named, and the last good checkpoint stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared.training_text import TEXT, corpus

from optimized.commands import main
from optimized.training import checkpoint
from optimized.training.diagnosis import first_unfinite, unfinite
from optimized.training.settings import Settings
from optimized.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["--sequence", "16", "--rows", "1", "--steps", "6", "--device", "cpu"]
HUGE = ["--warmup", "1", "--rate", "1e20"]  # products of such weights overflow
BEYOND = ["--warmup", "1", "--rate", "1e38", "--weight-decay", "1e3"]  # the update itself overflows


def step_of(folder: Path) -> int:
    """The step of a run's checkpoint, which must be whole and finite."""
    tensors, about = checkpoint.read(folder / "checkpoint.safetensors")
    assert all(x.isfinite().all() for x in tensors.values() if x.is_floating_point())
    return int(about["step"])


def ended(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> str:
    """What a run that must stop says."""
    text = tmp_path / "products.txt"
    text.write_bytes(TEXT)
    assert main(["train", str(text), *SMALL, *options, "--save", "1", "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("clip", ["0", "1"])
def test_a_loss_that_is_not_finite_names_the_op(clip: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = ended(tmp_path, capsys, [*HUGE, "--clip", clip])
    assert "the loss of step 3 is nan: the run stops. Made again from step 2: the first NaN was made by " in error
    assert "twin::attention in layers.0.self_attention.core_attention (forward)" in error
    assert error.endswith(f"{tmp_path}/run/checkpoint.safetensors is that of step 2.\n")
    assert step_of(tmp_path / "run") == 2


@pytest.mark.parametrize("precision", ["bf16", "current", "delayed"])
def test_weights_that_are_not_finite_are_not_written(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of the step is finite: it was computed before its update."""
    error = ended(tmp_path, capsys, [*BEYOND, "--precision", precision])
    first = 2 if precision == "delayed" else 1  # whose first step updates nothing
    assert f"model/bytes.weight has a NaN or an infinity after step {first}: the run stops. Made again" in error
    assert "the first infinity was made by twin::adam" in error
    if precision == "delayed":
        assert step_of(tmp_path / "run") == 1
    else:
        assert error.endswith("No checkpoint was written.\n")
        assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_a_gradient_that_is_not_finite_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is finite, and a gradient is not: a hook of the norm before the head divides by zero in step 3."""
    build = Trainer.__init__

    def built(trainer: Trainer, *args: Any, **more: Any) -> None:
        build(trainer, *args, **more)

        def divided(module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
            if out.requires_grad and trainer.step == 2:
                out.register_hook(lambda grad: grad / torch.zeros_like(grad))

        trainer.model.norm.register_forward_hook(divided)

    monkeypatch.setattr(Trainer, "__init__", built)
    error = ended(tmp_path, capsys, ["--clip", "1"])
    assert "the norm of the gradient of step 3 is nan: the run stops. Made again from step 2: the first " in error
    assert "was made by aten::div in " in error
    assert "(backward)" in error
    assert step_of(tmp_path / "run") == 2


def test_what_does_not_happen_again_was_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, spoiled = Trainer.train, list[int]()

    def spoils(trainer: Trainer, capture: bool = True) -> torch.Tensor:
        losses = train(trainer, capture)
        if trainer.step == 4 and not spoiled:
            spoiled.append(4)
            with torch.no_grad():
                trainer.model.norm.weight[3] = float("inf")
        return losses

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", spoils)
        error = ended(tmp_path, capsys, [])
    assert "model/norm.weight has a NaN or an infinity after step 4: the run stops." in error
    assert "Made again from step 3, it is finite: the device spoiled it, and --resume goes on." in error
    assert step_of(tmp_path / "run") == 3
    text = str(tmp_path / "products.txt")
    assert main(["train", text, *SMALL, "--resume", "--output", str(tmp_path / "run")]) == 0
    assert main(["train", text, *SMALL, "--output", str(tmp_path / "whole")]) == 0
    one, two = (checkpoint.read(tmp_path / run / "checkpoint.safetensors")[0] for run in ("run", "whole"))
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_a_number_of_no_op_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(Settings(sequence=16, hidden=32, layers=1, rows=2, steps=3, warmup=2, clip=1.0), corpus())
    assert unfinite(trainer) is None
    assert "Made again from step 0, it is finite" in first_unfinite(trainer, 2, None)
    state = trainer.optimizer.state[trainer.model.norm.bias]["exp_avg"]
    state[1] = float("nan")
    assert unfinite(trainer) == "optimizer/norm.bias/exp_avg"
    train = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda one, capture=True: train(one, capture) * float("nan"))
    assert "it is there again, and no op that can be seen made it." in first_unfinite(trainer, 2, None)
