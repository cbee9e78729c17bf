"""One transformer layer, GPT or Llama-like, forward and backward, against others and against its own parts
(docs/results/layer.json).

The contestants (bench/layer_models.py) take turns with blocks of a few steps. The host's clock measures a block between
two synchronisations: the time that a training loop waits for, launches included. In the small layer's blocks the first
steps are not counted (`timed`), and it is measured once more with the process on one core (`on_one_core`). In the same
turns run the parts that cannot be avoided: cuBLASLt's twelve FP8 GEMMs (fprop with fast accumulation, dgrad and wgrad
with split accumulation) and cuDNN's attention. Memory is the most that torch's allocator held for a contestant,
including its weights, gradients and activations.

For the breakdown a step is queued while the GPU is kept busy, so that events around each op measure its kernels, not
the host. An op's time is compared with a ceiling from the same run: the same GEMM by cuBLASLt, cuDNN's attention, or
`Tensor.copy_` of as many bytes as the op must move (every tensor in and out, once).
"""

import contextlib
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimized import measure
from optimized.bench import Payload, Progress, each, result, silent
from optimized.bench.kernels.gemm import fp8_operands, scaled_mm
from optimized.bench.layers import layer_tables
from optimized.bench.layers.layer_models import CASES, LINEAR, Case, Contestant, contestants, cudnn, linears
from optimized.bench.memory_bound import COPY_BYTES, large_copy
from reference.float8.kept_tensor import KeptTensor

NAME = "layer"
WHAT = "GPT and Llama-like layers, against PyTorch, TE"
tables = layer_tables.tables
KERNELS = (
    *("activation", "activation_cast_transpose", "attention", "attention_backward", "attention_backward_ends", "cast"),
    *("cast_transpose", "dbias", "dropout", "gemm", "gemm_fp8", "gemm_fp8_fused", "norm", "norm_backward"),
    *(
        "norm_cast_transpose",
        "cat_cast_transpose",
        "multi_cast_transpose",
        "norm_total",
        "rotary",
    ),
    "scale_update",
)
BROKEN_DOWN = ("TransformerLayer, FP8",)
HELD = (*BROKEN_DOWN, "TransformerLayer, FP8 weights")
UNCOUNTED = 4  # steps at the start of a block of short steps
_BUSY_CYCLES = 60_000_000  # about 30 ms, in which the host queues a step


def timed(
    blocks: Mapping[str, Callable[[int], object]], repeats: int, inner: int, before: int = 0
) -> dict[str, list[float]]:
    """Milliseconds of a step, by name: `repeats` blocks of `inner` steps of each, in `measure.rounds`.

    The first round is not counted, nor are the first `before` steps of each block: in them a short step gets back the
    caches and addresses that it would have in a training loop of its own.
    """
    samples: dict[str, list[float]] = {name: [] for name in blocks}
    for repeat, order in enumerate(measure.rounds(blocks, repeats + 1)):
        for name in order:
            block = blocks[name]
            block(before)
            torch.cuda.synchronize()
            start = time.perf_counter()
            block(inner)
            torch.cuda.synchronize()
            if repeat:
                samples[name].append((time.perf_counter() - start) * 1e3 / inner)
    return samples


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this process's threads on one core (Linux): a thread of autograd's on another core finds no caches there."""

    def run_on(cores: set[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(int(thread), cores)

    cores = os.sched_getaffinity(0)
    run_on({max(cores)})
    try:
        yield
    finally:
        run_on(cores)


def products(case: Case) -> dict[str, Callable[[], object]]:
    """cuBLASLt's twelve GEMMs, as torch calls it."""
    one = torch.ones((), device="cuda")
    return {
        name: functools.partial(scaled_mm, *fp8_operands(name, m, n, k), one, case.dtype, accumulate)
        for name, (m, n, k, accumulate) in case.products().items()
    }


def attention(case: Case) -> dict[str, Callable[[], object]]:
    """cuDNN's attention, forward and backward."""
    heads, groups = case.heads, case.kv_heads or case.heads
    q, k, v, grad = (
        torch.randn(case.sequence, case.batch, n, case.channels, device="cuda", dtype=case.dtype).permute(1, 2, 0, 3)
        for n in (heads, groups, groups, heads)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = cudnn(leaves[0], leaves[1], leaves[2], case.causal, case.dropout)
    return {
        "attention forward": lambda: cudnn(q, k, v, case.causal, case.dropout),
        "attention backward": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
    }


class _Watch(TorchDispatchMode):
    """Puts events around every op, and notes what it is, what it moves and what it computes."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.ops: list[tuple[dict[str, Any], torch.cuda.Event, torch.cuda.Event]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.is_view or "empty" in name or name == "detach":  # no kernel
            return func(*args, **(kwargs or {}))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out = func(*args, **(kwargs or {}))
        end.record()
        self.ops.append((describe(name, args, out, self.causal), start, end))
        return out


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def describe(name: str, args: Any, out: Any, causal: bool) -> dict[str, Any]:
    """An op's name, its sizes, the bytes that it must move, and its FLOP if it is a GEMM or attention.

    Causal attention has half the FLOP. A tensor that is changed in place counts as read and written. A copy of an
    `expand`ed tensor reads less than is counted.
    """
    tensors = _tensors(args)
    inside = {id(tensor) for tensor in tensors}
    written = [tensor for tensor in _tensors(out) if id(tensor) not in inside]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors + written)
    found: dict[str, Any] = {"op": name, "sizes": "", "bytes": size, "flop": 0, "bound": "memory"}
    if "attention" in name:
        if "backward" in name:
            _, q, k, *_ = tensors
        else:
            q, k, *_ = tensors
        b, h, sq, d = q.shape
        found |= {"bound": "attention", "sizes": f"{b}×{h}×{sq}×{k.shape[2]}×{d}"}
        found["flop"] = (10 if "backward" in name else 4) * b * h * sq * k.shape[2] * d // (2 if causal else 1)
    elif name.startswith("gemm"):
        m, n, depth = tensors[0].shape[0], tensors[1].shape[0], tensors[0].shape[1]
        found |= {"bound": "product", "sizes": f"{m}×{n}×{depth}", "flop": 2 * m * n * depth}
    elif tensors:
        found["sizes"] = "×".join(map(str, max(tensors, key=torch.Tensor.numel).shape))
    return found


def breakdown(contestant: Contestant, ceilings: Mapping[str, float], steps: int = 5) -> list[dict[str, Any]]:
    """Every op of a step with its median time; equal ops are added up.

    Args:
        contestant: warmed up.
        ceilings: milliseconds by the sizes of a GEMM "M×N×K", and of "attention forward" and "attention backward"; for
            "copy" the bytes of a millisecond.
        steps: how many are watched.
    """
    watched = []
    for _ in range(steps):
        with _Watch(contestant.case.causal) as watch:
            torch.cuda._sleep(_BUSY_CYCLES)
            contestant.block(1)
        torch.cuda.synchronize()
        watched.append(watch.ops)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for same in zip(*watched, strict=True):
        row = {**same[0][0], "count": 1, "ms": statistics.median(start.elapsed_time(end) for _, start, end in same)}
        known = found.setdefault((row["op"], row["sizes"]), row)
        if known is not row:
            for key in ("count", "ms", "bytes", "flop"):
                known[key] += row[key]
    for row in found.values():
        row["of_ceiling"] = _of_ceiling(row, ceilings)
    return sorted(found.values(), key=lambda row: -row["ms"])


def memory(contestant: Contestant) -> list[dict[str, Any]]:
    """The tensors that a step holds between forward and backward, each storage once: weights and what is saved."""
    found: dict[int, torch.Tensor] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        found.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), contestant.context():
        out = contestant.module(contestant.x, **contestant.keywords)
    parameters = {x.data_ptr(): x for p in contestant.parameters for x in _parts(p)}
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for address, x in {**found, **parameters}.items():
        what = "input" if x is contestant.x else "parameter" if address in parameters else "saved for backward"
        key = (what, str(x.dtype).removeprefix("torch."), "×".join(map(str, x.shape)))
        row = rows.setdefault(key, dict(zip(("what", "dtype", "shape"), key, strict=True)) | {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += x.untyped_storage().nbytes()
    del out, x  # with `found` they keep what the step holds
    found.clear()
    contestant.block(1)  # so that other contestants' steps do not update its scales
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def _parts(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a parameter; one that is kept in FP8 has codes, transposed codes and scale_inv."""
    if not isinstance(parameter, KeptTensor):
        return [parameter]
    return [x for x in (parameter.codes, parameter.codes_t, parameter._scale_inv) if x is not None]


def _of_ceiling(row: Mapping[str, Any], ceilings: Mapping[str, float]) -> float | None:
    """The ceiling's time over the op's."""
    if row["bound"] == "memory":
        return row["bytes"] / ceilings["copy"] / row["ms"]
    direction = "backward" if "backward" in row["op"] else "forward"
    best = ceilings.get(f"attention {direction}" if row["bound"] == "attention" else row["sizes"])
    return None if best is None else row["count"] * best / row["ms"]


def _ceilings(case: Case, parts: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    calls = {**parts, "copy": large_copy()}
    times = measure.interleave(calls, repeats=9, warmup=2, flush=lambda: torch.cuda._sleep(200_000))
    median = {name: statistics.median(samples) for name, samples in times.items()}
    sizes = {name: "×".join(map(str, shape[:3])) for name, shape in case.products().items()}
    return {**{sizes.get(name, name): ms for name, ms in median.items()}, "copy": 2 * COPY_BYTES / median["copy"]}


def _built(build: Callable[[], Contestant]) -> tuple[Contestant, int | None]:
    """A contestant, warmed up, and the most bytes that torch's allocator held for it in one step.

    The bytes are None for a CUDA graph, whose memory the allocator counts as free.
    """
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    contestant = build()
    contestant.block(4)
    contestant.forget()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    contestant.block(1)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    contestant.forget()
    return contestant, None if "graph" in contestant.name else peak


def _rows(entrants: list[tuple[Contestant, int | None]], times: Mapping[str, dict[str, float]]) -> list[dict[str, Any]]:
    return [{**one.described(), "ms": times[one.title], "peak_bytes": peak} for one, peak in entrants]


def clear() -> None:
    """Free what the contestants of a case held. Transformer Engine compiles for each size, but at most eight times."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """All contestants of one case."""
    entrants = [_built(build) for build in contestants(case)]
    twelve, attended = products(case), attention(case)
    parts: dict[str, Callable[[int], object]] = {
        "cuBLASLt's twelve products": lambda steps: [call() for _ in range(steps) for call in twelve.values()],
        "cuDNN's attention": lambda steps: [call() for _ in range(steps) for call in attended.values()],
    }
    blocks = {one.title: one.block for one, _ in entrants}
    small = case.tokens <= 1024
    # The first step after a synchronisation waits for the host: 1 ms for a large layer in FP8.
    inner, before = (20, UNCOUNTED) if small else (8, 0)
    samples = timed({**blocks, **parts}, repeats, inner, before)
    times = {name: measure.spread(values) for name, values in samples.items()}
    ceilings = _ceilings(case, {**twelve, **attended})
    rows = _rows(entrants, times)
    if small:
        with on_one_core():
            samples = timed(blocks, repeats, inner, before)
        for row, (one, _) in zip(rows, entrants, strict=True):
            row["ms_on_one_core"] = measure.spread(samples[one.title])
    for row, (one, _) in zip(rows, entrants, strict=True):
        if one.name in BROKEN_DOWN:
            row["ops"] = breakdown(one, ceilings)
        if one.name in HELD:
            row["memory"] = memory(one)
    return {
        "case": {**vars(case), "dtype": str(case.dtype).removeprefix("torch.")},
        "rows": rows,
        "parts": {name: times[name] for name in parts},
        "parts_ms": sum(times[name]["median"] for name in parts),
        "ceilings": ceilings,
    }


def one_linear(repeats: int) -> list[dict[str, Any]]:
    """One linear map, forward and backward."""
    entrants = [_built(build) for build in linears()]
    samples = timed({one.title: one.block for one, _ in entrants}, repeats, 20, UNCOUNTED)
    return _rows(entrants, {name: measure.spread(values) for name, values in samples.items()})


def run(progress: Progress = silent, repeats: int = 6) -> Payload:
    import cupy

    found = []
    for case in each(CASES, progress):
        found.append(measured(case, repeats))
        clear()
    what = "one layer, forward and backward, gradients None at each step; host clock, blocks of steps in turn"
    pool = cupy.get_default_memory_pool().total_bytes()
    linear = {"case": LINEAR.name, "rows": one_linear(repeats)}
    return result(what, KERNELS, repeats=repeats, cupy_pool_bytes=pool, cases=found, linear=linear)
