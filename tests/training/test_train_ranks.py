"""`twin train --data-parallel`: the hashes of one process on any number of ranks, and how ranks end together."""

import argparse
import contextlib
import datetime
import gc
import os
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.processes import free_port, started
from shared.training_text import TEXT

from optimized.commands import CommandError, main, ranks, train
from optimized.commands.train import LOCK
from optimized.cuda import device
from optimized.training.trainer import Trainer
from reference.parallel import ending
from reference.support import files

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 4
MODEL = ["--sequence", "16", "--rows", "1", "--warmup", "2", "--dropout", "0.1", "--device", "cpu", "--accumulate", "3"]
ASKED = [*MODEL, "--groups", "3", "--steps", str(STEPS), "--verify", "1", "--save", "2", "--evaluate", "2"]
SHARED = [*ASKED, "--data-parallel"]
OF_WEIGHTS = ["--precision", "bf16", "--accumulate", "1", "--groups", "1"]  # whose parts may be smaller than in FP8
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


@dataclass
class Command:
    """`twin train` on all ranks, of which rank 1 has an event before its third step, and texts of its own."""

    asked: list[str]
    event: Callable[[Trainer], None] | None = None
    texts: tuple[list[str], ...] = ([], [], [])


def _worker(rank: int, world: int, ports: list[int], commands: list[Command], at: str, limit: float) -> None:
    """The commands as torchrun starts each of them, one after the other."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    ranks.LIMIT = datetime.timedelta(seconds=limit)
    train = Trainer.train
    for number, (command, port) in enumerate(zip(commands, ports, strict=True)):
        os.environ["MASTER_PORT"] = str(port)

        def one_step(trainer: Trainer, capture: bool = True, command: Command = command) -> torch.Tensor:
            if command.event is not None and rank == 1 and trainer.step == 2:
                command.event(trainer)
            return train(trainer, capture)

        Trainer.train = one_step  # type: ignore[method-assign]
        with contextlib.ExitStack() as held:
            held.enter_context(contextlib.redirect_stdout(held.enter_context(open(f"{at}.{number}.out", "w"))))
            held.enter_context(contextlib.redirect_stderr(held.enter_context(open(f"{at}.{number}.err", "w"))))
            code = main(["train", *command.texts[rank], *command.asked])
        Path(f"{at}.{number}.code").write_text(str(code))
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # layers that live on on one rank would have their scales reduced there alone


def on_ranks(world: int, commands: list[Command], folder: Path, limit: float = SECONDS) -> list[list[Ended]]:
    """The commands on so many ranks, by command and rank; after one that has an event all must end soon."""
    paths = [folder / f"rank{rank}" for rank in range(world)]
    ports = [free_port() for _ in commands]
    processes: list[Any] = [
        started(_worker, rank, world, ports, commands, str(paths[rank]), limit) for rank in range(world)
    ]
    for rank, process in enumerate(processes):
        if commands[-1].event is _sleeps and rank == 1:
            process.kill()
        process.join(limit + 40)
        assert process.exitcode is not None, "a rank has not ended"
    found = []
    for number in range(len(commands)):
        of_ranks = []
        for process, path in zip(processes, paths, strict=True):
            code = Path(f"{path}.{number}.code")
            ended = int(code.read_text()) if code.exists() else process.exitcode
            of_ranks.append(Ended(ended, printed(f"{path}.{number}.out"), printed(f"{path}.{number}.err")))
        found.append(of_ranks)
    return found


def printed(path: str) -> str:
    """What a rank has printed, without the notice of a process that waits for a compiler."""
    lines = Path(path).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("twin-engine: preparing"))


def hashes(out: str) -> list[str]:
    return re.findall(r"step \d+ sha256 [0-9a-f]{64}", out)


def numbers(folder: Path) -> list[str]:
    """The run's metrics, but for those of speed."""
    return re.findall(r'"(?:loss|held_out|norm|sha256)": [^,}]*', (folder / "metrics.jsonl").read_text())


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "products.txt"
    path.write_bytes(TEXT)
    return str(path)


def test_ranks_print_the_hashes_of_one_process_and_a_run_goes_on_with_others(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two ranks dies; three go on, with what rank 0 has saved, and divide the weights."""

    def alone(name: str, asked: list[str]) -> list[str]:
        assert main(["train", text, *asked, "--output", str(tmp_path / name)]) == 0
        return hashes(capsys.readouterr().out)

    expected = alone("alone", ASKED)
    assert len(expected) == STEPS
    asked = [text, *SHARED, "--output", str(tmp_path / "run")]
    long = [*ASKED, "--sequence", "512", "--groups", "1", "--accumulate", "1", "--steps", "2"]
    commands = [
        Command([text, *long, "--context-parallel", "2", "--output", str(tmp_path / "long")]),
        Command([text, *ASKED, *OF_WEIGHTS, "--tensor-parallel", "2", "--output", str(tmp_path / "shared")]),
        Command(asked, _dies),
    ]
    long_ranks, shared_ranks, (first, dead) = on_ranks(2, commands, tmp_path)
    for ranks_of_it, hashes_of_one in (
        (long_ranks, alone("long alone", long)),
        (shared_ranks, alone("shared alone", [*ASKED, *OF_WEIGHTS])),
    ):
        assert [one.code for one in ranks_of_it] == [0, 0], ranks_of_it
        assert hashes(ranks_of_it[0].out) == hashes_of_one
        assert ranks_of_it[1].out == ranks_of_it[1].err == ""
    for name in ("long", "shared"):
        assert numbers(tmp_path / name) == numbers(tmp_path / f"{name} alone")
    assert (first.code, dead.code) == (2, 7)
    assert hashes(first.out) == expected[:2]
    assert "shared by 2 ranks" in first.out
    assert dead.out == dead.err == ""
    assert first.err.startswith("rank 0: another rank has ended, or has said nothing for 60 s: this one ends, too.")
    assert first.err.endswith("checkpoint.safetensors is that of step 2.\n")
    ((first, *others),) = on_ranks(3, [Command([*asked, "--fsdp", "--resume"])], tmp_path)
    assert [first.code, *(one.code for one in others)] == [0, 0, 0], first.err
    assert hashes(first.out) == expected[2:]
    assert all(one.out == one.err == "" for one in others)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "alone")
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == sorted(
        one.name for one in (tmp_path / "alone").iterdir()
    )


LONG = [*ASKED, "--size", "micro", "--sequence", "512", "--groups", "1", "--accumulate", "1"]
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.gpus(2)]),
]


@pytest.mark.parametrize("device", DEVICES)
def test_two_that_share_microbatches_print_the_hashes_of_a_cpu(
    device: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In FP8 with dropout; one process on a CPU reads the checkpoint of each."""
    layouts = {
        "weights": ["--tensor-parallel", "2"],
        "tokens": ["--context-parallel", "2"],
    }
    commands = [
        Command([text, *LONG, *more, "--device", device, "--output", str(tmp_path / name)])
        for name, more in layouts.items()
    ]
    found = on_ranks(2, commands, tmp_path, 120)  # GPUs may have kernels to compile
    assert main(["train", text, *LONG, "--output", str(tmp_path / "alone")]) == 0
    expected = hashes(capsys.readouterr().out)
    assert len(expected) == STEPS
    for name, (first, second) in zip(layouts, found, strict=True):
        assert (first.code, second.code) == (0, 0), (name, first.err, second.err)
        assert hashes(first.out) == expected, name
        assert numbers(tmp_path / name) == numbers(tmp_path / "alone"), name
        assert main(["train", text, *LONG, "--resume", "--output", str(tmp_path / name)]) == 0, name


@pytest.mark.slow
def test_a_rank_that_says_nothing_ends_the_others_in_time(text: str, tmp_path: Path) -> None:
    since = time.monotonic()
    asked = [text, *SHARED, "--output", str(tmp_path / "run")]
    ((first, _),) = on_ranks(2, [Command(asked, _sleeps)], tmp_path, 6)
    assert time.monotonic() - since < 50
    assert first.code == 2
    assert "rank 0: another rank has ended, or has said nothing for 6 s: this one ends, too." in first.err


def test_ranks_end_together_and_rank_0_says_why(text: str, tmp_path: Path) -> None:
    asked, other, no = [text, *SHARED], tmp_path / "other.txt", str(tmp_path / "no")
    other.write_bytes(TEXT)
    layout, long = [text, *ASKED], ["--sequence", "512", "--groups", "1", "--accumulate", "1"]
    refused: list[tuple[Command, str]] = [
        (Command([*asked, "--groups", "1"]), "--data-parallel: 2 ranks share steps of 1 groups; as many --groups, or"),
        (
            Command([*asked, "--fsdp", "--sample", "9"]),
            "--sample with --fsdp: a process that has all weights writes; --resume",
        ),
        (Command([*asked, "--record", "2"]), "--record with --data-parallel: a step of one process is recorded"),
        (
            Command([*layout, *long, "--context-parallel", "2", "--sample", "9"]),
            "--sample with --context-parallel: a process that has all weights writes; --resume",
        ),
        (Command([*layout, "--context-parallel", "2"]), "twin train: sequence=16 with context=2; a multiple of 512 is"),
        (Command([*layout, "--tensor-parallel", "2"]), "hidden=128 with tensor=2 and precision='delayed': the layers'"),
        (
            Command([*layout, "--tensor-parallel", "3"]),
            "--tensor-parallel 3: 2 ranks are here; a multiple of 3 with --data-parallel, or 3, is accepted.",
        ),
        (Command(asked, texts=([], [str(other)])), "rank 1 has text="),
        (Command(asked, texts=([], [no])), "rank 1: twin train: the text"),
    ]
    run = [*asked, "--output", str(tmp_path / "run")]
    nothing = [replace(one, asked=[*one.asked, "--output", str(tmp_path / "none")]) for one, _ in refused]
    refused += [
        (Command(run, _has_a_nan), "the loss of step 3 is nan: the run stops. One process, with --resume"),
        (Command([*run, "--resume"], _has_another_weight), "the state of rank 1 after step 3 has the SHA-256"),
    ]
    commands = [*nothing, *[one for one, _ in refused[len(nothing) :]]]
    for (first, second), (_, sentence) in zip(on_ranks(2, commands, tmp_path), refused, strict=True):
        assert (first.code, second.code) == (2, 2), sentence
        assert sentence in first.err
        assert first.err.count("\n") == 1
        assert second.out == second.err == ""
    assert not (tmp_path / "none").exists()


def test_what_one_rank_alone_refuses_ends_ranks_that_share_weights(text: str, tmp_path: Path) -> None:
    """Before they make their groups, in which a rank would wait for the other."""
    asked = [text, *ASKED, *OF_WEIGHTS, "--tensor-parallel", "2", "--output"]
    short = tmp_path / "short.txt"
    short.write_bytes(TEXT[:20])
    held, none = tmp_path / "held", tmp_path / "none"
    commands = [Command([*asked, str(held)]), Command([*asked[1:], str(none)], texts=([text], [str(short)]))]
    since = time.monotonic()
    with files.locked(held, LOCK):
        (locked, other), (first, second) = on_ranks(2, commands, tmp_path)
    assert time.monotonic() - since < SECONDS
    assert [one.code for one in (locked, other, first, second)] == [2] * 4, (locked, other, first, second)
    assert locked.err.startswith(f"--output {held}: {held} is in use by process {os.getpid()} ")
    assert first.err.startswith("rank 1: twin train: the text has 20 bytes")
    assert other.err == second.err == ""
    assert not none.exists()


def test_an_error_that_is_no_refusal_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[BaseException] = []
    monkeypatch.setattr(ending, "told", lambda error, block: said.append(error))

    def fails() -> None:
        raise KeyError("a defect")

    with pytest.raises(KeyError, match="a defect"):
        ranks.Ranks(1, 2).agreed(fails)
    assert [str(one) for one in said] == ["'a defect'"]


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
    refused(
        [*ASKED, "--tensor-parallel", "2", "--device", "cuda"],
        "--tensor-parallel: RANK, WORLD_SIZE, LOCAL_RANK, MASTER",
    )
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


def test_ranks_count_gpus_only_where_these_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU and a second process: refused on a Hopper GPU, and on CPUs with any other."""
    problems: list[str] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device, "problems", lambda: problems)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(["--tensor-parallel", "2"])
    with pytest.raises(CommandError, match="with more, --device cpu is accepted"):
        train._device(args)
    problems.append("the GPU is no Hopper GPU.")
    assert train._device(args) == torch.device("cpu")
    args = parser.parse_args(["--tensor-parallel", "2", "--device", "cuda"])
    with pytest.raises(CommandError, match="--device cuda: the GPU is no Hopper GPU"):
        train._device(args)
