"""Layers of hidden 768 to 2048 against compiled PyTorch, launched eagerly and as one CUDA graph
(docs/results/small_layers.json).

The GPU's work of a small layer takes about as long as the host needs to launch it. So each contestant comes twice: as a
program runs it, and with a whole step, forward and backward, as one CUDA graph, whose replay leaves out the host. Both
sides are treated alike. Steps are timed as in `bench/layers/layer.py`.
"""

from collections.abc import Callable
from typing import Any

import torch

from optimized import measure
from optimized.bench import Payload, Progress, each, result, silent
from optimized.bench.layers import layer, layer_models
from optimized.bench.layers.layer_models import Build, Case, Contestant
from optimized.bench.table import Table, table

NAME = "small_layers"
WHAT = "small layers, eager and as graphs"
BF16 = torch.bfloat16
SIZES = (
    Case("GPT-2: hidden 768", 768, 3072, 12, 1024, 8, BF16, True, 0.0),
    Case("BERT-large: hidden 1024", 1024, 4096, 16, 512, 16, BF16, False, 0.0),
    Case("GPT: hidden 2048", 2048, 8192, 16, 2048, 4, BF16, True, 0.0),
    Case("Llama 1B-like: hidden 2048", 2048, 8192, 32, 2048, 4, BF16, True, 0.0, True, 8, True),
)
THEIRS, PLAIN, FP8 = "PyTorch, compiled", "TransformerLayer", "TransformerLayer, FP8"
GRAPH = ", one CUDA graph"


def contestants(case: Case) -> dict[str, Build]:
    """Compiled PyTorch, and our layer in 16 bits and in FP8 with exact attention, as calls that build them."""

    def compiled() -> Contestant:
        return Contestant(THEIRS, "cuDNN", torch.compile(layer_models._plain(case)), case)

    plain, fp8 = next(layer_models._ours(case))[:2]
    return {THEIRS: compiled, PLAIN: plain, FP8: fp8}


def graphed(build: Build) -> Contestant:
    """A contestant whose step is one CUDA graph."""
    made = build()
    made.block(layer.UNCOUNTED)  # compilers and autotuners have run before the capture
    made.forget()
    made.run = measure.graph(lambda _: made.step(), 1)
    return made


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step by contestant, eager and as one graph."""
    blocks: dict[str, Callable[[int], object]] = {}
    for name, build in contestants(case).items():
        for way, made in (("", build()), (GRAPH, graphed(build))):
            made.block(layer.UNCOUNTED)
            made.forget()
            blocks[f"{name}{way}"] = made.block
    samples = layer.timed(blocks, repeats, 20, layer.UNCOUNTED)
    return {
        "case": {**vars(case), "dtype": str(case.dtype).removeprefix("torch.")},
        "tokens": case.tokens,
        "ms": {name: measure.spread(values) for name, values in samples.items()},
    }


def run(progress: Progress = silent, repeats: int = 9) -> Payload:
    rows = []
    for case in each(SIZES, progress):
        rows.append(measured(case, repeats))
        layer.clear()
    what = "one small layer, forward and backward, eager and as one CUDA graph; host clock, blocks of steps in turn"
    return result(what, layer.KERNELS, repeats=repeats, rows=rows)


def _faster(row: dict[str, Any], way: str) -> float:
    """How many times as fast as compiled PyTorch a step in FP8 is, launched in the same way."""
    return float(row["ms"][f"{THEIRS}{way}"]["median"] / row["ms"][f"{FP8}{way}"]["median"])


def tables(payload: Payload) -> list[Table]:
    """A row for each layer."""
    ways = list(payload["rows"][0]["ms"])
    rows = [
        (
            row["case"]["name"],
            *(f"{row['ms'][name]['median']:.3f}" for name in ways),
            *(f"{_faster(row, way):.2f}×" for way in ("", GRAPH)),
        )
        for row in payload["rows"]
    ]
    tokens = " or ".join(f"{n:,}" for n in sorted({row["tokens"] for row in payload["rows"]}))
    how = (
        "Milliseconds of a step, forward and backward, launched eagerly and replayed as one CUDA graph; the last two "
        "columns say how many times as fast as compiled PyTorch FP8 is, launched in the same way."
    )
    note = f"bf16 weights, {tokens} tokens; ours with exact attention, PyTorch's with cuDNN's."
    columns = ("layer", *ways, "FP8, faster", f"FP8, faster{GRAPH}")
    return [table(payload, "Small layers, eagerly and as CUDA graphs", columns, rows, how, note)]


def summary(payload: Payload) -> list[tuple[str, str, str, str]]:
    """README's row: FP8 beside compiled PyTorch where each step is one CUDA graph."""
    rows = payload["rows"]
    sizes = [row["case"]["hidden"] for row in rows]

    def span(values: list[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}"

    ours, theirs = ([row["ms"][f"{name}{GRAPH}"]["median"] for row in rows] for name in (FP8, THEIRS))
    return [
        (
            f"{len(rows)} layers, hidden {min(sizes)} to {max(sizes)}, each step one CUDA graph",
            f"{span(ours)} ms",
            f"PyTorch, compiled, as graphs, too: {span(theirs)} ms",
            f"{span([_faster(row, GRAPH) for row in rows])}×",
        )
    ]
