"""`twin::scale_update` on the GPU: kernels/scale_update.cu, one launch for all modules of a device.
Semantics: `reference.ops.scale_update`.
"""

import itertools
from typing import Any

import numpy as np
import torch

from optimized import launch
from reference.ops.library import on_cuda
from reference.ops.scale_update import ALGORITHMS, outputs

# Modules whose addresses fit in the kernel's argument (24 bytes each, of 32764). A model with more takes more
# launches; a small one need not pay for a large argument.
CAPACITIES = (64, 1024)
CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [
    ("scale_update", {"CAPACITY": capacity, "MOST_RECENT": recent})
    for capacity, recent in itertools.product(CAPACITIES, (0, 1))
]

_THREADS = 256
_MODULE = np.dtype([("scale", "u8"), ("history", "u8"), ("length", "i4"), ("columns", "i4")])
_kernels = {
    (capacity, algorithm): launch.function(
        "scale_update", "scale_update", {"CAPACITY": capacity, "MOST_RECENT": int(algorithm == "most_recent")}
    )
    for capacity, algorithm in itertools.product(CAPACITIES, ALGORITHMS)
}

Module = tuple[int, int, int, int]  # the fields of _MODULE


def _table(modules: list[Module]) -> tuple[int, Any]:
    """The kernel's argument: (capacity, table by value)."""
    capacity = next(c for c in CAPACITIES if len(modules) <= c)
    table = np.zeros(capacity, _MODULE)
    table[: len(modules)] = modules
    return capacity, launch.by_value(table)


# The launches of an update by all that they depend on: a training loop makes the same two in each step.
_tapes: dict[Any, list[tuple[int, launch.Launches]]] = {}
_MOST_TAPES = 256


@on_cuda
def scale_update(
    scales: list[torch.Tensor], amax_histories: list[torch.Tensor], fp8_max: float, margin: int, algorithm: str
) -> None:
    """Update every module's `scale` `[n]` and `amax_history` `[L, n]`, fp32, in place."""
    # All that `outputs` looks at is in it: at a known address may lie something else by now.
    tensors = [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in (*scales, *amax_histories)]
    key = (fp8_max, margin, algorithm, len(scales), *tensors)
    tapes = None if launch.noted() else _tapes.get(key)
    if tapes is not None:
        for index, launches in tapes:
            launches.again(index)
        return
    outputs(scales, amax_histories, fp8_max, margin, algorithm)
    scaled_max = np.float32(fp8_max * 2.0**-margin)
    modules: dict[torch.device, list[Module]] = {}
    for scale, history in zip(scales, amax_histories, strict=True):
        if scale.device.type != "cuda" or history.device != scale.device:
            raise ValueError(
                f"twin::scale_update: a scale is on {scale.device} and its amax_history on {history.device}; "
                f"one CUDA device for both is accepted."
            )
        entry = (scale.data_ptr(), history.data_ptr(), history.shape[0], history.shape[1])
        modules.setdefault(scale.device, []).append(entry)
    if launch.noted():
        for device, entries in modules.items():
            _update(device, entries, scaled_max, algorithm)
        return
    tapes = []
    for device, entries in modules.items():
        tape = launch.Launches()
        with launch.recording(tape):
            _update(device, entries, scaled_max, algorithm)
        tapes.append((device.index, tape))
    if len(_tapes) >= _MOST_TAPES:
        _tapes.clear()
    _tapes[key] = tapes


def _update(device: torch.device, entries: list[Module], scaled_max: np.float32, algorithm: str) -> None:
    for start in range(0, len(entries), CAPACITIES[-1]):
        part = entries[start : start + CAPACITIES[-1]]
        columns = max(entry[3] for entry in part)
        if columns:
            capacity, table = _table(part)
            kernel = _kernels[capacity, algorithm]
            launch.launch(kernel, (len(part), columns), (_THREADS,), [table, scaled_max], device=device.index)
