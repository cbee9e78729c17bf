"""One transformer layer under each recipe, beside Transformer Engine's (docs/results/layer_recipes.json).

The layers are those of `twin bench layer`: ours with its own attention, in bf16 and under delayed, current and block
scaling, and, where it can be imported, Transformer Engine's under the same recipes with the attention that it chooses.
Of the smaller layers ours come as CUDA graphs, too.
They take turns with blocks of a few steps, forward and backward, timed by the host's clock as `layer.timed` says.
"""

import importlib
import statistics
from collections.abc import Iterator
from typing import Any

import torch

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, each, result, silent
from optimized.bench.layers import layer, layer_models
from optimized.bench.layers.layer_models import CASES, Build, Case
from optimized.bench.table import Table, percent, table

NAME = "layer_recipes"
WHAT = "a layer under each recipe, against TE"
KERNELS = (
    *layer.KERNELS,
    "cast_blocks",
    "cat_cast_blocks",
    "activation_cast_blocks",
    "norm_cast_blocks",
    "norm_statistics",
    "activation_amax",
    "current_scale",
    "multi_current_scale",
    "gemm_fp8_blocks",
    "gemm_fp8_blocks_fused",
)
RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
BF16 = torch.bfloat16
SIZES = (
    CASES[0],
    CASES[3],
    Case("hidden 2048, 8192 tokens", 2048, 8192, 16, 2048, 4, BF16, True, 0.0),
    CASES[2],
)
GRAPHED = SIZES[2:]  # the host's time is a part of theirs
GRAPH = ", CUDA graph"


def layers(case: Case) -> Iterator[tuple[str, Build]]:
    """Each layer by name, "ours, block" or "theirs, current", as a call that builds it."""
    for side, library in (("ours", te), ("theirs", layer_models.engine())):
        if library is None:
            continue
        recipes = te.recipe if library is te else importlib.import_module("transformer_engine.common.recipe")
        yield f"{side}, bf16", layer_models._layers(library, side, "its own", case, None)[0]
        for name, cls in RECIPES.items():
            recipe = getattr(recipes, cls)()
            one = layer_models._layers(library, side, "its own", case, recipe)
            yield f"{side}, {name}", one[1]
            if side == "ours" and case in GRAPHED:
                yield f"{side}, {name}{GRAPH}", one[-1]


def measure_one(case: Case, repeats: int, inner: int) -> dict[str, Any]:
    """One row of the result."""
    made = {name: build() for name, build in layers(case)}
    for one in made.values():
        one.block(5)
    short = case.tokens <= 1024
    before = layer.UNCOUNTED if short else 0
    samples = layer.timed({name: one.block for name, one in made.items()}, repeats, inner * (4 if short else 1), before)
    row: dict[str, Any] = {"case": case.name, "ms": {name: measure.summary(values) for name, values in samples.items()}}
    for recipe in (*RECIPES, "bf16"):
        if f"theirs, {recipe}" in samples:
            pairs = zip(samples[f"ours, {recipe}"], samples[f"theirs, {recipe}"], strict=True)
            row.setdefault("of_theirs", {})[recipe] = statistics.median(ours / theirs for ours, theirs in pairs)
    return row


def run(progress: Progress = silent, repeats: int = 7, inner: int = 6) -> Payload:
    rows = []
    for case in each(SIZES, progress):
        rows.append(measure_one(case, repeats, inner))
        torch.cuda.empty_cache()
    what = "milliseconds of forward and backward by recipe, and ours over Transformer Engine's, same run"
    return result(what, KERNELS, repeats=repeats, inner=inner, rows=rows)


def tables(payload: Payload) -> list[Table]:
    """One row per layer: milliseconds by recipe, and in brackets the share of Transformer Engine's time."""
    names = ("bf16", *RECIPES)
    cells = []
    for row in payload["rows"]:
        shares = row.get("of_theirs", {})
        times = (
            f"{row['ms'][f'ours, {name}']['median']:.2f}" + (f" ({percent(shares[name])})" if name in shares else "")
            for name in names
        )
        cells.append((row["case"], *times))
        graphs = [row["ms"].get(f"ours, {name}{GRAPH}") for name in names]
        if any(graphs):
            cells.append((row["case"] + GRAPH, *("–" if one is None else f"{one['median']:.2f}" for one in graphs)))
    how = "Milliseconds of a step, forward and backward."
    if any("of_theirs" in row for row in payload["rows"]):
        how = how[:-1] + "; in brackets the share of Transformer Engine's time."
    return [table(payload, "A layer under each recipe", ("layer", *names), cells, how)]
