"""Where a test's ranks compute: on CPUs over gloo, or on a GPU each over NCCL."""

import datetime

import torch
import torch.distributed as dist

LIMIT = datetime.timedelta(seconds=120)


def start(rank: int, world: int, port: int, device: str, limit: datetime.timedelta = LIMIT) -> None:
    """Open the default group of ranks on "cpu" or "cuda"; tensors that say no device are then this rank's GPU's."""
    if device == "cuda":
        import optimized  # noqa: F401  (registers the CUDA implementations)

        torch.cuda.set_device(rank)
    where = f"tcp://127.0.0.1:{port}"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=world, timeout=limit)
