"""The programs in examples/ run as they stand."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared import processes

from optimized import measure
from reference.support import files

PROGRAM = measure.ROOT / "examples" / "train_gpt.py"


def test_the_training_program_runs(tmp_path: Path) -> None:
    assert len(PROGRAM.read_text().splitlines()) <= 200
    command = [str(PROGRAM), "--device", "cpu", "--steps", "2"]
    for more, steps in (([], [1, 2]), (["--resume"], [])):
        start = f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\nsys.argv[:] = {[*command, *more]}\n"
        done = processes.run(f"{start}runpy.run_path({str(PROGRAM)!r}, run_name='__main__')")
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert [line["step"] for line in lines] == steps
        assert all(4.5 < line["loss"] < 7 for line in lines)
    assert (tmp_path / "run.safetensors").is_file()


def test_the_training_program_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    program: Any = SimpleNamespace(**runpy.run_path(str(PROGRAM)))
    text, path, cpu = program.read_text(), tmp_path / "run.safetensors", torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        whole = program.Run(cpu)
        for _ in range(3):
            whole.train(text, 3)
            if whole.step == 2:
                whole.save(path)
        wanted = whole.digest()
        run = program.Run(cpu)
        run.load(path)
        run.train(text, 3)
        assert (run.step, run.digest()) == (3, wanted)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with torch.random.fork_rng(devices=[]), pytest.raises(files.Damaged, match="not those that were written"):
        program.Run(cpu).load(path)


def test_the_training_program_keeps_its_checkpoint_from_a_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program: Any = runpy.run_path(str(PROGRAM))
    train, path = program["Run"].train, tmp_path / "run.safetensors"

    def spoils(run: Any, text: torch.Tensor, steps: int) -> list[torch.Tensor]:
        losses = train(run, text, steps)
        with torch.no_grad():
            run.model.norm.weight[0] = float("nan")
        return losses

    program["Run"].train = spoils
    path.write_bytes(b"the last good one")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--device", "cpu", "--steps", "1", "--output", str(path)])
    with torch.random.fork_rng(devices=[]), pytest.raises(SystemExit, match="Step 1 has a NaN or an infinity"):
        program["main"]()
    assert path.read_bytes() == b"the last good one"


def test_the_program_that_generates_runs() -> None:
    """It compares its log-probabilities with the trainer's itself."""
    program = measure.ROOT / "examples" / "generate.py"
    assert len(program.read_text().splitlines()) <= 80
    start = f"import runpy, sys\nsys.argv[:] = {[str(program), '--device', 'cpu', '--steps', '2']}\n"
    done = processes.run(f"{start}runpy.run_path({str(program)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
