"""A run of the GPT in FP8 with dropout has the hash of one process under PyTorch's DDP, HSDP and pipelines, too."""

import datetime
import functools
import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from shared.hundred_steps import NANO, PRECISIONS, steps_of
from shared.processes import free_port, ranks
from shared.training_layouts import InDDP, InHSDP, InPipeline
from shared.training_text import corpus

from optimized.training.settings import Settings
from optimized.training.trainer import Trainer
from reference.state import gradient_places

pytestmark = pytest.mark.usefixtures("one_thread")
LIMIT = datetime.timedelta(seconds=600)
TINY = Settings(
    sequence=16, hidden=32, layers=2, rows=2, steps=3, warmup=2, dropout=0.1, clip=1.0, weight_decay=0.1, accumulate=4
)
FEW = {"HSDP 2x2": ("delayed",), "PP 2": ("delayed", "block")}
"""The precisions of the small model; of another layout, and of the large model, all."""
LAYOUTS: dict[str, tuple[int, type[Trainer]]] = {"DDP 2": (2, InDDP), "HSDP 2x2": (4, InHSDP), "PP 2": (2, InPipeline)}
"""How many ranks, and the trainer."""


def hashes(kind: type[Trainer], size: Settings, precisions: tuple[str, ...]) -> list[str]:
    """By precision: the hash of all state, and the losses of the last step."""
    found = []
    for precision in precisions:
        trainer = kind(replace(size, precision=precision, groups=size.accumulate), corpus())
        found.append(steps_of(trainer, size.steps))
        # Weights that are no embeddings; DDP makes new buckets in the second step, from which on they are known.
        assert not isinstance(trainer, InDDP) or trainer.most_places >= 4 * size.layers
        del trainer
        gc.collect()  # layers that live on on one rank would have their scales reduced there alone
    return found


@functools.cache
def alone(size: Settings) -> dict[str, str]:
    """Those of one process, once for all layouts."""
    return dict(zip(PRECISIONS, hashes(Trainer, size, PRECISIONS), strict=True))


def worker(
    rank: int, world: int, port: int, layout: str, size: Settings, precisions: tuple[str, ...], path: str
) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=LIMIT)
    gradient_places.ALIGNMENT = 1  # a CPU reads any address
    Path(f"{path}.{rank}").write_text("\n".join(hashes(LAYOUTS[layout][1], size, precisions)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [TINY, pytest.param(NANO, marks=pytest.mark.slow)], ids=["tiny", "nano"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_has_one_hash(layout: str, size: Settings, tmp_path: Path) -> None:
    """The nano GPT after 100 steps that `test_data_parallel.py` trains in layouts of `twin train`."""
    check(layout, size, tmp_path)


@pytest.mark.parametrize("size", [TINY, pytest.param(NANO, marks=pytest.mark.slow)], ids=["tiny", "nano"])
def test_a_run_whose_gradients_lie_in_ddps_buckets(size: Settings, tmp_path: Path) -> None:
    """Each rank has one microbatch a step, so that backward writes its gradients there."""
    check("DDP 2", replace(size, accumulate=2), tmp_path)


def check(layout: str, size: Settings, tmp_path: Path) -> None:
    world, precisions = LAYOUTS[layout][0], FEW.get(layout, PRECISIONS) if size is TINY else PRECISIONS
    ranks(worker, (world, free_port(), layout, size, precisions, str(tmp_path / "found")), world)
    expected = [alone(size)[one] for one in precisions]
    for rank in range(world):
        assert Path(tmp_path / f"found.{rank}").read_text().split("\n") == expected, f"rank {rank}"
