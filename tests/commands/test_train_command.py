"""`twin train`: what it writes, prints and refuses, and that a run which is killed goes on to the same bits."""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.processes import started
from shared.training_text import TEXT

from optimized.commands import main
from optimized.training import checkpoint
from optimized.training.metrics import Metrics
from optimized.training.trainer import Trainer
from reference.support import files

MODEL = ["--sequence", "16", "--rows", "1", "--warmup", "2", "--dropout", "0.1"]
SMALL = [*MODEL, "--device", "cpu"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "products.txt"
    path.write_bytes(TEXT)
    return str(path)


def state_of(folder: Path) -> str:
    """The hash of a run's state, as its checkpoint has it."""
    tensors, about = checkpoint.read(folder / "checkpoint.safetensors")
    return checkpoint.digest(tensors, about["step"], about["updates"])


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_what_it_says(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    asked = ["--steps", "4", "--log", "2", "--verify", "2", "--evaluate", "4", "--record", "3", "--accumulate", "2"]
    asked += ["--sample", "5", "--prompt", "1 * ", "--output", str(folder)]
    assert main(["train", text, *SMALL, *asked]) == 0
    out = capsys.readouterr().out
    assert "0.4 million parameters, delayed, on cpu; 32 of 143,716 bytes a step" in out
    assert f"step 4 sha256 {state_of(folder)}" in out
    assert "\n1 * " in out
    found = lines_of(folder)
    assert [line["step"] for line in found if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in found if "tflops" in line] == [2, 4]
    assert [line["sha256"] for line in found if "sha256" in line][-1] == state_of(folder)
    assert all(line["norm"] > 0 for line in found if "loss" in line)
    (held_out,) = [line["held_out"] for line in found if "held_out" in line]
    assert 4 < held_out < 6
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert main(["replay", str(folder / "step-3.safetensors"), "--output", str(tmp_path / "page.html")]) == 0
    assert "The same bits" in capsys.readouterr().out
    # A finished run has nothing to do but to write.
    before = state_of(folder)
    assert main(["train", text, "--device", "cpu", "--resume", "--sample", "3", "--output", str(folder)]) == 0
    assert "goes on after step 4" in capsys.readouterr().out
    assert state_of(folder) == before
    assert lines_of(folder) == found


def test_what_cannot_be_met_gets_one_sentence(
    text: str, tmp_path: Path, no_gpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    base = ["train", text, *SMALL, "--steps", "2", "--output", str(folder)]
    assert main([*base, "--resume"]) == 0  # without a run to go on with it starts, and says so
    assert "there is no checkpoint in the folder, so it starts at step 0" in capsys.readouterr().out
    path, good = folder / "checkpoint.safetensors", state_of(folder)
    content = path.read_bytes()
    short = tmp_path / "short.txt"
    short.write_text("short")
    new = ["--output", str(tmp_path / "new")]

    def refused(argv: list[str], sentence: str) -> None:
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1, error

    refused(base, "there is a run; --resume goes on with it, or name another folder.")
    refused([*base, "--resume", "--rate", "0.5"], "has learning_rate=0.002, and learning_rate=0.5 is asked for")
    refused(
        [*base, "--resume", "--size", "micro"], "has hidden=128, heads=2, layers=2, and hidden=256, heads=4, layers=4"
    )
    refused(["train", str(short), "--resume", "--output", str(folder)], "held out; more than 16, the sequence")
    refused(["train", str(tmp_path / "no"), *new], f"the text {str(tmp_path / 'no')!r} is not there; a file")
    refused(["train", str(short), *new], "the text has 5 bytes, of which 0 are held out")
    refused(["train", text, "--dropout", "1", *new], "dropout=1.0; a number from 0")
    refused(["train", text, "--device", "cuda", *new], "--device cuda: torch sees no CUDA device.")
    refused([*base, "--resume", "--record", "2"], "--record 2: the steps to come are 3 to 2; one of them is accepted.")
    refused(["train", text, *SMALL, "--prompt", "x", *new], "--prompt 'x': a text of at least one byte, with --sample")
    other = tmp_path / "other.txt"
    other.write_bytes(TEXT + b"more")
    refused(
        ["train", str(other), "--device", "cpu", "--resume", "--output", str(folder)], "was trained on a text of 143,7"
    )
    path.write_bytes(content[:-100])
    refused([*base, "--resume"], "checkpoint.safetensors is no whole safetensors file")
    path.write_bytes(content)
    # A loss that is not finite, and a disk that is full, leave the last good checkpoint.
    assert not (tmp_path / "new").exists()
    base = ["train", text, *SMALL, "--steps", "4", "--save", "2", *new]
    train, kept_two = Trainer.train, f"{tmp_path}/new/checkpoint.safetensors is that of step 2."

    def diverges(trainer: Trainer, capture: bool = True) -> torch.Tensor:
        return train(trainer) * (float("nan") if trainer.step == 4 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", diverges)
        refused(base, "the loss of step 4 is nan: the run stops. Made again from step 2, it is there again, and no op")

    def too_large(trainer: Trainer, capture: bool = True) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", too_large)
        refused([*base, "--resume"], "the GPU has no room for 1 rows of 16 bytes: fewer --rows with --accumulate, or")
    kept = state_of(tmp_path / "new")

    sync, room = files.os.fsync, [0]

    def full(file: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        sync(file)

    for files_that_fit, more in ((0, ""), (1, kept_two)):
        room[0] = files_that_fit
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", full)
            refused([*base, "--resume"], f"was not written: No space left on device. {more}".rstrip())
    assert state_of(tmp_path / "new") == kept
    assert state_of(folder) == good


def test_an_interrupted_run_says_what_is_kept(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = Trainer.train

    def interrupted(trainer: Trainer, capture: bool = True) -> torch.Tensor:
        if trainer.step == 2:
            raise KeyboardInterrupt
        return train(trainer)

    monkeypatch.setattr(Trainer, "train", interrupted)
    asked = ["train", text, *SMALL, "--steps", "4", "--save", "1", "--output", str(tmp_path / "run")]
    assert main(asked) == 130
    assert "Interrupted in step 3." in capsys.readouterr().out


def test_metrics_after_the_checkpoint_and_a_half_line_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 0)
    for step in (1, 2, 3):
        metrics.add(step, loss=1.5 / step, norm=None)
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')
    again = Metrics(path, 2)
    assert again.lines == lines_of(tmp_path) == [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 0.75}]
    assert again.of("loss") == ([1, 2], [1.5, 0.75])
    with pytest.raises(files.NotWritten, match="was not written"):
        files.append(tmp_path, "a folder is no file")


# --- killed ------------------------------------------------------------------------------------------------


def _train(asked: list[str]) -> None:
    sys.exit(main(asked))


def _start(text: str, folder: Path, steps: int, device: str) -> Any:
    asked = ["train", text, *MODEL, "--device", device]
    asked += ["--steps", str(steps), "--save", "1", "--log", "1", "--resume"]
    return started(_train, [*asked, "--output", str(folder)])


def _grown(path: Path, size: int, process: Any) -> None:
    """Wait until a file has more than `size` bytes, or the process has ended."""
    while process.is_alive() and (path.stat().st_size if path.exists() else 0) <= size:
        time.sleep(0.002)


def _killed_and_resumed(
    text: str, folder: Path, steps: int, kills: int, seed: int, devices: tuple[str, ...] = ("cpu",)
) -> None:
    """Kill a run at random moments of its steps and writes, resume it on each device in turn, and let it end."""
    print(f"seed {seed}")
    draw, path = random.Random(seed), folder / "metrics.jsonl"
    for kill in range(kills):
        process = _start(text, folder, steps, devices[kill % len(devices)])
        _grown(path, 0, process)
        for _ in range(draw.randint(1, max(1, 2 * steps // kills))):
            _grown(path, path.stat().st_size, process)
        time.sleep(draw.random() * 0.3)
        process.kill()
        process.join()
        if (folder / "checkpoint.safetensors").exists():
            assert state_of(folder)  # whole at every moment
    process = _start(text, folder, steps, devices[kills % len(devices)])
    process.join(600)
    assert process.exitcode == 0


def _final(text: str, folder: Path, steps: int) -> str:
    assert main(["train", text, *SMALL, "--steps", str(steps), "--output", str(folder)]) == 0
    return state_of(folder)


def test_a_run_that_is_killed_ends_with_the_same_hash(text: str, tmp_path: Path) -> None:
    steps = 8
    _killed_and_resumed(text, tmp_path / "killed", steps, 1, random.SystemRandom().randrange(1 << 30))
    assert state_of(tmp_path / "killed") == _final(text, tmp_path / "whole", steps)
    found = [line["step"] for line in lines_of(tmp_path / "killed") if "loss" in line]
    assert found == list(range(1, steps + 1))
    pairs = [[line["loss"] for line in lines_of(tmp_path / run) if "loss" in line] for run in ("killed", "whole")]
    assert pairs[0] == pairs[1]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [("cpu",), pytest.param(("cuda", "cpu"), marks=pytest.mark.gpu)])
def test_a_run_that_is_killed_twenty_times_ends_with_the_same_hash(
    devices: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    """With a GPU every second process is on the other device."""
    _killed_and_resumed(text, tmp_path / "killed", 80, 20, random.SystemRandom().randrange(1 << 30), devices)
    assert state_of(tmp_path / "killed") == _final(text, tmp_path / "whole", 80)
