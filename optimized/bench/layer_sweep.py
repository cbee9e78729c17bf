"""How fast an FP8 layer is over its width and the number of tokens (docs/results/layer_sweep.json).

    python -m optimized.bench.layer_sweep draws docs/layer_sweep.png from it; it needs no GPU.

Forward and backward of one layer, bf16, causal, dropout 0, as `bench/layer.py` times it: in turn, in blocks of steps
between two synchronisations on the host's clock. Beside the layers stands what cannot be avoided, in the same turns.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch

from optimized import measure
from optimized.bench import layer
from optimized.bench.layer_models import Case, few
from optimized.bench.table import Table, origin

NAME = "layer_sweep"
WHAT = "an FP8 layer against PyTorch's over widths and numbers of tokens"
HIDDEN, TOKENS = 4096, 8192
# One axis at a time, through the layer that everything else is measured at.
SIZES = (
    *((hidden, TOKENS) for hidden in (1024, 2048, HIDDEN, 8192)),
    *((HIDDEN, tokens) for tokens in (1024, 2048, 16384, 32768)),
)


def case(hidden: int, tokens: int) -> Case:
    """The layer of a point: heads of 128 channels, ffn four times hidden, sequences of 2048 tokens or of all."""
    sequence = min(tokens, 2048)
    return Case(
        f"hidden {hidden}, {tokens} tokens",
        hidden,
        4 * hidden,
        hidden // 128,
        sequence,
        tokens // sequence,
        torch.bfloat16,
        True,
        0.0,
    )


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
    inner = max(2, min(8, (1 << 28) // size))
    before = layer.UNCOUNTED if size <= 1 << 24 else 0  # 5 ms a step
    times = layer.timed(blocks, repeats, inner, before)
    spreads = {name: measure.spread(values) for name, values in times.items()}
    return {
        "hidden": one.hidden,
        "tokens": one.tokens,
        "rows": [
            {"step": c.name, "attention": c.attention, "in_contract": c.in_contract, "ms": spreads[c.title]}
            for c in made
        ],
        "parts": spreads["parts"],
    }


def run(progress: Callable[[float], None] | None = None, repeats: int = 5) -> dict[str, Any]:
    """Measure; `progress` is told the fraction done."""
    points = []
    for done, (hidden, tokens) in enumerate(SIZES, 1):
        points.append(measured(case(hidden, tokens), repeats))
        torch._dynamo.reset()  # Transformer Engine compiles for each size, eight times at most
        gc.collect()
        torch.cuda.empty_cache()
        if progress is not None:
            progress(done / len(SIZES))
    return {
        "what": "one bf16 layer, causal, forward and backward, by width and tokens; host clock, blocks in turn",
        "repeats": repeats,
        "points": points,
        "provenance": measure.provenance(layer.KERNELS),
    }


def plot(payload: dict[str, Any]) -> None:
    """Times faster than plain PyTorch with cuDNN's attention, over hidden and over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    styles = {
        ("TransformerLayer", "cuDNN"): ("#7570b3", "bf16, cuDNN's attention"),
        ("TransformerLayer, FP8", "exact"): ("#1b9e77", "FP8, exact attention: every bit defined"),
        ("TransformerLayer, FP8", "cuDNN"): ("#d95f02", "FP8, cuDNN's attention"),
        ("Transformer Engine, FP8", "its own"): ("#222222", "Transformer Engine, FP8"),
    }
    for axes, axis, fixed in zip(panels, ("hidden", "tokens"), (("tokens", TOKENS), ("hidden", HIDDEN)), strict=True):
        points = sorted((p for p in payload["points"] if p[fixed[0]] == fixed[1]), key=lambda p: p[axis])
        places = [point[axis] for point in points]
        plain = [_ms(point, "PyTorch", "cuDNN") for point in points]
        for (step, attention), (colour, label) in styles.items():
            times = [_ms(point, step, attention) for point in points]
            if None not in times:
                faster = [theirs / ours for theirs, ours in zip(plain, times, strict=True)]
                axes.plot(places, faster, "o-", color=colour, ms=4, label=label)
        best = [theirs / point["parts"]["median"] for theirs, point in zip(plain, points, strict=True)]
        axes.plot(places, best, "--", color="#888888", label="cuBLASLt's FP8 products + cuDNN's attention alone")
        axes.axhline(1, color="#c9ced6", lw=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.minorticks_off()
        axes.set_xlabel(f"{axis} ({fixed[0]} {fixed[1]})")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("PyTorch's time (cuDNN's attention) over it", fontsize=9)
    panels[0].set_ylim(bottom=0)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    measure.write_plot(measure.ROOT / "docs" / f"{NAME}.png", figure)
    plt.close(figure)


def _ms(point: dict[str, Any], step: str, attention: str) -> Any:
    found = (row["ms"]["median"] for row in point["rows"] if (row["step"], row["attention"]) == (step, attention))
    return next(found, None)


def tables(payload: dict[str, Any]) -> list[Table]:
    """The layer's times over its width and the number of tokens."""
    heads = {(row["step"], row["attention"]): None for point in payload["points"] for row in point["rows"]}
    rows = []
    for point in payload["points"]:
        times = {(row["step"], row["attention"]): row["ms"]["median"] for row in point["rows"]}
        cells = (f"{times[head]:.2f}" if head in times else "–" for head in heads)
        rows.append((str(point["hidden"]), str(point["tokens"]), *cells, f"{point['parts']['median']:.2f}"))
    titles = (f"{step}, {attention} attention" for step, attention in heads)
    note = (
        "Milliseconds, medians of blocks of steps in turn: bf16, causal, heads of 128 channels, ffn four times hidden, "
        f"sequences of at most 2048. {origin(payload)}"
    )
    columns = ("hidden", "tokens", *titles, "cuBLASLt's 12 FP8 products + cuDNN's attention")
    return [Table("One layer by width and tokens, forward and backward, ms", columns, tuple(rows), note)]


if __name__ == "__main__":
    plot(measure.read_result(NAME))
