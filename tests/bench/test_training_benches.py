"""Benchmarks of training, decoding and whole layers on a pretended GPU: their numbers, computed here again."""

import importlib.util
import json
import math
import statistics
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from shared import training_text
from shared.dry_bench import is_summary, is_table, samples
from shared.dry_runs import Row, is_drawn, launches, layers, run

from optimized import measure
from optimized.bench.layers import decode, first_step, layer, layer_models, layer_plot
from optimized.bench.models import seeds, single_gpu, single_gpu_models, single_gpu_plot, train, trainer
from optimized.training import cuda_graph
from optimized.training.corpus import Corpus
from optimized.training.settings import Settings


def test_training_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one small layer on a text that is made up; what would be captured runs as it is."""
    sizes = {
        name: replace(settings, hidden=128, heads=2, layers=1, sequence=32, rows=2, vocabulary=256)
        for name, settings in train.SIZES.items()
    }
    monkeypatch.setattr(train, "LARGE_STEPS", 2)
    monkeypatch.setattr(train, "LARGE_WARM_UP", 1)
    monkeypatch.setattr(cuda_graph, "Step", lambda run, *_: run)
    with layers():
        ran = run(train, partial(train.run, sizes=sizes, steps=3, warm_up=2, text=training_text.corpus()))
    payload, (together, *alone) = ran.payload, ran.rounds
    assert (together.repeats, together.warmup) == (3, 2)
    assert [(one.repeats, one.warmup) for one in alone] == [(2, 0)] * 4
    names = [row["name"] for row in payload["rows"]]
    assert names == [row["name"] for row in payload["large"]] == list(together.samples)
    assert len(set(names)) == 4
    assert payload["settings"]["124m"] == asdict(replace(sizes["124m"], steps=5, warmup=1)) | {"betas": [0.9, 0.95]}
    # 12 weights of a layer for each channel and channel, biases, norms and the tables; attention is causal.
    flops = 64 * (6 * sizes["124m"].numbers + 6 * 128 * 32)
    assert sizes["124m"].numbers == pytest.approx(12 * 128**2 + 256 * 128, rel=0.05)
    first, second = [], []
    for i, name in enumerate(names):
        row, large, timed = payload["rows"][i], payload["large"][i], alone[i]
        for found, times in ((row, together.samples[name]), (large, timed.samples[name])):
            is_summary(found["ms"], times)
            seconds = statistics.median(times) / 1e3
            assert found["tokens_per_second"] == pytest.approx(2 * 32 / seconds)
            assert found["tflops"] == pytest.approx(flops / seconds * 1e-12)
        assert row["losses"] == [1.0]  # made up
        assert large["peak_bytes"] > 1 << 21
        speeds = [
            (f"{x['ms']['median']:.1f}", f"{x['tokens_per_second']:,.0f}", f"{x['tflops']:.0f}") for x in (row, large)
        ]
        first.append((name, *speeds[0], "1.443"))  # a nat in bits
        second.append((name, *speeds[1], f"{large['peak_bytes'] / 2**30:.1f}"))
        assert bool(launches(together.noted[name])) == name.startswith("Twin Engine")
    is_table(ran.tables[0], ("", "ms a step", "tokens/s", "TFLOP/s", "loss"), first)
    is_table(ran.tables[1], ("", "ms a step", "tokens/s", "TFLOP/s", "GiB at most"), second)
    is_drawn(partial(train.plot, payload), "train", 2)


def test_losses_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which runs are asked for, their table and picture; tests/bench/test_training_bench.py trains."""
    asked: list[Any] = []

    def losses(settings: Settings, text: Corpus, device: str) -> Row:
        asked.append((settings.precision, settings.seed, settings.steps, device))
        found = [5.0 - 0.001 * step - 0.01 * len(asked) for step in range(settings.steps)]
        one = {
            "precision": settings.precision,
            "seed": settings.seed,
            "losses": found,
            "held_out": 2 - 0.1 * len(asked),
        }
        return {**one, "tokens_per_second": 5000.0 + 10 * len(asked)}

    monkeypatch.setattr(seeds, "losses", losses)
    settings = replace(seeds.SETTINGS, steps=100)
    ran = run(seeds, partial(seeds.run, settings=settings, read=training_text.corpus))
    order = ("bf16", "block", "current", "rowwise", "delayed")
    runs = [(precision, seed) for seed in (2026, 2027) for precision in order]
    assert asked == [(*one, 100, "cuda") for one in runs]
    assert [(one["precision"], one["seed"]) for one in ran.payload["runs"]] == runs
    assert ran.payload["settings"] == json.loads(json.dumps(asdict(settings)))
    tails = [sum(5.0 - 0.001 * step - 0.01 * n for step in range(90, 100)) / 10 for n in range(1, 11)]
    cells = []
    for precision, label in seeds.LABELS.items():
        first, second = order.index(precision), 5 + order.index(precision)
        more = [100 * (tails[one] / tails[bf16] - 1) for one, bf16 in ((first, 0), (second, 5))]
        unseen = [100 * ((1.9 - 0.1 * one) / (1.9 - 0.1 * bf16) - 1) for one, bf16 in ((first, 0), (second, 5))]
        beside = [f"{one[0]:+.2f} %, {one[1]:+.2f} %" for one in (more, unseen)]
        beside.insert(1, f"{sum(more) / 2:+.2f} %")
        speed = f"{5000 + 10 * (first + second + 2) / 2:,.0f}"
        beside = ["–"] * 3 if precision == "bf16" else beside
        cells.append((label, *(f"{tails[one] / math.log(2):.4f}" for one in (first, second)), *beside, speed))
    beside_bf16 = ("beside bf16, by seed", "mean", "of held-out text, by seed")
    columns = ("124 million parameters", "seed 2026", "seed 2027", *beside_bf16, "tokens/s")
    is_table(ran.tables[0], columns, cells)
    is_drawn(partial(seeds.plot, ran.payload), "seeds", 3)


@pytest.mark.parametrize("without", [("delayed", 2027), ("bf16", 2027)])
def test_a_table_and_a_picture_of_the_runs_that_there_are(without: tuple[str, int]) -> None:
    """One run is not there, or all of a seed has nothing to stand beside."""
    payload = measure.read_result("seeds")
    payload["runs"] = [one for one in payload["runs"] if (one["precision"], one["seed"]) != without]
    (found,) = seeds.tables(payload)
    assert found.columns[1:3] == (
        ("seed 2026", "seed 2027") if without[0] != "bf16" else ("seed 2026", "beside bf16, by seed")
    )
    assert all(len(row) == len(found.columns) for row in found.rows)
    is_drawn(partial(seeds.plot, payload), "seeds", 3)


def test_steps_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of transformers' Trainer, and its table; tests/bench/test_user_benches.py trains."""
    asked: list[Any] = []

    def trained(way: trainer.Way, sizes: trainer.Sizes, steps: int, warm_up: int) -> Row:
        asked.append((way, steps, warm_up))
        times = [100 * one for one in samples(way.name, steps)]
        return {"samples": times, "loss": 11.8, "peak_bytes": (30 + len(asked)) << 30}

    monkeypatch.setattr(trainer, "trained", trained)
    monkeypatch.setattr(measure, "version", lambda name: f"{len(name)}.1")
    ran = run(trainer)
    assert asked == [(way, 20, 5) for way in trainer.WAYS]
    assert ran.payload["versions"] == {"transformers": "12.1", "accelerate": "10.1"}
    median = {way: statistics.median([100 * x for x in samples(way.name, 20)]) for way in trainer.WAYS}
    compiled = next(median[way] for way in trainer.WAYS if way.compiled)
    cells = []
    for i, (row, way) in enumerate(zip(ran.payload["rows"], trainer.WAYS, strict=True), 31):
        assert row == {**row, **asdict(way), "loss": 11.8, "peak_bytes": i << 30}
        is_summary(row["ms"], [100 * x for x in samples(way.name, 20)])
        speed = 4 * 2048 / median[way] * 1e3
        assert row["tokens_per_second"] == pytest.approx(speed)
        cells.append((way.name, f"{median[way]:.1f}", f"{speed:,.0f}", f"{compiled / median[way]:.2f}×", f"{i}.0"))
    is_table(ran.tables[0], ran.tables[0].columns, cells)
    assert "With transformers 12.1 and accelerate 10.1." in ran.tables[0].note


def test_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """One smaller layer, whose weights are drawn sooner; as where transformers is not installed."""
    case = replace(decode.CASE, hidden=256, ffn=512, heads=4, kv_heads=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(decode, "LAYERS", 1)
    ran = run(decode, partial(decode.run, case=case))
    names = list(ran.rounds[0].samples)
    assert names == [
        *("Twin Engine, bf16", "Twin Engine, bf16, CUDA graph", "Twin Engine, FP8", "Twin Engine, FP8, CUDA graph"),
        *("PyTorch, bf16, compiled", "PyTorch, bf16, compiled, CUDA graph"),
    ]
    rows, cells = iter(ran.payload["rows"]), {name: [name] for name in names}
    for batch, timed in zip((1, 32), ran.rounds, strict=True):
        assert (timed.repeats, timed.warmup) == (9, decode.UNCOUNTED)
        for name in names:
            row = next(rows)
            assert (row["name"], row["batch"]) == (name, batch)
            is_summary(row["ms"], timed.samples[name])
            speed = batch / statistics.median(timed.samples[name]) * 1e3
            assert row["tokens_per_second"] == pytest.approx(speed)
            assert 0 < row["peak_bytes"] < 1 << 30
            gib = row["peak_bytes"] / 2**30
            cells[name] += [f"{row['ms']['median']:.2f}", f"{speed:,.0f}", f"{gib:.2f}"]
            ours, noted = name.startswith("Twin"), timed.noted[name]
            assert any(line.startswith("graph") or "replay" in line for line in noted) or bool(launches(noted)) == ours
    assert next(rows, None) is None
    is_table(ran.tables[0], ran.tables[0].columns, [tuple(one) for one in cells.values()])


def test_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes by the folders that they get, and its table."""
    asked: list[Any] = []

    def process(cache: Path, cubins: Path, into: Path | None = None) -> Row:
        asked.append((cache.name, cubins.name, into and into.name))
        if into is not None:
            (into / "about.json").write_text('{"count": 30}')
        return {"seconds": samples(str(len(asked)), 5), "compiled": [0, 0, 28 if into else 0, 0, 4 if into else 0]}

    monkeypatch.setattr(first_step, "process", process)
    monkeypatch.setattr(first_step, "carried", lambda: None)
    monkeypatch.setattr(first_step.os, "sched_getaffinity", lambda process: set(range(16)))
    ran = run(first_step)
    assert asked == 2 * [("cache", "none", "cubins"), ("empty", "cubins", None), ("cache", "none", None)]
    assert ran.payload["packed"] == {"kernels": 30, "of": "this layer alone"}
    assert ran.payload["cores"] == 16
    cells = []
    for i, (row, kernels) in enumerate(zip(ran.payload["rows"], ("28 + 4", "0 + 0", "0 + 0"), strict=True), 1):
        both = [samples(str(n), 5) for n in (i, i + 3)]  # of both rounds
        assert list(row["seconds"].values()) == [list(pair) for pair in zip(*both, strict=True)]
        of = [sum(pair) / 2 for pair in zip(*both, strict=True)]
        cells.append((row["name"], f"{sum(of[:3]):.1f}", *(f"{x:.2f}" for x in of), kernels))
    is_table(ran.tables[0], ran.tables[0].columns, cells)


@pytest.mark.slow  # a quarter of a minute; `layer_sweep` runs the same code
def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second case a few contestants."""
    build = layer.contestants

    def contestants(case: layer_models.Case) -> list[Any]:
        found = list(build(case))
        return [found[i] for i in (0, 1, 2, 3, 5, 11)] if case == layer_models.CASES[1] else found

    monkeypatch.setattr(layer, "contestants", contestants)
    with layers():
        ran = run(layer)
    payload = ran.payload
    blocks = iter(one for one in ran.rounds if not one.flush)
    assert payload["cupy_pool_bytes"] == 5
    for found, case in zip(payload["cases"], layer_models.CASES, strict=True):
        timed = next(blocks)
        small = case.tokens <= 1024
        assert (timed.repeats, timed.warmup) == (6, layer.UNCOUNTED if small else 0)
        one_core = next(blocks) if small else None
        parts = list(timed.samples)[-2:]
        assert parts == ["cuBLASLt's twelve products", "cuDNN's attention"] == list(found["parts"])
        for name in parts:
            is_summary(found["parts"][name], timed.samples[name])
        assert found["parts_ms"] == pytest.approx(sum(statistics.median(timed.samples[name]) for name in parts))
        for row, name in zip(found["rows"], timed.samples, strict=False):
            is_summary(row["ms"], timed.samples[name])
            assert ("ms_on_one_core" in row) == small
            if one_core is not None:
                is_summary(row["ms_on_one_core"], one_core.samples[name])
            assert row["peak_bytes"] is None or row["peak_bytes"] > 0
            for op in row.get("ops", []):
                assert op["ms"] > 0
                assert op["count"] >= 1
                assert op["of_ceiling"] is None or op["of_ceiling"] > 0
            assert all(one["count"] >= 1 for one in row.get("memory", []))
        assert any("ops" in row for row in found["rows"])
    timed = next(blocks)
    for row, times in zip(payload["linear"]["rows"], timed.samples.values(), strict=True):
        is_summary(row["ms"], times)
    with mock.patch.object(measure, "read_result", return_value=payload):
        is_drawn(layer_plot.main, "layer")


@pytest.mark.slow  # a quarter of a minute; tests/bench/test_single_gpu.py runs the same code
def test_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of most groups two or three settings, on a model of one small layer.

    Batches have two sequences, loaders no processes of their own; what te recomputes needs a GPU.
    """
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
    monkeypatch.setattr(single_gpu, "GROUPS", small)
    for name, value in {"WARM_UP": 1, "ALONE": 2, "steps_of": lambda setting: 1}.items():
        monkeypatch.setattr(single_gpu, name, value)
    monkeypatch.setattr(single_gpu_models, "BATCHES", 1)
    monkeypatch.setattr(
        single_gpu_models, "DataLoader", lambda data, batch, **_: torch.utils.data.DataLoader(data, batch)
    )
    with layers():
        ran = run(single_gpu, partial(single_gpu.run, sizes=sizes))
    payload, rounds = ran.payload, iter(ran.rounds)
    assert [group["group"] for group in payload["groups"]] == list(chosen)
    for group, found in zip(small, payload["groups"], strict=True):
        timed = None if group.alone else next(rounds)
        settings = [one for one in group.settings if one.name not in found["not_installed"]]
        for row, one in zip(found["rows"], settings, strict=True):
            assert row["setting"] == json.loads(json.dumps(asdict(one)))
            assert row["losses"]
            if timed is not None:
                is_summary(row["ms"], timed.samples[one.name])
                is_summary(row["samples_per_second"], [1e3 * one.samples / ms for ms in timed.samples[one.name]])
            else:
                assert len(row["steps_ms"]) == 2
                assert row["samples_per_second"]["median"] > 0
    last = next(rounds)
    for row, times in zip(payload["gemms"], last.samples.values(), strict=True):
        is_summary(row["ms"], [one / 8 for one in times])
        work = 2 * row["m"] * row["n"] * row["k"]
        assert row["tflops"] == pytest.approx(work / statistics.median(times) * 8e-9)
    assert payload["batch_ms"] >= 0
    is_drawn(partial(single_gpu_plot.plot, payload), "single_gpu", 2)
