"""A run of the GPT in FP8 with dropout has one hash, on one process and on gloo ranks, and goes on with others."""

import datetime
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from shared.processes import ranks
from shared.training_text import corpus

from optimized.training.settings import SIZES, Settings
from optimized.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
LIMIT = datetime.timedelta(seconds=600)
TINY = Settings(
    sequence=16, hidden=32, layers=1, rows=2, steps=4, warmup=2, dropout=0.1, clip=1.0, weight_decay=0.1, accumulate=8
)
NANO = replace(SIZES["nano"], sequence=32, rows=1, dropout=0.1, accumulate=8, steps=100)
PRECISIONS = ("delayed", "current", "block")


def worker(rank: int, world: int, port: int, size: Settings, steps: int, path: str, shard: bool) -> None:
    """Some steps, from the checkpoint at `path` on if there is one; rank 0 leaves one, each rank its hashes."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=LIMIT)
    found = []
    for precision in PRECISIONS:
        trainer = Trainer(replace(size, precision=precision, groups=8), corpus(), shard=shard)
        file = Path(f"{path}.{precision}")
        if file.exists():
            trainer.load(file)
        dist.barrier()
        for _ in range(steps):
            losses = trainer.train()
        found.append(f"{trainer.digest()} {losses.tolist()}")
        trainer.save(file if rank == 0 else None)
        del trainer
    Path(f"{path}.rank{rank}").write_text("\n".join(found))
    dist.destroy_process_group()


def on_ranks(world: int, size: Settings, steps: int, path: Path, shard: bool = False) -> list[str]:
    """What all ranks found, by precision."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    ranks(worker, (world, port, size, steps, str(path), shard), world)
    found = {Path(f"{path}.rank{rank}").read_text() for rank in range(world)}
    assert len(found) == 1, "ranks differ"
    return found.pop().split("\n")


def alone(size: Settings, steps: int) -> list[str]:
    found = []
    for precision in PRECISIONS:
        trainer = Trainer(replace(size, precision=precision, groups=8), corpus())
        for _ in range(steps):
            losses = trainer.train()
        found.append(f"{trainer.digest()} {losses.tolist()}")
    return found


def test_a_run_stops_on_two_ranks_and_goes_on_with_three_that_divide_its_weights(tmp_path: Path) -> None:
    on_ranks(2, TINY, 2, tmp_path / "run")
    assert on_ranks(3, TINY, 2, tmp_path / "run", shard=True) == alone(TINY, 4)


@pytest.mark.slow
def test_layers_that_are_recomputed_may_be_divided(tmp_path: Path) -> None:
    assert on_ranks(2, replace(TINY, recompute=True), 2, tmp_path / "run", shard=True) == alone(TINY, 2)


@pytest.mark.slow
def test_a_hundred_steps_have_one_hash_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = alone(NANO, 100)
    for shard in (False, True):
        for world in (2, 3, 4, 8):
            assert on_ranks(world, NANO, 100, tmp_path / f"run{world}{shard}", shard) == expected, (world, shard)
