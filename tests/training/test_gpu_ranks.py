"""A run of the GPT in FP8 with dropout has the hash of one process, on a CPU, on two GPUs over NCCL in any layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from shared.device_ranks import start
from shared.hundred_steps import MODELS, PRECISIONS, hashes, recorded
from shared.processes import free_port, ranks
from shared.training_layouts import InDDP, InPipeline

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
# Of each of `MODELS` the trainers, and the layouts.
HUNDRED: dict[str, dict[str, tuple[Callable[..., Trainer], dict[str, Any]]]] = {
    "data": {
        "DDP": (Trainer, {}),
        "FSDP2": (Trainer, {"shard": True}),
        "PyTorch's DDP": (InDDP, {}),
        "pipeline": (InPipeline, {}),
    },
    "weights": {"tensor parallel": (Trainer, {"tensor": 2})},
    "tokens": {"context parallel": (Trainer, {"context": 2})},
}


def worker(rank: int, port: int, path: str) -> None:
    """Each rank leaves its hashes."""
    start(rank, 2, port, "cuda")
    found = [hashes(size, STEPS, device="cuda", **layout) for size, layout in LAYOUTS.values()]
    Path(f"{path}.{rank}").write_text("\n".join(one for some in found for one in some))
    dist.barrier()
    dist.destroy_process_group()


def of_a_hundred(rank: int, port: int, model: str, layout: str, path: str) -> None:
    """Each rank leaves its hashes."""
    start(rank, 2, port, "cuda")
    kind, options = HUNDRED[model][layout]
    found = hashes(MODELS[model], MODELS[model].steps, kind=kind, device="cuda", **options)
    Path(f"{path}.{rank}").write_text("\n".join(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_two_gpus_have_the_hash_of_a_cpu(tmp_path: Path) -> None:
    ranks(worker, (free_port(), str(tmp_path / "found")), 2)
    cases = [(name, precision) for name in LAYOUTS for precision in PRECISIONS]
    expected = [one for size, _ in LAYOUTS.values() for one in hashes(size, STEPS)]
    for rank in range(2):
        found = Path(tmp_path / f"found.{rank}").read_text().split("\n")
        differ = [case for case, one, other in zip(cases, found, expected, strict=True) if one != other]
        assert not differ, f"rank {rank}: {differ}"


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize(("model", "layout"), [(model, layout) for model in HUNDRED for layout in HUNDRED[model]])
def test_a_hundred_steps_on_two_gpus_have_the_hash_of_a_cpu(model: str, layout: str, tmp_path: Path) -> None:
    ranks(of_a_hundred, (free_port(), model, layout, str(tmp_path / "found")), 2)
    for rank in range(2):
        assert Path(tmp_path / f"found.{rank}").read_text().split("\n") == recorded(model), f"rank {rank}"


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_hundred_steps_on_one_gpu_have_the_hash_of_a_cpu(model: str) -> None:
    assert hashes(MODELS[model], MODELS[model].steps, device="cuda") == recorded(model)
