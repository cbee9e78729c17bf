"""The calls in the lists of the ops (optimized/recordings/cases), as tests make them."""

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from shared.dry_gpu import DryGpu, Launched

from optimized.recordings import cases
from optimized.recordings.calls import Call, Inputs
from reference.inspect.recorded_step.ops import tensors_of

LISTS = sorted(cases.having("calls"))
SIZED = sorted(cases.having("sized"))


def drawn(name: str, seed: int = 0) -> list[Call]:
    """The calls of a file, on the CPU."""
    return list(cases.MODULES[name].calls(Inputs("cpu", seed)))


def listed(name: str) -> list[Call]:
    """The calls of a file, large ones among them, without numbers."""
    module = cases.MODULES[name]
    every = (getattr(module, function, lambda inputs: ()) for function in ("calls", "large"))
    return [call for function in every for call in function(Inputs("meta", filled=False))]


def sized(name: str, device: torch.device | str, rows: int, cols: int) -> Iterator[Call]:
    """Its calls with matrices of that size."""
    yield from cases.MODULES[name].sized(Inputs(device), rows, cols)


class Ran(NamedTuple):
    """A call's op, how many numbers each of its tensors has, and what it launches."""

    op: str
    sizes: set[int]
    launches: list[Launched]


@functools.cache
def dry_calls(name: str) -> list[Ran]:
    """The calls of a file, large calls among them, on a GPU that only takes notes."""
    module, ran = cases.MODULES[name], []
    with DryGpu(written=False) as gpu:
        for function in ("calls", "large"):
            for call in getattr(module, function, lambda inputs: ())(Inputs("cuda", filled=False)):
                before = len(gpu.launches)
                call.run()
                sizes = {x.numel() for x in tensors_of(call.args)}
                ran.append(Ran(call.name, sizes, gpu.launches[before:]))
    return ran


def dry(name: str) -> list[Launched]:
    """What a file's calls launch."""
    return [launched for one in dry_calls(name) for launched in one.launches]


def dry_sized(name: str, rows: int, cols: int) -> list[Launched]:
    """The same with matrices of that size; a call that is refused launches nothing."""
    with DryGpu(written=False) as gpu:
        for call in cases.MODULES[name].sized(Inputs("cuda", filled=False), rows, cols):
            with contextlib.suppress(ValueError):
                call.run()
    return gpu.launches
