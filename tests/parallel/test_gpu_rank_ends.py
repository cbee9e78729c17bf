"""A GPU's rank that is killed, or hangs, while another waits for its words in peers' memory: that one ends, too.

It waits on the GPU, where no time-out reaches. A collective of the process group that is in flight beside it
(`reference.parallel.peer_memory.Beat`) does have one, and NCCL's watchdog then ends the process.
"""

import datetime
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.device_ranks import start
from shared.processes import free_port, started
from torch.nn.parallel import DistributedDataParallel

import reference as te

LIMIT = 30  # seconds: the process group's
PATIENCE = 150  # seconds for imports and kernels; and for NCCL, which writes and ends much after its time-out


def _model(**options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [te.TransformerLayer(256, 256, 4, params_dtype=torch.bfloat16, **options) for _ in range(2)]
    return torch.nn.Sequential(*layers).cuda()


def _backward(model: torch.nn.Module, x: torch.Tensor) -> None:
    with te.autocast(enabled=True):
        model(x).float().square().mean().backward()


def _in_order(model: torch.nn.Module, order: te.parallel.GradientOrder) -> Callable[[], None]:
    """Steps of two microbatches, one on each rank."""
    x = torch.randn(128, 2, 256, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        model.zero_grad()
        for _ in order.microbatches(model, 2):
            _backward(model, x)

    return step


def in_ddp() -> Callable[[], None]:
    """Steps whose gradients are added by the copy engines."""
    model, order = DistributedDataParallel(_model()), te.parallel.GradientOrder(2)
    model.register_comm_hook(order, te.parallel.tree_hook)
    return _in_order(model, order)


def in_fsdp() -> Callable[[], None]:
    """Steps whose weights are gathered, and gradients added, by the copy engines."""
    from torch.distributed.fsdp import fully_shard

    model, order = _model(), te.parallel.GradientOrder(2)
    for part in (*model, model):
        fully_shard(part)
    te.parallel.copy_engine_all_gather(model)
    te.parallel.tree_reduce_scatter(model, order)
    return _in_order(model, order)


def in_tensor_parallel() -> Callable[[], None]:
    """Forward and backward of layers whose weights ranks share."""
    group = torch.distributed.group.WORLD
    model = _model(set_parallel_mode=True, tp_group=group, sequence_parallel=True)
    x = torch.randn(64, 2, 256, dtype=torch.bfloat16, device="cuda")
    return lambda: _backward(model, x)


WAYS = {"DDP": in_ddp, "FSDP2": in_fsdp, "tensor parallel": in_tensor_parallel}


def worker(rank: int, port: int, way: str, event: str, folder: str) -> None:
    start(rank, 2, port, "cuda", datetime.timedelta(seconds=LIMIT))
    step = WAYS[way]()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    Path(folder, f"{rank}.trained").touch()
    if rank == 1:
        if event == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    while True:
        step()
        torch.cuda.synchronize()


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("event", ["killed", "hangs"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_waits_for_another_ends_within_the_time_out(way: str, event: str, tmp_path: Path) -> None:
    port = free_port()
    first, other = (started(worker, rank, port, way, event, str(tmp_path)) for rank in range(2))
    try:
        end = time.monotonic() + 2 * PATIENCE
        while not (tmp_path / "0.trained").exists():
            assert time.monotonic() < end, "no step was made"
            assert first.exitcode is None, first.exitcode
            time.sleep(0.1)
        since = time.monotonic()
        first.join(LIMIT + PATIENCE)
        assert first.exitcode not in (None, 0), f"rank 0 is {first.exitcode} after {time.monotonic() - since:.0f} s"
    finally:
        for process in (first, other):
            process.kill()
            process.join()
