"""Draws docs/speed.png, README's four bars, from the first case of docs/results/layer.json.

    python -m optimized.bench.layers.speed_plot

It needs no GPU. The letters are large: a phone shows a picture at half its size.
"""

from optimized import measure
from optimized.bench import Payload, plots
from optimized.bench.layers import layer_tables


def plot(payload: Payload) -> None:
    """Draw docs/speed.png, README's picture: a step in compiled PyTorch, Transformer Engine, ours, and its parts."""
    case = payload["cases"][0]
    times = {(row["step"], row["attention"]): row["ms"]["median"] for row in case["rows"]}
    bars = (
        ("PyTorch, compiled\n16 bits", times["PyTorch, compiled", "cuDNN"], plots.GREY),
        ("Transformer Engine\nFP8", times.get(layer_tables.THEIRS, 0.0), plots.LABEL),
        ("Twin Engine\nFP8", times[layer_tables.FP8, "exact"], plots.GREEN),
        ("cuBLASLt + cuDNN:\nGEMMs and attention alone", case["parts_ms"], plots.PALE),
    )
    with plots.drawing("speed", 1, 1, (7, 3.4)) as (_, axes):
        for place, (_, ms, colour) in enumerate(bars):
            axes.barh(place, ms, color=colour, height=0.74)
            axes.text(ms, place, f" {ms:.1f} ms" if ms else " not measured", va="center", fontsize=13, color=plots.INK)
        axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=13)
        axes.invert_yaxis()
        axes.set(xticks=[], xlim=(0, 1.2 * max(ms for _, ms, _ in bars)))
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.tick_params(left=False)
        sizes = case["case"]
        tokens = sizes["sequence"] * sizes["batch"]
        title = f"GPT layer, hidden {sizes['hidden']}, {tokens:,} tokens:\nforward and backward on an H200"
        axes.set_title(title, fontsize=13)


if __name__ == "__main__":
    plot(measure.read_result("layer"))
