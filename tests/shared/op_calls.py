"""The calls in the lists of the ops (optimized/recordings/cases), as tests make them."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from shared.dry_gpu import DryGpu, Launched
from torch.utils._pytree import tree_map_only

from optimized.recordings import cases
from optimized.recordings.calls import Call, Inputs

LISTS = sorted(cases.having("calls"))
SIZED = sorted(cases.having("sized"))


def drawn(name: str, seed: int = 0) -> list[Call]:
    """The calls of a file, on the CPU."""
    return list(cases.MODULES[name].calls(Inputs("cpu", seed)))


def moved(call: Call, device: torch.device) -> Call:
    """The same call there, of memory laid out alike: strides, where tensors begin, and who shares memory."""
    storages: dict[int, torch.Tensor] = {}

    def there(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.empty(0, dtype=torch.uint8).set_(storage).to(device)
        whole = storages[storage._cdata].view(x.dtype)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    return call._replace(args=tree_map_only(torch.Tensor, there, call.args))


def sized(name: str, device: torch.device | str, rows: int, cols: int) -> Iterator[Call]:
    """Its calls with matrices of that size."""
    yield from cases.MODULES[name].sized(Inputs(device), rows, cols)


@functools.cache
def dry(name: str) -> tuple[set[str], list[Launched]]:
    """The ops that a file calls, large calls among them, and what they launch: on a GPU that only takes notes."""
    module, ops = cases.MODULES[name], set()
    with DryGpu(written=False) as gpu:
        for function in ("calls", "large"):
            for call in getattr(module, function, lambda inputs: ())(Inputs("cuda", filled=False)):
                ops.add(call.name)
                call.run()
    return ops, gpu.launches


def dry_sized(name: str, rows: int, cols: int) -> tuple[set[str], list[Launched]]:
    """The same with matrices of that size; a call that is refused launches nothing."""
    ops = set()
    with DryGpu(written=False) as gpu:
        for call in cases.MODULES[name].sized(Inputs("cuda", filled=False), rows, cols):
            ops.add(call.name)
            with contextlib.suppress(ValueError):
                call.run()
    return ops, gpu.launches
