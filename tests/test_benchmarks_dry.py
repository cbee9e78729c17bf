"""Every benchmark on a GPU that only takes notes: what it times, and what it makes of times that are made up.

tests/golden/benchmarks holds, for each, what it returned, printed and launched. A test that fails shows the first lines
that differ; where the change was meant, `PYTHONPATH=.:tests python tests/snapshots.py` records it.
"""

import contextlib
import importlib.util
import io
import json
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import figures
import matplotlib
import pytest
import snapshots
import torch
import training_text
from dry_bench import DryBench, samples

import optimized
from optimized import measure
from optimized.bench import (
    attention_plot,
    decode,
    first_step,
    gemm_equality,
    gemm_shapes,
    ladder,
    layer,
    layer_models,
    layer_plot,
    layer_sweep,
    seeds,
    single_gpu,
    single_gpu_models,
    single_gpu_plot,
    timeline,
    train,
    trainer,
    training,
)
from optimized.commands import tables
from optimized.training import captured
from optimized.training.corpus import Corpus
from optimized.training.settings import Settings

matplotlib.use("Agg")
from matplotlib import pyplot

FOLDER = "benchmarks"
payloads: dict[str, Any] = {}  # of the benchmarks that ran in this process


# tests/test_bandwidth_benches.py and tests/test_gemm_benches.py say what these must measure, and compare no text.
ELSEWHERE = {"cast_transpose", "norm", "activation", "cross_entropy", "embedding", "adam", "gemm", "gemm_epilogue"}
PLOTS = {
    "attention": attention_plot.plot,
    "ladder": ladder.plot,
    "gemm_shapes": gemm_shapes.plot,
    "layer_sweep": layer_sweep.plot,
    "seeds": seeds.plot,
    "single_gpu": single_gpu_plot.plot,
    "train": train.plot,
}


def drawn(plot: Callable[[], object]) -> tuple[list[str], int]:
    """The figures that a call writes, as text."""
    found: list[str] = []

    def write(path: Path, figure: Any) -> None:
        found.extend((str(path.relative_to(measure.ROOT)), *figures.lines(figure)))

    with mock.patch.object(measure, "write_plot", write):
        plot()
    pyplot.close("all")
    return found, 40


def tabulated(name: str, payload: dict[str, Any]) -> tuple[list[str], int]:
    """The payload's Markdown tables."""
    details = [build for of, build in tables.DETAILS.values() if of == name]
    found = [one for build in (tables.BUILDERS[name], *details) for one in build(payload)]
    return "\n\n".join(one.markdown() for one in found).splitlines(), 60


def run_of(module: Any) -> snapshots.Sections:
    """`run` of a benchmark, its tables, and its plot where it has one."""
    told: list[float] = []
    with DryBench() as bench, contextlib.redirect_stdout(io.StringIO()) as printed:
        payload = module.run(told.append)
    payloads[module.NAME] = payload
    launched = {one.kernel.kernel for one in bench.gpu.launches}
    assert launched <= payload["provenance"]["kernels"].keys(), "a result must notice when these change"
    with mock.patch.object(measure, "outdated", return_value=[]):
        found = {"payload": (snapshots.payload_lines(payload), 60), "tables": tabulated(module.NAME, payload)}
    found["progress"] = [f"{one:.6g}" for one in told], 6
    if printed.getvalue():
        found["printed"] = printed.getvalue().splitlines(), 40
    if module.NAME in PLOTS:
        found["plot"] = drawn(partial(PLOTS[module.NAME], payload))
    return {**found, "notes": (snapshots.repeats(bench.gpu.lines), 60)}


def run_of_gemm_equality() -> snapshots.Sections:
    """Its answers are made up too: every third problem differs, and every second of those is found to be split."""
    counts, noted = {"compared": 0}, list[str]()

    def differing(a: torch.Tensor, b: torch.Tensor) -> int:
        shape = tuple(a.shape)
        noted.append(f"differing {a.device.type} {shape} {tuple(b.shape)}")
        if a.device.type == "cpu":
            return 5
        counts["compared"] += 1
        return int(counts["compared"] % 3 == 0) * (1 + counts["compared"])

    def gemm_fp8(*args: Any) -> torch.Tensor:
        if args[0].device.type == "cuda":
            return bench_twin.gemm_fp8(*args)  # type: ignore[no-any-return]
        noted.append(f"on the CPU: {[tuple(x.shape) for x in args[:4]]} {args[4:]}")
        return torch.zeros(args[0].shape[0], args[1].shape[0])

    bench_twin = torch.ops.twin
    with (
        mock.patch.object(gemm_equality, "differing", differing),
        mock.patch.object(gemm_equality, "twin", types.SimpleNamespace(gemm_fp8=gemm_fp8)),
    ):
        return {**run_of(gemm_equality), "compared": (noted, 60)}


def run_of_layer() -> snapshots.Sections:
    """`layer`, of its second case a few contestants, and its plot."""
    build = layer.contestants

    def contestants(case: layer_models.Case) -> list[Any]:
        found = list(build(case))
        return [found[i] for i in (0, 1, 2, 3, 5, 11)] if case == layer_models.CASES[1] else found

    with mock.patch.object(layer, "contestants", contestants):
        found = run_of_layers(layer)
    payload = json.loads(json.dumps(payloads["layer"]))
    with mock.patch.object(measure, "read_result", return_value=payload):
        return {**found, "plot": drawn(layer_plot.main)}


def run_of_layer_sweep() -> snapshots.Sections:
    """`layer_sweep`, every size of it as a case, and four measured."""
    cases = [str(layer_sweep.case(*size)) for size in layer_sweep.SIZES]
    with mock.patch.object(layer_sweep, "SIZES", [layer_sweep.SIZES[i] for i in (1, 3, 2, 7)]):
        return {"cases": (cases, 8), **run_of_layers(layer_sweep)}


def run_of_layers(module: Any) -> snapshots.Sections:
    """`layer`, `layer_sweep` or `timeline`, with the project's own layers in the place of Transformer Engine's."""
    recipes = types.SimpleNamespace(DelayedScaling=optimized.DelayedScaling)
    pool = types.SimpleNamespace(get_default_memory_pool=lambda: types.SimpleNamespace(total_bytes=lambda: 0))
    with (
        mock.patch.object(layer_models, "_engine", return_value=optimized),
        pytest.MonkeyPatch.context() as patch,  # `mock.patch.dict` would unload what is imported inside
        warnings.catch_warnings(),
    ):
        patch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
        patch.setitem(sys.modules, "cupy", pool)
        warnings.simplefilter("ignore")
        return run_of(module)


def run_of_single_gpu() -> snapshots.Sections:
    """`single_gpu`: every setting by name, and of most groups two or three, on a model of one small layer.

    Batches have two sequences, loaders no processes of their own; what te recomputes needs a GPU.
    """
    listed = [f"{group.name} | {setting}" for group in single_gpu.GROUPS for setting in group.settings]
    sizes = replace(single_gpu_models.BERT_LARGE, hidden=128, ffn=256, heads=2, layers=1, sequence=32, masked=8)
    groups = dict(zip((group.name for group in single_gpu.GROUPS), single_gpu.GROUPS, strict=True))
    chosen = {
        **{"one after the other": (0, 7, 8, 9, 10), "accumulation, checkpointing": (1, 2), "attention": (0, 3)},
        **{"optimizer": (2, 3, 4), "data": (1, 3), "layers": (1, 4, 6, 8), "FP8 in 4 parts of batch 4": (0, 1)},
    }
    small = [
        replace(groups[name], settings=tuple(replace(groups[name].settings[i], batch=2) for i in places))
        for name, places in chosen.items()
    ]

    def loader(data: Any, batch: int, **options: Any) -> Any:
        return torch.utils.data.DataLoader(data, batch)

    module = types.SimpleNamespace(**vars(single_gpu))
    module.run = partial(single_gpu.run, sizes=sizes)
    with (
        mock.patch.object(single_gpu, "GROUPS", small),
        mock.patch.multiple(single_gpu, WARM_UP=1, ALONE=2),
        mock.patch.object(single_gpu, "steps_of", return_value=1),
        mock.patch.object(single_gpu_models, "BATCHES", 1),
        mock.patch.object(single_gpu_models, "DataLoader", loader),
    ):
        return {"settings": (listed, 60), **run_of_layers(module)}


def run_of_decode() -> snapshots.Sections:
    """`decode`, with smaller layers, whose weights are drawn sooner; as where transformers is not installed."""
    case = replace(decode.CASE, hidden=256, ffn=512, heads=4, kv_heads=2)
    module = types.SimpleNamespace(**vars(decode))
    module.run = partial(decode.run, case=case)
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
        return run_of(module)


def run_of_trainer() -> snapshots.Sections:
    """`trainer`: what is asked of transformers' Trainer, and its table; tests/test_trainer_bench.py trains."""
    asked: list[str] = []

    def trained(way: trainer.Way, sizes: trainer.Sizes, steps: int, warm_up: int) -> dict[str, Any]:
        asked.append(f"{way} {sizes} {steps} {warm_up}")
        times = [100 * one for one in samples(way.name, steps)]
        return {"samples": times, "loss": 11.8, "peak_bytes": (30 + len(asked)) << 30}

    with (
        mock.patch.object(trainer, "trained", trained),
        mock.patch.object(measure, "version", lambda name: f"{len(name)}.1"),
    ):
        return {**run_of(trainer), "asked": (asked, 10)}


def run_of_first_step() -> snapshots.Sections:
    """`first_step`: its processes by the folders that they get, and its table."""
    asked: list[str] = []

    def process(cache: Path, cubins: Path, into: Path | None = None) -> dict[str, Any]:
        asked.append(f"cache={cache.name} cubins={cubins.name} into={into and into.name}")
        if into is not None:
            (into / "about.json").write_text('{"count": 30}')
        seconds = samples(f"{cache.name} {cubins.name} {len(asked)}", 5)
        return {"seconds": seconds, "compiled": [0, 0, 28 if into else 0, 0, 4 if into else 0]}

    with (
        mock.patch.object(first_step, "process", process),
        mock.patch.object(first_step, "carried", return_value=None),
        mock.patch.object(first_step.os, "sched_getaffinity", return_value=set(range(16))),
    ):
        return {**run_of(first_step), "asked": (asked, 10)}


def run_of_train() -> snapshots.Sections:
    """`train`, with models of one small layer on a text that is made up."""
    sizes = {
        name: replace(settings, hidden=128, heads=2, layers=1, sequence=32, rows=2, vocabulary=256)
        for name, settings in train.SIZES.items()
    }
    module = types.SimpleNamespace(**vars(train))
    module.run = partial(train.run, sizes=sizes, steps=3, warm_up=2, text=training_text.corpus())
    with (
        mock.patch.multiple(train, LARGE_STEPS=2, LARGE_WARM_UP=1),
        mock.patch.object(captured, "Step", lambda run, *_: run),  # what is captured runs as it is
    ):
        return run_of_layers(module)


def run_of_seeds() -> snapshots.Sections:
    """`seeds`: which runs are asked for, their table and picture; tests/test_training_bench.py trains."""
    asked: list[str] = []

    def losses(settings: Settings, text: Corpus, device: str) -> dict[str, Any]:
        asked.append(f"{settings.precision} {settings.seed} {settings.tokens} x {settings.steps} on {device}")
        found = [5.0 - 0.001 * step - 0.01 * len(asked) for step in range(settings.steps)]
        return {"precision": settings.precision, "seed": settings.seed, "losses": found, "held_out": 1.0}

    module = types.SimpleNamespace(**vars(seeds))
    settings = replace(seeds.SETTINGS, steps=100)
    module.run = partial(seeds.run, settings=settings, read=training_text.corpus)
    with mock.patch.object(seeds, "losses", losses):
        return {**run_of(module), "asked": (asked, 10)}


RUNS: dict[str, Callable[[], snapshots.Sections]] = {
    module.NAME: partial(run_of, module)
    for module in tables.BENCHMARKS
    if module is not training and module.NAME not in ELSEWHERE
} | {
    "decode": run_of_decode,
    "first_step": run_of_first_step,
    "gemm_equality": run_of_gemm_equality,
    "layer": run_of_layer,
    "layer_sweep": run_of_layer_sweep,
    "seeds": run_of_seeds,
    "single_gpu": run_of_single_gpu,
    "timeline": partial(run_of_layers, timeline),
    "train": run_of_train,
    "trainer": run_of_trainer,
}


LONG = {"layer", "single_gpu"}  # a quarter of a minute; `layer_sweep` and tests/test_single_gpu.py run the same code


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in RUNS])
def test_a_benchmark_measures_what_is_recorded(name: str) -> None:
    snapshots.check(FOLDER, name, RUNS[name]())
