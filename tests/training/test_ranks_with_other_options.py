"""Ranks that do not ask for the same run, or of which one cannot load: all end with a sentence, and none waits."""

import contextlib
import datetime
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared.processes import free_port, started
from shared.training_text import TEXT, corpus

import reference as te
from optimized.commands import main, ranks
from optimized.training.settings import Settings
from optimized.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
SECONDS = 60.0  # of silence
ASKED = ["--sequence", "16", "--rows", "1", "--accumulate", "2", "--groups", "2", "--device", "cpu"]
ASKED += ["--steps", "2", "--save", "1", "--evaluate", "2", "--warmup", "1"]
TINY = Settings(sequence=16, hidden=32, layers=1, rows=1, accumulate=2, groups=2, steps=2, warmup=1)


def commands(rank: int, folder: str, ports: list[int], asked: list[tuple[list[str], list[str]]]) -> None:
    """`twin train` again and again, on two ranks, each with its own arguments."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks.LIMIT = datetime.timedelta(seconds=SECONDS)
    for number, (port, of_ranks) in enumerate(zip(ports, asked, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        with contextlib.ExitStack() as held:
            error = held.enter_context(open(f"{folder}/{number}.{rank}.err", "w"))
            held.enter_context(contextlib.redirect_stderr(error))
            held.enter_context(contextlib.redirect_stdout(held.enter_context(open(os.devnull, "w"))))
            code = main(["train", *of_ranks[rank]])
        Path(f"{folder}/{number}.{rank}.code").write_text(str(code))
        if dist.is_initialized():
            dist.destroy_process_group()


def on_two_ranks(work: Any, *arguments: Any) -> None:
    """Within the ranks' timeout."""
    since = time.monotonic()
    processes = [started(work, rank, *arguments) for rank in range(2)]
    for process in processes:
        process.join(SECONDS - (time.monotonic() - since))
        ended = process.exitcode is not None
        for one in processes if not ended else ():
            one.kill()
        assert ended, "a rank waits"


def refused(folder: Path, cases: list[tuple[list[str], list[str], str]]) -> None:
    on_two_ranks(commands, str(folder), [free_port() for _ in cases], [case[:2] for case in cases])
    for number, (*_, sentence) in enumerate(cases):
        code, error = (
            [(folder / f"{number}.{rank}.{end}").read_text() for rank in range(2)] for end in ("code", "err")
        )
        assert code == ["2", "2"], (sentence, code, error)
        assert error[0].startswith(sentence), (sentence, error)
        assert error[1] == ""


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "products.txt"
    path.write_bytes(TEXT)
    return str(path)


def test_options_that_differ_are_named_before_there_is_a_process_group(text: str, tmp_path: Path) -> None:
    asked = [text, *ASKED, "--output", str(tmp_path / "run")]
    shared = [*asked, "--data-parallel"]
    same = "the same options on all ranks are accepted."
    cases = [
        (shared, asked, "rank 1: WORLD_SIZE=2: so many processes would each train the same; --data-parallel"),
        (shared, [*asked, "--fsdp"], f"rank 1 has --fsdp, and rank 0 has no --fsdp; {same}"),
        (shared, [*asked, "--tensor-parallel", "2"], "rank 1 has no --data-parallel, and rank 0 has --data-parallel; "),
        (
            [*asked, "--tensor-parallel", "2"],
            [*asked, "--context-parallel", "2"],
            f"rank 1 has --tensor-parallel 1, and rank 0 has --tensor-parallel 2; {same}",
        ),
        (shared, [*shared, "--seed", "3"], f"rank 1 has --seed 3, and rank 0 has no --seed; {same}"),
        (
            [*shared, "--rate", "0.01"],
            [*shared, "--rate", "0.02"],
            f"rank 1 has --rate 0.02, and rank 0 has --rate 0.01; {same}",
        ),
        ([*shared, "--evaluate", "1"], shared, f"rank 1 has --evaluate 2, and rank 0 has --evaluate 1; {same}"),
        ([*shared, "--device", "cuda"], shared, "--device cuda: "),
    ]
    refused(tmp_path, cases)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_one_rank_cannot_load_ends_all(text: str, tmp_path: Path) -> None:
    one = [text, *ASKED, "--output", str(tmp_path / "run")]
    assert main(["train", *one[:-4], *one[-2:], "--steps", "2"]) == 0
    bad = {name: tmp_path / name for name in ("missing", "cut", "other")}
    for name, folder in bad.items():
        folder.mkdir()
        if name != "missing":
            shutil.copy(tmp_path / "run" / "checkpoint.safetensors", folder)
    path = bad["cut"] / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    path = bad["other"] / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    sentences = {"missing": "--resume: rank 0 has a checkpoint in its --output, and rank 1 has none; a folder that"}
    sentences["cut"] = f"rank 1: {bad['cut']}/checkpoint.safetensors is no whole safetensors file"
    sentences["other"] = f"rank 1: {bad['other']}/checkpoint.safetensors is damaged"
    asked = [text, "--device", "cpu", "--resume", "--fsdp", "--output"]
    refused(
        tmp_path,
        [([*asked, str(tmp_path / "run")], [*asked, str(folder)], sentences[name]) for name, folder in bad.items()],
    )


def trainers(rank: int, folder: str, port: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=limit)
    said = []
    for of_ranks in cases:
        given = of_ranks[rank]
        layout = {name: given[name] for name in given if name in ("shard", "tensor", "context")}
        settings = replace(TINY, **{name: given[name] for name in given.keys() - layout.keys()})
        with pytest.raises(ValueError, match="rank 0 has") as error:
            Trainer(settings, corpus(), **layout)
        said.append(str(error.value))
    Path(f"{folder}/{rank}.txt").write_text("\n".join(said))
    dist.barrier()
    os._exit(0)


def test_settings_and_layouts_that_differ_are_named_before_groups_are_made(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"tensor": 2}, "rank 1 has tensor=2, and rank 0 has 1; the same settings, layout and text are accepted."),
        ({"shard": True}, {}, "rank 1 has shard=False, and rank 0 has True; "),
        ({"context": 2}, {"tensor": 2}, "rank 1 has tensor=2, and rank 0 has 1; "),
        ({"precision": "bf16"}, {"hidden": 64, "precision": "bf16"}, "rank 1 has hidden=64, and rank 0 has 32; "),
    ]
    on_two_ranks(trainers, str(tmp_path), free_port(), [case[:2] for case in cases])
    for rank in range(2):
        said = (tmp_path / f"{rank}.txt").read_text().split("\n")
        for sentence, (*_, expected) in zip(said, cases, strict=True):
            assert sentence.startswith(expected), rank


def loads(rank: int, folder: str, port: int) -> None:
    """A distributed checkpoint that rank 1 does not have; the ranks tell each other whether they have loaded."""
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=limit)
    where = Path(folder, ("whole", "missing")[rank])
    model, said = te.Linear(16, 16, device="cpu"), []
    for way in ("te.load_fp8_state", "dcp.load"):
        loaded = torch.ones(1)
        try:
            if way == "dcp.load":
                dcp.load(model.state_dict(), checkpoint_id=where)
            else:
                te.load_fp8_state(model, where)
        except BaseException as error:  # CheckpointException is no Exception
            loaded.zero_()
            said.append(f"{way}: {type(error).__name__}")
        dist.all_reduce(loaded, dist.ReduceOp.MIN)
        assert loaded.item() == 0
    Path(f"{folder}/{rank}.txt").write_text("\n".join(said))
    dist.barrier()
    os._exit(0)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_a_distributed_checkpoint_that_one_rank_does_not_have(tmp_path: Path) -> None:
    """FP8 state is read by each rank alone; `dcp.load` is a collective, in which all get the error."""
    model = te.Linear(16, 16, device="cpu")
    te.init_fp8_state(model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "whole")
    on_two_ranks(loads, str(tmp_path), free_port())
    said = [(tmp_path / f"{rank}.txt").read_text().split("\n") for rank in range(2)]
    assert said == [
        ["dcp.load: CheckpointException"],
        ["te.load_fp8_state: ValueError", "dcp.load: CheckpointException"],
    ]
