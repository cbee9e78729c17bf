"""DTensors (`fully_shard`, `distribute_tensor`): to local shards and back, without importing torch.distributed.tensor.

That import is slow, and fails in a torch without distributed. A program that holds a DTensor has imported it.
"""

import sys
from typing import Any

import torch


def is_dtensor(x: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def placed(x: Any) -> Any:
    """Mesh and placements of a DTensor; None for any other tensor."""
    return (x.device_mesh, tuple(x.placements)) if is_dtensor(x) else None


def shard(x: Any) -> torch.Tensor:
    """The local shard of a DTensor (under no_grad), or any other tensor itself."""
    local: torch.Tensor = x.to_local() if is_dtensor(x) else x
    return local


def full(x: Any) -> torch.Tensor:
    """The whole of a DTensor, which all ranks ask for, or any other tensor itself."""
    whole: torch.Tensor = x.full_tensor() if is_dtensor(x) else x
    return whole


def like(p: Any, local: torch.Tensor) -> torch.Tensor:
    """A local shard as a DTensor like p, if p is one; without communication."""
    if not is_dtensor(p):
        return local
    mesh, placements = placed(p)
    found: torch.Tensor = type(p).from_local(local, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())
    return found


def distributed(values: torch.Tensor, p: Any) -> torch.Tensor:
    """The whole tensor `values`, which every rank has, as a DTensor like p, if p is one; without communication."""
    if not is_dtensor(p):
        return values
    found: torch.Tensor = sys.modules["torch.distributed.tensor"].distribute_tensor(
        values, *placed(p), src_data_rank=None
    )
    return found
