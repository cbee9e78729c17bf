"""How fast an FP8 layer is by its width and the number of tokens (docs/results/layer_sweep.json).

    python -m optimized.bench.layers.layer_sweep draws docs/layer_sweep.png from it; it needs no GPU.

One layer (bf16, causal, dropout 0) runs forward and backward, timed as in `bench/layer.py`. In the same turns run the
parts that cannot be avoided.
"""

from collections.abc import Callable
from typing import Any

import torch

from optimized import measure
from optimized.bench import Payload, Progress, each, plots, result, silent
from optimized.bench.layers import layer
from optimized.bench.layers.layer_models import Case, few
from optimized.bench.table import Table, table

NAME = "layer_sweep"
WHAT = "a layer by width and tokens, against PyTorch"
HIDDEN, TOKENS = 4096, 8192
# One axis at a time, through the sizes of the layer that other benchmarks measure.
SIZES = (
    *((hidden, TOKENS) for hidden in (1024, 2048, HIDDEN, 8192)),
    *((HIDDEN, tokens) for tokens in (1024, 2048, 16384, 32768)),
)


def case(hidden: int, tokens: int) -> Case:
    """The layer of a point: heads of 128 channels, ffn four times hidden, sequences of at most 2048 tokens."""
    sequence, name = min(tokens, 2048), f"hidden {hidden}, {tokens} tokens"
    batch = tokens // sequence
    return Case(name, hidden, 4 * hidden, hidden // 128, sequence, batch, torch.bfloat16, True, 0.0)


def measured(one: Case, repeats: int) -> dict[str, Any]:
    """Median milliseconds of each contestant and of the parts."""
    made = [build() for build in few(one)]
    for contestant in made:
        contestant.block(4)
        contestant.forget()
    parts = [*layer.products(one).values(), *layer.attention(one).values()]
    blocks: dict[str, Callable[[int], object]] = {contestant.title: contestant.block for contestant in made}
    blocks["parts"] = lambda steps: [call() for _ in range(steps) for call in parts]
    size = one.hidden * one.tokens
    before = layer.UNCOUNTED if size <= 1 << 24 else 0  # 5 ms a step
    times = layer.timed(blocks, repeats, max(2, min(8, (1 << 28) // size)), before)
    spreads = {name: measure.spread(values) for name, values in times.items()}
    rows = [{**c.described(), "ms": spreads[c.title]} for c in made]
    return {"hidden": one.hidden, "tokens": one.tokens, "rows": rows, "parts": spreads["parts"]}


def run(progress: Progress = silent, repeats: int = 5) -> Payload:
    points = []
    for size in each(SIZES, progress):
        points.append(measured(case(*size), repeats))
        layer.clear()
    what = "one bf16 layer, causal, forward and backward, by width and tokens; host clock, blocks in turn"
    return result(what, layer.KERNELS, repeats=repeats, points=points)


AXES = (("hidden", "tokens", TOKENS), ("tokens", "hidden", HIDDEN))  # the axis, what is fixed, and its value
STYLES = {
    ("TransformerLayer", "cuDNN"): (plots.BLUE, "bf16, cuDNN's attention"),
    ("TransformerLayer, FP8", "exact"): (plots.GREEN, "FP8, exact attention: every bit defined"),
    ("TransformerLayer, FP8", "cuDNN"): (plots.ORANGE, "FP8, cuDNN's attention"),
    ("Transformer Engine, FP8", "its own"): (plots.INK, "Transformer Engine, FP8"),
}


def _times(point: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(row["step"], row["attention"]): row["ms"]["median"] for row in point["rows"]}


def plot(payload: Payload) -> None:
    """Draw the speedup over plain PyTorch with cuDNN's attention, by hidden and by tokens."""
    with plots.drawing(NAME, 1, 2, (10, 4), sharey=True) as (figure, panels):
        for axes, (axis, fixed, at) in zip(panels, AXES, strict=True):
            points = sorted((p for p in payload["points"] if p[fixed] == at), key=lambda p: p[axis])
            places, times = [point[axis] for point in points], [_times(point) for point in points]
            plain = [found["PyTorch", "cuDNN"] for found in times]
            for step, (colour, label) in STYLES.items():
                if all(step in found for found in times):
                    faster = [theirs / found[step] for theirs, found in zip(plain, times, strict=True)]
                    axes.plot(places, faster, "o-", color=colour, ms=4, label=label)
            best = [theirs / point["parts"]["median"] for theirs, point in zip(plain, points, strict=True)]
            axes.plot(places, best, "--", color=plots.LABEL, label="cuBLASLt's FP8 GEMMs + cuDNN's attention alone")
            axes.axhline(1, color=plots.GREY, lw=1, zorder=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [str(place) for place in places])
            axes.minorticks_off()
            axes.set_xlabel(f"{axis} ({fixed} {at})")
        panels[0].set_ylabel("times faster than PyTorch (cuDNN's attention)", fontsize=9)
        panels[0].set_ylim(bottom=0)
        legend = panels[0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=3, fontsize=8)


def tables(payload: Payload) -> list[Table]:
    """The layer's times over its width and the number of tokens."""
    heads = list(dict.fromkeys(step for point in payload["points"] for step in _times(point)))
    rows = []
    for point in payload["points"]:
        times = _times(point)
        cells = (f"{times[head]:.2f}" if head in times else "–" for head in heads)
        rows.append((str(point["hidden"]), str(point["tokens"]), *cells, f"{point['parts']['median']:.2f}"))
    titles = (f"{step}, {attention} attention" for step, attention in heads)
    how = "Milliseconds of forward and backward of one GPT layer, by its width and the number of tokens."
    note = (
        "Medians of blocks of steps in turn: bf16, causal, heads of 128 channels, ffn four times hidden, sequences of "
        "at most 2048."
    )
    columns = ("hidden", "tokens", *titles, "cuBLASLt's 12 FP8 GEMMs + cuDNN's attention")
    return [table(payload, "One GPT layer by width and tokens", columns, rows, how, note)]


if __name__ == "__main__":
    plot(measure.read_result(NAME))
