"""Benchmarks on the pretended GPU of `dry_gpu`: what they time is noted, and every time is made up.

    with DryBench() as bench:
        payload = cast.run()
    print("\\n".join(bench.gpu.lines))

A time follows from the name of what is timed, or, between two events, from how much was noted between them.
"""

import contextlib
import ctypes
import math
import statistics
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from shared.dry_gpu import _STEP, PROCESSORS, DryGpu

from optimized import measure
from optimized.bench.kernels import cublaslt
from optimized.bench.layers import decode, layer, layer_models, timeline
from optimized.bench.models import single_gpu, single_gpu_models
from optimized.bench.table import Table
from optimized.cuda import compiler
from reference.nn.attentions import torch_attention as attention_layers

MS_PER_NOTE = 0.25


def samples(name: str, count: int) -> list[float]:
    """Made-up milliseconds: 1 to 2 by the name, and up to 6 % more from one sample to the next."""
    mean = 1 + zlib.crc32(name.encode()) % 997 / 997
    return [mean * (1 + zlib.crc32(f"{name}{i}".encode()) % 64 / 1000) for i in range(count)]


class Round(NamedTuple):
    """Variants that were timed in turn: milliseconds and notes by name, and how it was asked for.

    Of `layer.timed`, `warmup` is the number of steps before the time of a block.
    """

    samples: dict[str, list[float]]
    noted: dict[str, list[str]]
    repeats: int
    warmup: int
    flush: bool
    ahead: bool


def is_table(table: Table, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Refuse a table with other cells, or without what a reader needs beside them."""
    assert table.columns == columns
    assert list(table.rows) == rows
    assert "pretended H200" in table.note
    assert table.title
    assert table.how.endswith(".")


def is_summary(found: dict[str, float], times: list[float]) -> None:
    """Refuse what is not the median of these times with their tenths, or with an interval around it, or with both."""
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    wanted = {"median": statistics.median(times), "p10": tenths[0], "p90": tenths[8]}
    assert set(found) in ({*wanted}, {"median", "low", "high"}, {*wanted, "low", "high"})
    assert found == {**found, **{key: pytest.approx(wanted[key]) for key in wanted.keys() & found.keys()}}
    assert found.get("low", 0.0) <= found["median"] <= found.get("high", math.inf)
    assert found.keys().isdisjoint(("low", "high")) or {found["low"], found["high"]} <= set(times)


class _CudnnAttention(torch.autograd.Function):
    """In place of PyTorch's, which takes itself apart on meta tensors, in each version otherwise."""

    @staticmethod
    def forward(ctx: Any, bench: "DryBench", options: str, q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        ctx.bench, ctx.shapes = bench, [x.shape for x in (q, *kv)]
        bench.gpu.lines.append(f"attention of {bench.backend}: {q.dtype} {[list(x.shape) for x in (q, *kv)]} {options}")
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.bench.gpu.lines.append(f"attention's backward: {list(grad.shape)}")
        return (None, None, *(grad.new_empty(shape) for shape in ctx.shapes))


class FakeCublasLt:
    """The library: handles are numbers, and its heuristic offers algorithms of which the second is refused."""

    def __init__(self, gpu: DryGpu) -> None:
        self.gpu, self.handles, self.status, self.offered = gpu, 0x1000, 0, 3

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: self._call(name, args)

    def _show(self, value: Any) -> str:
        if hasattr(value, "_obj"):
            return f"&{self._show(value._obj)}"
        if isinstance(value, ctypes.Array):
            return str(list(value)) if value._type_ is not cublaslt._Heuristic else f"{len(value)} results"
        if isinstance(value, ctypes._SimpleCData):
            value = 0 if value.value is None else value.value
        return self.gpu._value(value) if isinstance(value, int) and value >= _STEP else str(value)

    def _call(self, name: str, args: tuple[Any, ...]) -> int:
        self.gpu.lines.append(f"{name}({', '.join(map(self._show, args))})")
        if name.endswith("Create"):
            self.handles += 1
            args[0]._obj.value = self.handles
        if name.endswith("GetHeuristic"):
            results, found = args[-2], args[-1]._obj
            found.value = min(self.offered, len(results))
            for i, result in enumerate(results):
                result.state = (0, 15, 0)[i] if i < found.value else 0
                result.algorithm[0] = 100 + i
        return self.status


class DryBench(contextlib.ExitStack):
    """See the file. `gpu.lines` holds what was noted; `lt` is the library of `cublaslt`."""

    def __enter__(self) -> "DryBench":
        super().__enter__()
        self.gpu = self.enter_context(DryGpu())
        self.lt = FakeCublasLt(self.gpu)
        note = self.gpu.lines.append
        now = lambda: len(self.gpu.lines) * MS_PER_NOTE  # noqa: E731

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timing, self.at = enable_timing, -1.0

            def record(self) -> None:
                self.at = now()

            def query(self) -> bool:
                return False

            def elapsed_time(self, end: "Event") -> float:
                assert self.timing
                assert end.timing
                return end.at - self.at + MS_PER_NOTE / 2

        nothing = lambda *args, **kwargs: None  # noqa: E731
        patches: list[tuple[Any, str, Any]] = [
            (measure, "interleave", self._interleave),
            (measure, "graph", self._graph),
            (measure, "provenance", self._provenance),
            (measure, "outdated", lambda payload: []),
            (cublaslt, "_library", lambda: self.lt),
            (torch.cuda, "Event", Event),
            (torch.cuda, "synchronize", lambda *args: note("synchronize")),
            (torch.cuda, "_sleep", lambda cycles: note(f"sleep {cycles}")),
            (torch.cuda, "current_stream", lambda *args: types.SimpleNamespace(cuda_stream=7)),
            (torch.cuda, "memory_allocated", lambda *args: 1 << 20),
            (torch.cuda, "max_memory_allocated", lambda *args: (1 << 21) + len(self.gpu.lines)),
            (torch.cuda, "reset_peak_memory_stats", nothing),
            (torch.cuda, "empty_cache", lambda: note("empty_cache")),
            (torch, "manual_seed", lambda seed: note(f"manual_seed {seed}")),
            (torch, "compile", self._compile),
            (torch._dynamo, "reset", lambda: note("dynamo.reset")),
            (torch.cuda, "make_graphed_callables", self._graphed),
            (torch.UntypedStorage, "data_ptr", lambda storage: self._storage(storage)),
            (layer, "time", types.SimpleNamespace(perf_counter=lambda: now() / 1e3)),
            (single_gpu, "time", types.SimpleNamespace(perf_counter=lambda: now() / 1e3)),
            (layer, "timed", self._timed),
            (timeline, "recorded", self._recorded),
            (layer, "gc", types.SimpleNamespace(collect=lambda: note("gc.collect"))),
        ]
        self.backend = "PyTorch's choice"
        for module in (layer_models, single_gpu_models, attention_layers, decode):
            patches += [(module, "sdpa_kernel", self._backend), (module, "scaled_dot_product_attention", self._attend)]
        for owner, name, value in patches:
            self.enter_context(mock.patch.object(owner, name, value, create=True))
        self.timings = 0
        self.rounds: list[Round] = []
        return self

    @contextlib.contextmanager
    def _backend(self, backend: Any) -> Any:
        self.backend, before = str(backend), self.backend
        yield
        self.backend = before

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return _CudnnAttention.apply(self, str(sorted(options.items())), q, k, v)

    def _compile(self, module: Any) -> Any:
        self.gpu.lines.append(f"compile {type(module).__name__}")
        return module

    def _graphed(self, callables: Any, sample_args: Any, **options: Any) -> Any:
        self.gpu.lines.append(f"make_graphed_callables {options}")
        return callables

    def _storage(self, storage: torch.UntypedStorage) -> int:
        return self.gpu.address(torch.empty(0, dtype=torch.uint8, device="meta").set_(storage))

    def _interleave(
        self,
        variants: Mapping[str, Callable[[], object]],
        repeats: int = 50,
        warmup: int = 5,
        flush: Callable[[], object] | None = None,
        ahead: bool = False,
    ) -> dict[str, list[float]]:
        self.gpu.lines.append(f"interleave repeats={repeats} warmup={warmup} flush={flush is not None} ahead={ahead}")
        if flush is not None:
            flush()
        noted = {}
        for name, call in variants.items():
            self.gpu.lines.append(f"timed: {name}")
            before = len(self.gpu.lines)
            call()
            noted[name] = self.gpu.lines[before:]
        self.timings += 1
        found = {name: samples(f"{self.timings} {name}", repeats) for name in variants}
        self.rounds.append(Round(dict(found), noted, repeats, warmup, flush is not None, ahead))
        return found

    def _timed(
        self, blocks: Mapping[str, Callable[[int], object]], repeats: int, inner: int, before: int = 0
    ) -> dict[str, list[float]]:
        self.gpu.lines.append(f"timed in turn: repeats={repeats} inner={inner} before={before}")
        noted = {}
        for name, block in blocks.items():
            self.gpu.lines.append(f"timed: {name}")
            start = len(self.gpu.lines)
            block(1)
            noted[name] = self.gpu.lines[start:]
        self.timings += 1
        found = {name: samples(f"{self.timings} {name}", repeats) for name in blocks}
        self.rounds.append(Round(dict(found), noted, repeats, before, False, False))
        return found

    def _recorded(self, contestant: Any, steps: int) -> list[tuple[str, float, float]]:
        """Each line that a step notes is a kernel of 10 microseconds and more, by the name that it begins with."""
        found, at = list[tuple[str, float, float]](), 0.0
        for step in range(steps):
            before = len(self.gpu.lines)
            contestant.block(1)
            noted = [line.split(" ")[0].split("(")[0].split(".")[-1] for line in self.gpu.lines[before:]]
            for name in (timeline.SPIN, *(f"void dry::{one}<float>(int)" for one in noted)):
                found.append((name, at, at + 10 + step))
                at += 12 + step
        return found

    def _graph(self, call: Callable[[int], object], calls: int) -> Callable[[], object]:
        def replay() -> None:
            self.gpu.lines.append(f"graph of {calls}")
            for i in range(calls):
                call(i)

        return replay

    def _provenance(self, kernels: Any) -> dict[str, Any]:
        for kernel in kernels:
            assert compiler.source_hash(kernel), kernel
        return {
            "date": "2026-01-02T03:04:05+00:00",
            "gpu": {"name": "pretended H200", "processors": PROCESSORS},
            "nvidia_smi": {"driver_version": "580.1", "clocks.max.sm": "1980 MHz"},
            **{"cuda": "13.0", "torch": "2.99", "cupy": "14.0", "transformer_engine": None},
            "kernels": dict.fromkeys(kernels, "of the day"),
        }
