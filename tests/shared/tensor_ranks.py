"""Tensor-parallel layers on ranks beside one process: what each rank has must be its part of the one's words.

Ranks are processes on the CPU over gloo, or a GPU each over NCCL; the one process is on the CPU. Programs say with
`here` where their tensors are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.processes import free_port, ranks

import reference as te
from reference.nn.core.parameters import DeviceDefault
from reference.recipe import Float8BlockScaling, Float8CurrentScaling

BF16 = torch.bfloat16
RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": te.DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}
Program = Callable[..., dict[str, torch.Tensor]]
_AGAIN = "again "
_HERE = torch.device("cpu")
BACKENDS = [
    pytest.param("gloo", marks=pytest.mark.slow),
    pytest.param("nccl", marks=[pytest.mark.gpu, pytest.mark.gpus(2)]),
]


def here(x: torch.Tensor) -> torch.Tensor:
    """x on this rank's device."""
    return x.to(_HERE)


def device_type() -> str:
    """This rank's kind of device, as a mesh names it."""
    return _HERE.type


def numbers(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """bf16, with large and small numbers in different places, so that parts have amaxes of their own."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-6, 7, shape[-1:], generator=g)
    return here((x * scale).to(BF16))


def _on_gpu(rank: int) -> None:
    """Layers and tensors of this process are on a GPU from now on."""
    global _HERE
    import optimized  # noqa: F401  (registers the CUDA implementations)

    _HERE = torch.device("cuda", rank)
    torch.cuda.set_device(_HERE)
    DeviceDefault.default_device = "cuda"


def _work(
    rank: int, count: int, port: int, folder: str, program: Program, arguments: tuple[Any, ...], backend: str
) -> None:
    if backend == "nccl":
        _on_gpu(rank)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    try:
        found = {}
        for name, one in arguments:
            try:
                found[name] = program(dist.group.WORLD, count, rank, *one)
            except Exception as error:
                error.add_note(f"rank {rank} of {count}: {name}")
                raise
        torch.save(found, Path(folder) / f"{rank}.pt")
        dist.barrier()  # rank 0's store serves the others until the last of them has made its groups
    finally:
        dist.destroy_process_group()


def on_ranks(
    count: int, folder: Path, program: Program, arguments: dict[str, Any], backend: str = "gloo"
) -> list[dict[str, Any]]:
    """`program(group, count, rank, *arguments)` by name, on each of `count` ranks; over "nccl", on a GPU each."""
    ranks(_work, (count, free_port(), str(folder), program, tuple(arguments.items()), backend), count)
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(count)]


def in_one(program: Program, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same in this process, which has all of everything."""
    return {name: program(None, 1, 0, *one) for name, one in arguments.items()}


def twice(group: Any, count: int, rank: int, program: Program, *case: Any) -> dict[str, torch.Tensor]:
    """What a program finds, and what it finds again; see `again_too`. On a GPU its tapes are graphs by then."""
    first, *_, last = (program(group, count, rank, *case) for _ in range(2 if _HERE.type == "cpu" else 6))
    return first | {_AGAIN + name: x for name, x in last.items()}


def again_too(one: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `twice` finds of a program that finds the same each time."""
    return one | {_AGAIN + name: x for name, x in one.items()}


def part(x: torch.Tensor, dim: int | None, rank: int, count: int, pieces: int = 1) -> torch.Tensor:
    """A rank's part of a tensor along a dimension, of each of `pieces` pieces; all of it for None."""
    if dim is None:
        return x
    return torch.cat([one.chunk(count, dim)[rank] for one in x.chunk(pieces, dim)], dim)


def trained(
    layer: Any, recipe: str, steps: int, given: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Steps with SGD: y, dx, gradients of each, then parameters and scales; `given`: step → this rank's x and dL/dy."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.25)
    found: dict[str, torch.Tensor] = {}
    for step in range(steps):
        x, g = given(step)
        x.requires_grad_()
        with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            y = layer(x)
        y.backward(g)
        found |= {f"{step}.y": y.detach(), f"{step}.dx": x.grad}  # type: ignore[dict-item]
        found |= {f"{step}.{name}.grad": p.grad.clone() for name, p in layer.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found |= {name: p.detach() for name, p in layer.named_parameters()}
    for name, module in layer.named_modules():
        for key in ("scaling_fwd", "scaling_bwd") if recipe == "delayed" and hasattr(module, "fp8_meta") else ():
            if key in module.fp8_meta:
                meta = module.fp8_meta[key]
                found |= {f"{name}.{key}.scale": meta.scale, f"{name}.{key}.history": meta.amax_history}
    return found


def compare(
    what: str, one: dict[str, torch.Tensor], found: list[dict[str, torch.Tensor]], dims: Callable[[str], Any]
) -> None:
    """Every rank's tensors are its parts of the one process's; `dims`: name → dim, or (dim, pieces).

    What `twice` found again is cut as what it found first.
    """
    for rank, tensors in enumerate(found):
        assert tensors.keys() == one.keys()
        for name, x in tensors.items():
            how = dims(name.removeprefix(_AGAIN))
            dim, pieces = how if isinstance(how, tuple) else (how, 1)
            expected = part(one[name], dim, rank, len(found), pieces)
            assert x.shape == expected.shape, (name, x.shape, expected.shape)
            assert_same_bits(expected, x, f"{what}, rank {rank}, {name}")
