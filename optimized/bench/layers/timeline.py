"""Every kernel of one training step of a layer, in its order and on the GPU's clock (docs/results/timeline.json).

The layer is `twin bench layer`'s first case, in the tutorial's stages (`layer_models.stages`): plain PyTorch, then FP8
with one module for each operation, with fused modules, as one layer, and Transformer Engine's layer. torch.profiler
records what ran on the GPU: kernels, copies, fills. Our launches go to the driver directly, and the profiler sees them
as it sees all others.

Before each step the GPU is kept busy by one kernel, `spin_kernel`. Meanwhile the host queues the step, so its time is
not in the record, as it is not in a training loop of this size; and in the record it shows where a step begins. The
recorded step of median length is kept. The GPU has rested before it, so its clock is that of a rested GPU.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from optimized import measure
from optimized.bench import Payload, Progress, each, silent
from optimized.bench.layers import layer
from optimized.bench.layers.layer_models import CASES, Contestant, stages
from optimized.bench.table import Table, table

NAME = "timeline"
WHAT = "a layer's step kernel by kernel, fused or not"
KERNELS = tuple(kernel for kernel in layer.KERNELS if kernel != "rotary")
SPIN = "spin_kernel"  # torch.cuda._sleep's
_BUSY_CYCLES = 60_000_000  # some 30 ms, in which the host queues a step
# A kernel belongs to the first category that has a part of its name. So a kernel with two jobs belongs to the first of
# its jobs here: a norm that casts is a norm, an activation in a GEMM's epilogue is a part of that GEMM.
PARTS_OF_NAMES = {
    "attention": ("attention", "sdpa", "flash", "fmha", "cudnn", "softmax", "masked_fill", "triu", "dots"),
    "GEMM": ("gemm", "nvjet", "cutlass", "splitk"),
    "norm": ("norm", "ln_fwd", "ln_bwd", "gammabeta"),
    "activation": ("gelu", "activation", "forward_kernel", "backward_kernel"),
    "cast": ("cast_", "transpose_", "quantize", "amax", "current_scale", "scale_update", "dbias", "total"),
    "other": ("",),
}
CATEGORIES = tuple(PARTS_OF_NAMES)
# PyTorch's kernels of these names do many things; their arguments' names say which.
_GENERAL = ("elementwise_kernel", "reduce_kernel")
_JOBS = ("gelu", "masked_fill", "triu", "mul", "add", "copy", "fill", "sum", "pow")

Event = tuple[str, float, float]  # a kernel's whole name, its start and its end in microseconds


def category(name: str) -> str:
    """What a kernel is for, by its whole name."""
    lower = name.lower()
    return next(found for found, parts in PARTS_OF_NAMES.items() if any(part in lower for part in parts))


def short(name: str) -> str:
    """A kernel's name without types, namespaces and arguments; a general kernel's job is added."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    base = re.split(r"[<(]", plain)[0].split("::")[-1].strip()[:40]
    if not base.endswith(_GENERAL):
        return base
    job = next((job for job in _JOBS if job in plain.lower()), None)
    return base if job is None else f"{base}, {job}"


def recorded(contestant: Contestant, steps: int) -> list[Event]:
    """Everything that runs on the GPU in some steps, a `spin_kernel` before each."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(steps):
            torch.cuda._sleep(_BUSY_CYCLES)
            contestant.block(1)
        torch.cuda.synchronize()
    on_gpu = (event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return [(event.name, event.time_range.start, event.time_range.end) for event in on_gpu]


def steps_of(events: Iterable[Event]) -> list[list[Event]]:
    """The events of each step, in the order of their starts."""
    found: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event[1]):
        if SPIN in event[0]:
            found.append([])
        elif found:
            found[-1].append(event)
    return found


def span(step: list[Event]) -> float:
    """Microseconds from a step's first start to its last end."""
    return max(end for _, _, end in step) - step[0][1]


def described(contestant: Contestant, steps: list[list[Event]]) -> dict[str, Any]:
    """A variant of the result: the spans of all steps, and the kernels of the one of median length.

    Raises:
        RuntimeError: a step has no kernels, or another number of them than the others.
    """
    counts = [len(step) for step in steps]
    if len(set(counts)) != 1 or counts[0] == 0:
        raise RuntimeError(f"{contestant.title}: the steps have {counts} kernels; as many in each are expected.")
    step = sorted(steps, key=span)[len(steps) // 2]
    begin = step[0][1]
    kernels = [[short(name), round(at - begin, 1), round(end - at, 1), category(name)] for name, at, end in step]
    return {**contestant.described(), "ms": [round(span(one) / 1e3, 3) for one in steps], "kernels": kernels}


def run(progress: Progress = silent, steps: int = 5) -> Payload:
    """Measure."""
    variants = []
    for build in each(list(stages(CASES[0])), progress):
        contestant = build()
        contestant.block(4)
        torch.cuda.synchronize()
        variants.append(described(contestant, steps_of(recorded(contestant, steps))))
        del contestant
        layer.clear()
    return {
        "what": "one GPT layer, forward and backward, by torch.profiler: [kernel, start us, us, category]",
        "case": {**vars(CASES[0]), "dtype": str(CASES[0].dtype).removeprefix("torch.")},
        "steps": steps,
        "variants": variants,
        "provenance": measure.provenance(KERNELS),
    }


def milliseconds(variant: dict[str, Any]) -> dict[str, float]:
    """By category; of kernels that run at the same time each counts."""
    found = dict.fromkeys(CATEGORIES, 0.0)
    for _, _, duration, what in variant["kernels"]:
        found[what] += duration / 1e3
    return found


def idle(variant: dict[str, Any]) -> float:
    """Milliseconds between the step's first start and its last end in which no kernel runs."""
    total = until = 0.0
    for _, start, duration, _ in variant["kernels"]:
        total += max(0.0, start - until)
        until = max(until, start + duration)
    return total / 1e3


def tables(payload: Payload) -> list[Table]:
    """Milliseconds of each variant by category."""
    rows = []
    for variant in payload["variants"]:
        times = [*milliseconds(variant).values(), idle(variant), sorted(variant["ms"])[len(variant["ms"]) // 2]]
        cells = (f"{ms:.2f}" for ms in times)
        rows.append((f"{variant['step']}; attention: {variant['attention']}", str(len(variant["kernels"])), *cells))
    columns = ("layer", "kernels", *(f"{what}, ms" for what in CATEGORIES), "no kernel, ms", "whole step, ms")
    how = "Milliseconds of GPU time of one recorded training step, by what its kernels are for."
    note = (
        "Kernels: copies and fills included. A kernel's name says what it is for; one with two jobs counts as the "
        "first of them here: a norm that casts is a norm, an activation in a GEMM's epilogue is a part of that GEMM. "
        "Attention by matmuls is GEMMs, too. The GPU has rested before the step, and the host's time is left out, so "
        f"a step is shorter than in a training loop. {payload['case']['name']}, hidden {payload['case']['hidden']}."
    )
    return [table(payload, "A layer's step, kernel by kernel", columns, rows, how, note)]
