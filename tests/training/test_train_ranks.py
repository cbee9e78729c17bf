"""`twin train --data-parallel`: the hashes of one process on any number of ranks, and how ranks end together."""

import contextlib
import datetime
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.processes import started
from shared.training_text import TEXT

from optimized.commands import main, ranks
from optimized.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 4
MODEL = ["--sequence", "16", "--rows", "1", "--warmup", "2", "--dropout", "0.1", "--device", "cpu", "--accumulate", "3"]
ASKED = [*MODEL, "--groups", "3", "--steps", str(STEPS), "--verify", "1", "--save", "2", "--evaluate", "2"]
SHARED = [*ASKED, "--data-parallel"]
SECONDS = 60.0  # of silence


@dataclass
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


def _dies(trainer: Trainer) -> None:
    os._exit(7)


def _sleeps(trainer: Trainer) -> None:
    time.sleep(60)


@torch.no_grad()
def _has_a_nan(trainer: Trainer) -> None:
    next(trainer.model.parameters()).fill_(float("nan"))


@torch.no_grad()
def _has_another_weight(trainer: Trainer) -> None:
    next(trainer.model.parameters()).add_(1.0)


def _worker(
    rank: int, world: int, port: int, asked: list[str], at: str, limit: float, event: Callable[[Trainer], None] | None
) -> None:
    """The command as torchrun starts it; `event` happens on rank 1 before its third step."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks.LIMIT = datetime.timedelta(seconds=limit)
    train = Trainer.train

    def one_step(trainer: Trainer, capture: bool = True) -> torch.Tensor:
        if event is not None and rank == 1 and trainer.step == 2:
            event(trainer)
        return train(trainer, capture)

    Trainer.train = one_step  # type: ignore[method-assign]
    with contextlib.ExitStack() as files:
        files.enter_context(contextlib.redirect_stdout(files.enter_context(open(f"{at}.out", "w"))))
        files.enter_context(contextlib.redirect_stderr(files.enter_context(open(f"{at}.err", "w"))))
        code = main(asked)
    sys.exit(code)


def on_ranks(
    world: int,
    asked: list[str],
    folder: Path,
    limit: float = SECONDS,
    event: Callable[[Trainer], None] | None = None,
    texts: Callable[[int], list[str]] = lambda rank: [],
) -> list[Ended]:
    """The command on so many ranks, each with texts of its own; all must end soon after `limit`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    paths = [folder / f"rank{rank}" for rank in range(world)]
    processes: list[Any] = [
        started(_worker, rank, world, port, ["train", *texts(rank), *asked], str(paths[rank]), limit, event)
        for rank in range(world)
    ]
    found = []
    for rank, (process, path) in enumerate(zip(processes, paths, strict=True)):
        if event is _sleeps and rank == 1:
            process.kill()
        process.join(limit + 40)
        assert process.exitcode is not None, "a rank has not ended"
        found.append(Ended(process.exitcode, printed(f"{path}.out"), printed(f"{path}.err")))
    return found


def printed(path: str) -> str:
    """What a rank has printed, without the notice of a process that waits for a compiler."""
    lines = Path(path).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("twin-engine: preparing"))


def hashes(out: str) -> list[str]:
    return re.findall(r"step \d+ sha256 [0-9a-f]{64}", out)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "products.txt"
    path.write_bytes(TEXT)
    return str(path)


def test_ranks_print_the_hashes_of_one_process_and_a_run_goes_on_with_others(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two ranks dies; three go on, with what rank 0 has saved, and divide the weights."""
    assert main(["train", text, *ASKED, "--output", str(tmp_path / "alone")]) == 0
    expected = hashes(capsys.readouterr().out)
    assert len(expected) == STEPS
    asked = [text, *SHARED, "--output", str(tmp_path / "run")]
    first, dead = on_ranks(2, asked, tmp_path, event=_dies)
    assert (first.code, dead.code) == (2, 7)
    assert hashes(first.out) == expected[:2]
    assert "shared by 2 ranks" in first.out
    assert dead.out == dead.err == ""
    assert first.err.startswith("rank 0: another rank has ended, or has said nothing for 60 s: this one ends, too.")
    assert first.err.endswith("checkpoint.safetensors is that of step 2.\n")
    first, *others = on_ranks(3, [*asked, "--fsdp", "--resume"], tmp_path)
    assert [first.code, *(one.code for one in others)] == [0, 0, 0], first.err
    assert hashes(first.out) == expected[2:]
    assert all(one.out == one.err == "" for one in others)
    run, alone = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("run", "alone"))
    numbers = r'"(?:loss|held_out|norm|sha256)": [^,}]*'
    assert re.findall(numbers, run) == re.findall(numbers, alone)
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == sorted(
        one.name for one in (tmp_path / "alone").iterdir()
    )


@pytest.mark.slow
def test_a_rank_that_says_nothing_ends_the_others_in_time(text: str, tmp_path: Path) -> None:
    since = time.monotonic()
    first, _ = on_ranks(2, [text, *SHARED, "--output", str(tmp_path / "run")], tmp_path, 6, _sleeps)
    assert time.monotonic() - since < 50
    assert first.code == 2
    assert "rank 0: another rank has ended, or has said nothing for 6 s: this one ends, too." in first.err


def test_ranks_end_together_and_rank_0_says_why(text: str, tmp_path: Path) -> None:
    def refused(asked: list[str], sentence: str, **more: Any) -> None:
        first, other = on_ranks(2, [*asked, "--output", str(tmp_path / "run")], tmp_path, **more)
        assert (first.code, other.code) == (2, 2)
        assert sentence in first.err
        assert first.err.count("\n") == 1
        assert other.out == other.err == ""

    asked = [text, *SHARED]
    refused([*asked, "--groups", "1"], "--data-parallel: 2 ranks share steps of 1 groups; as many --groups, or fewer")
    refused(
        [*asked, "--fsdp", "--sample", "9"], "--sample with --fsdp: a process that has all weights writes; --resume"
    )
    refused([*asked, "--record", "2"], "--record with --data-parallel: a step of one process is recorded")
    other = tmp_path / "other.txt"
    other.write_bytes(TEXT)
    refused(asked, "rank 1 has text=", texts=lambda rank: [str(other)] * rank)
    refused(asked, "rank 1: twin train: the text", texts=lambda rank: [str(tmp_path / "no")] * rank)
    assert not (tmp_path / "run").exists()
    refused(asked, "the loss of step 3 is nan: the run stops. One process, with --resume", event=_has_a_nan)
    refused([*asked, "--resume"], "the state of rank 1 after step 3 has the SHA-256", event=_has_another_weight)


def test_torchrun_leaves_the_options_of_the_command_that_is_shown() -> None:
    from torch.distributed.run import parse_args

    shown = shlex.split(ranks.START.replace(" N", " 4"))
    given = parse_args([*shown[1:], "--log", "2"])
    assert shown[0] == "torchrun"
    assert given.training_script == "twin"
    assert given.training_script_args == ["train", "--data-parallel", "--groups", "4", "--log", "2"]


def test_several_processes_must_be_asked_for(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(asked: list[str], sentence: str) -> None:
        assert main(["train", text, *asked, "--output", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1, error
        assert not (tmp_path / "run").exists()

    for name in ranks.NEEDED:
        monkeypatch.delenv(name, raising=False)
    refused(SHARED, "--data-parallel: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set; `torchrun")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused([*ASKED, "--fsdp"], "--data-parallel: RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set; `torchrun")
    refused(ASKED, "WORLD_SIZE=2: so many processes would each train the same; --data-parallel, with --groups, lets")
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    refused(SHARED, "RANK=2 with WORLD_SIZE=2; a smaller one is accepted.")
    monkeypatch.setenv("WORLD_SIZE", "two")
    refused(ASKED, "WORLD_SIZE='two'; a whole number is accepted")
