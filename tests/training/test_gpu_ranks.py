"""A run of the GPT in FP8 with dropout has the hash of one process, on a CPU, on two GPUs over NCCL in any layout."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from shared.device_ranks import start
from shared.processes import free_port, ranks
from shared.training_text import corpus

from optimized.training.settings import Settings
from optimized.training.trainer import Trainer

STEPS = 3
SHORT = Settings(
    sequence=16, hidden=32, layers=1, rows=2, steps=4, warmup=2, dropout=0.1, clip=1.0, weight_decay=0.1, accumulate=4
)
LONG = replace(SHORT, sequence=512, rows=1, accumulate=2)
LAYOUTS: dict[str, tuple[Settings, dict[str, Any]]] = {
    "DDP": (SHORT, {}),
    "FSDP2": (SHORT, {"shard": True}),
    "context parallel": (LONG, {"context": 2}),
}
PRECISIONS = ("delayed", "current", "block")


def hashes(size: Settings, precision: str, device: str, **layout: Any) -> str:
    trainer = Trainer(replace(size, precision=precision, groups=size.accumulate), corpus(), device, **layout)
    for _ in range(STEPS):
        losses = trainer.train()
    return f"{trainer.digest()} {losses.tolist()}"


def worker(rank: int, port: int, path: str) -> None:
    start(rank, 2, port, "cuda")
    found = []
    for size, layout in LAYOUTS.values():
        for precision in PRECISIONS:
            found.append(hashes(size, precision, "cuda", **layout))
            gc.collect()  # layers that live on on one rank would have their scales reduced there alone
    Path(f"{path}.{rank}").write_text("\n".join(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_two_gpus_have_the_hash_of_a_cpu(tmp_path: Path) -> None:
    ranks(worker, (free_port(), str(tmp_path / "found")), 2)
    cases = [(name, precision) for name in LAYOUTS for precision in PRECISIONS]
    alone = {(size, precision): hashes(size, precision, "cpu") for size in (SHORT, LONG) for precision in PRECISIONS}
    expected = [alone[LAYOUTS[name][0], precision] for name, precision in cases]
    for rank in range(2):
        found = Path(tmp_path / f"found.{rank}").read_text().split("\n")
        differ = [case for case, one, other in zip(cases, found, expected, strict=True) if one != other]
        assert not differ, f"rank {rank}: {differ}"
