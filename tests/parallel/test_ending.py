"""`te.parallel.ending_together`: each rank says which of them had an error, ended, or hangs; within the timeout."""

import datetime
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.processes import free_port, started

import reference as te
from reference.parallel.ending import KEY, RanksEnded

WORLD, LIMIT, PATIENCE = 3, 4.0, 2.0  # seconds of silence


def _raises() -> None:
    raise ValueError("weight is torch.int8; torch.bfloat16 is accepted.")


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs() -> None:
    time.sleep(600)


def _other_input() -> None:
    """An input that one rank alone refuses, inside of a backward that others wait in."""
    te.Linear(32, 16, params_dtype=torch.bfloat16, device="cpu")(torch.ones(3, 48, dtype=torch.bfloat16))


def worker(rank: int, port: int, folder: str, event: Callable[[], None]) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=LIMIT),
    )
    dist.barrier()
    x, said = torch.ones(4), "nothing"
    try:
        with te.parallel.ending_together(PATIENCE):
            if rank == 1:
                event()
            dist.all_reduce(x)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(folder, f"{rank}.txt").write_text(said)
    if rank == 0:  # it keeps the store
        time.sleep(PATIENCE + 1)
    os._exit(0)


def twice(rank: int, port: int, folder: str, failing: tuple[int, int]) -> None:
    """Two blocks, in each of which another rank has an error of its own, and the others that of a collective."""
    rendezvous = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": WORLD}
    dist.init_process_group("gloo", **rendezvous)
    said = []
    for fails in failing:
        try:
            with te.parallel.ending_together(PATIENCE):
                raise (
                    ValueError(f"rank {rank}'s own") if rank == fails else RuntimeError("gloo: what it says of a rank")
                )
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    Path(folder, f"{rank}.txt").write_text("\n".join(said))
    dist.barrier()  # rank 0 keeps the store
    os._exit(0)


def nested(rank: int, port: int, folder: str, failing: int) -> None:
    """A block in a block: one rank has an error inside of both, and leaves both before the others listen."""
    rendezvous = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": WORLD}
    dist.init_process_group("gloo", **rendezvous)
    try:
        with te.parallel.ending_together(PATIENCE), te.parallel.ending_together(PATIENCE):
            if rank == failing:
                raise ValueError(f"rank {rank}'s own")
            dist.distributed_c10d._get_default_store().wait([f"{KEY}/{failing}"])
            time.sleep(0.5)
            raise RuntimeError("gloo: what it says of a rank")
    except Exception as error:
        Path(folder, f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    dist.barrier()
    os._exit(0)


def on_ranks(folder: Path, event: Any, worker: Callable[..., None] = worker) -> list[str]:
    port, since = free_port(), time.monotonic()
    processes = [started(worker, rank, port, str(folder), event) for rank in range(WORLD)]
    for rank, process in enumerate(processes):
        if not (rank == 1 and event is _hangs):
            process.join(LIMIT + PATIENCE + 20)
            assert process.exitcode is not None, f"rank {rank} has not ended"
    processes[1].kill()
    processes[1].join()
    assert time.monotonic() - since < LIMIT + PATIENCE + 20
    return [path.read_text() if (path := folder / f"{rank}.txt").exists() else "" for rank in range(WORLD)]


@pytest.mark.parametrize("event", [_raises, _other_input])
def test_an_error_of_one_rank_is_told_to_all(event: Callable[[], None], tmp_path: Path) -> None:
    first, own, last = on_ranks(tmp_path, event)
    assert own.startswith("ValueError: ")
    assert first == f"RanksEnded: rank 0 ends, because rank 1 had an error: {own.rstrip('.')}."
    assert last == f"RanksEnded: rank 2 ends, because rank 1 had an error: {own.rstrip('.')}."


@pytest.mark.parametrize("event", [_is_killed, pytest.param(_hangs, marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_or_hangs_is_named(event: Callable[[], None], tmp_path: Path) -> None:
    first, _, last = on_ranks(tmp_path, event)
    assert first == "RanksEnded: rank 0 ends, because rank 1 ended, or hung, without a word."
    assert last == "RanksEnded: rank 2 ends, because rank 1 ended, or hung, without a word."


def test_what_was_said_in_an_earlier_block_is_not_heard_again(tmp_path: Path) -> None:
    by_rank = [said.split("\n") for said in on_ranks(tmp_path, (1, 2), twice)]
    for block, fails in enumerate((1, 2)):
        for rank, said in enumerate(by_rank):
            why = f"RanksEnded: rank {rank} ends, because rank {fails} had an error: ValueError: rank {fails}'s own."
            assert said[block] == (f"ValueError: rank {rank}'s own" if rank == fails else why)


def test_an_error_inside_of_two_blocks_is_told_once(tmp_path: Path) -> None:
    for rank, said in enumerate(on_ranks(tmp_path, 1, nested)):
        why = f"RanksEnded: rank {rank} ends, because rank 1 had an error: ValueError: rank 1's own."
        assert said == ("ValueError: rank 1's own" if rank == 1 else why)


def test_without_a_process_group_an_error_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="int8"), te.parallel.ending_together():
        _raises()
    assert issubclass(RanksEnded, RuntimeError)
