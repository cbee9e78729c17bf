"""`twin train` on ranks that are killed, or compute another bit: the run goes on, on any layout, to the same bits."""

import contextlib
import datetime
import os
import random
import re
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from shared.processes import free_port, started
from shared.training_text import TEXT

from optimized.commands import main, ranks
from optimized.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
MODEL = ["--sequence", "16", "--rows", "1", "--warmup", "2", "--dropout", "0.1", "--device", "cpu"]
SHARED = [*MODEL, "--accumulate", "3", "--groups", "3"]
KILLS, SECONDS = 20, 60.0


class Event(NamedTuple):
    """What happens on a rank before one of its steps."""

    rank: int
    step: int
    kind: str
    after: float = 0.0  # seconds


@dataclass
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


@torch.no_grad()
def _flip(trainer: Trainer, kind: str) -> None:
    """Flip the lowest bit of one word."""
    tensors = trainer.tensors()
    name = next(name for name in tensors if name.startswith(kind))
    tensors[name].view(-1).view(torch.int32)[1] ^= 1


def _worker(rank: int, world: int, port: int, asked: list[str], at: str, event: Event | None) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks.LIMIT = datetime.timedelta(seconds=SECONDS)
    train = Trainer.train

    def one_step(trainer: Trainer, capture: bool = True) -> torch.Tensor:
        here = event is not None and (rank, trainer.step) == (event.rank, event.step)
        if event is not None and here and event.kind == "killed":  # anywhere: in a forward, a sum, a write
            threading.Timer(event.after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        losses = train(trainer, capture)
        if event is not None and here and event.kind != "killed":
            _flip(trainer, event.kind)
        return losses

    Trainer.train = one_step  # type: ignore[method-assign]
    with contextlib.ExitStack() as files:
        files.enter_context(contextlib.redirect_stdout(files.enter_context(open(f"{at}.out", "w"))))
        files.enter_context(contextlib.redirect_stderr(files.enter_context(open(f"{at}.err", "w"))))
        code = main(asked)
    sys.exit(code)


def on_ranks(world: int, asked: list[str], folder: Path, event: Event | None = None) -> list[Ended]:
    port, paths = free_port(), [folder / f"rank{rank}" for rank in range(world)]
    processes: list[Any] = [
        started(_worker, rank, world, port, ["train", *asked], str(paths[rank]), event) for rank in range(world)
    ]
    found = []
    for process, path in zip(processes, paths, strict=True):
        process.join(SECONDS + 40)
        assert process.exitcode is not None, "a rank has not ended"
        found.append(Ended(process.exitcode, *(Path(f"{path}.{end}").read_text() for end in ("out", "err"))))
    return found


def hashes(out: str) -> dict[int, str]:
    return {int(step): one for step, one in re.findall(r"step (\d+) sha256 ([0-9a-f]{64})", out)}


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "products.txt"
    path.write_bytes(TEXT)
    return str(path)


def test_the_step_the_rank_and_the_word_that_differ_are_named(text: str, tmp_path: Path) -> None:
    """Of three ranks the second has a wrong bit after its second step, and the ranks compare after the fourth."""
    asked = [text, *SHARED, "--steps", "6", "--save", "4", "--evaluate", "6", "--data-parallel", "--compare-every", "4"]
    for kind, made in (("model/", "twin::adam"), ("fp8/", "twin::scale_update")):
        folder = tmp_path / kind.strip("/")
        found = on_ranks(3, [*asked, "--output", str(folder)], tmp_path, Event(1, 1, kind))
        assert [one.code for one in found] == [2, 2, 2], found[0].err
        said = found[0].err
        assert f"--compare-every: rank 1 has other words after step 2: {kind}" in said
        assert re.search(r": its word 1, by [+-]1 as an integer", said), said
        assert made in said
        assert "the run stops. No checkpoint was written." in said
        assert not (folder / "checkpoint.safetensors").exists()


def test_ranks_that_agree_go_on_and_one_process_has_nobody_to_compare_with(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [text, *SHARED, "--steps", "3", "--save", "2", "--evaluate", "3"]
    more = ["--fsdp", "--compare-every", "1", "--output", str(tmp_path / "run")]
    assert [one.code for one in on_ranks(2, [*asked, *more], tmp_path)] == [0, 0]
    assert main(["train", *asked, "--compare-every", "1", "--output", str(tmp_path / "alone")]) == 2
    assert "--compare-every: one process has no other to compare with" in capsys.readouterr().err


@pytest.mark.slow
def test_twenty_kills_of_a_random_rank_leave_the_hash_of_the_undisturbed_run(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After each the run goes on with another number of ranks, or with weights divided, from what is on disk."""
    rng = random.Random(33)
    steps = 2 * KILLS + 2
    asked = [text, *SHARED, "--steps", str(steps), "--verify", "1", "--save", "1", "--evaluate", str(steps)]
    assert main(["train", *asked, "--output", str(tmp_path / "alone")]) == 0
    expected = hashes(capsys.readouterr().out)
    assert len(expected) == steps
    run, killed, done = tmp_path / "run", 0, 0
    while killed < KILLS:
        world = rng.choice((2, 3))
        layout = [rng.choice(("--data-parallel", "--fsdp")), "--compare-every", "1"]
        event = Event(rng.randrange(world), done + rng.randrange(2), "killed", rng.uniform(0, 0.6))
        found = on_ranks(world, [*asked, *layout, "--resume", "--output", str(run)], tmp_path, event)
        codes = [one.code for one in found]
        assert codes[event.rank] == -signal.SIGKILL, (codes, [one.err for one in found])
        for rank, one in enumerate(found):
            assert rank == event.rank or (one.code == 2 and "another rank has ended" in one.err), (rank, one)
        killed += 1
        seen = hashes(found[0].out)
        assert all(expected[step] == its for step, its in seen.items())
        done = max(done, max(seen, default=0))
        if done >= steps - 2:  # the kills outran the run: it begins anew
            shutil.rmtree(run)
            done = 0
    assert main(["train", *asked, "--resume", "--output", str(run)]) == 0
    last = hashes(capsys.readouterr().out)
    assert last[steps] == expected[steps]
