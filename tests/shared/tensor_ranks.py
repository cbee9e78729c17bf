"""Tensor-parallel layers on gloo ranks beside one process: what each rank has must be its part of the one's words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.processes import free_port, ranks

import reference as te
from reference.recipe import Float8BlockScaling, Float8CurrentScaling

BF16 = torch.bfloat16
RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": te.DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}
Program = Callable[..., dict[str, torch.Tensor]]


def numbers(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """bf16, with large and small numbers in different places, so that parts have amaxes of their own."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-6, 7, shape[-1:], generator=g)
    return (x * scale).to(BF16)


def _work(rank: int, count: int, port: int, folder: str, program: Program, arguments: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    try:
        found = {name: program(dist.group.WORLD, count, rank, *one) for name, one in arguments}
        torch.save(found, Path(folder) / f"{rank}.pt")
        dist.barrier()  # rank 0's store serves the others until the last of them has made its groups
    finally:
        dist.destroy_process_group()


def on_ranks(count: int, folder: Path, program: Program, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """`program(group, count, rank, *arguments)` by name, on each of `count` ranks."""
    ranks(_work, (count, free_port(), str(folder), program, tuple(arguments.items())), count)
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def in_one(program: Program, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same in this process, which has all of everything."""
    return {name: program(None, 1, 0, *one) for name, one in arguments.items()}


def part(x: torch.Tensor, dim: int | None, rank: int, count: int, pieces: int = 1) -> torch.Tensor:
    """A rank's part of a tensor along a dimension, of each of `pieces` pieces; all of it for None."""
    if dim is None:
        return x
    return torch.cat([one.chunk(count, dim)[rank] for one in x.chunk(pieces, dim)], dim)


def compare(
    what: str, one: dict[str, torch.Tensor], found: list[dict[str, torch.Tensor]], dims: Callable[[str], Any]
) -> None:
    """Every rank's tensors are its parts of the one process's; `dims`: name → dim, or (dim, pieces)."""
    for rank, tensors in enumerate(found):
        assert tensors.keys() == one.keys()
        for name, x in tensors.items():
            how = dims(name)
            dim, pieces = how if isinstance(how, tuple) else (how, 1)
            expected = part(one[name], dim, rank, len(found), pieces)
            assert x.shape == expected.shape, (name, x.shape, expected.shape)
            assert_same_bits(expected, x, f"{what}, rank {rank}, {name}")
