"""DTensors (`fully_shard`, `distribute_tensor`): their local shards and back, without importing what makes them.

torch.distributed.tensor takes its time to import, and a torch without distributed has none. A program that holds a
DTensor has imported it.
"""

import sys
from typing import Any

import torch


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def placed(x: Any) -> Any:
    """Mesh and placements of a DTensor, None of any other tensor."""
    return (x.device_mesh, tuple(x.placements)) if is_dtensor(x) else None


def shard(x: Any) -> torch.Tensor:
    """The local shard of a DTensor (under no_grad), any other tensor as it is."""
    local: torch.Tensor = x.to_local() if is_dtensor(x) else x
    return local


def like(p: Any, local: torch.Tensor) -> torch.Tensor:
    """A local shard as a DTensor of p's shape and placements, where p is one; no communication."""
    if not is_dtensor(p):
        return local
    mesh, placements = placed(p)
    found: torch.Tensor = type(p).from_local(local, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())
    return found


def distributed(values: torch.Tensor, p: Any) -> torch.Tensor:
    """The whole tensor `values`, which every rank has, placed as the DTensor p is; no communication."""
    if not is_dtensor(p):
        return values
    found: torch.Tensor = sys.modules["torch.distributed.tensor"].distribute_tensor(
        values, *placed(p), src_data_rank=None
    )
    return found
