"""Draws docs/attention.png from docs/results/attention.json: TFLOP/s by sequence, ours beside cuDNN's.

    python -m optimized.bench.kernels.attention_plot

It needs no GPU.
"""

from typing import Any

from optimized import measure
from optimized.bench import Payload, plots
from optimized.bench.kernels import attention

WAYS = ("forward", "backward")
MASKS = {"none": "no mask", "causal": "causal"}
WHOSE = {"": (plots.GREEN, "exact attention"), "cuDNN ": (plots.GREY, "cuDNN's")}


def curve(payload: Payload, way: str, mask: str, whose: str = "") -> dict[int, float]:
    """TFLOP/s by sequence: 128 channels, a head of keys for each head, no dropout. `whose`: "" ours, or "cuDNN "."""
    found = {}
    for name, times in payload["ms"]["attention"].items():
        of = attention.sizes(name)
        if of["d"] == 128 and of["h"] == of["hkv"] and name.endswith(f" {mask} dropout=0.0"):
            found[of["s"]] = attention.flops(name, way) / times[whose + way]["median"] / 1e9
    return dict(sorted(found.items()))


def panel(axes: Any, payload: Payload, way: str, mask: str) -> None:
    """For each sequence a bar of ours, and cuDNN's beside it."""
    for side, (whose, (colour, label)) in enumerate(WHOSE.items()):
        points = curve(payload, way, mask, whose)
        places = [place + 0.4 * (side - 0.5) for place in range(len(points))]
        axes.bar(places, list(points.values()), 0.38, color=colour, label=label)
        for place, speed in zip(places, points.values(), strict=True):
            axes.text(place, speed, f"{speed:.0f}", ha="center", va="bottom", fontsize=7.5, color=plots.INK)
    axes.set_xticks(range(len(points)), [f"{sequence:,}" for sequence in points])
    axes.set_xlim(-0.6, max(len(points), 3) - 0.4)
    axes.set_title(f"{way}, {MASKS[mask]}")


def plot(payload: Payload) -> None:
    """Forward above backward, without a mask and causal."""
    with plots.drawing("attention", 2, 2, (10, 5.6), sharey=True) as (figure, panels):
        for row, way in zip(panels, WAYS, strict=True):
            for axes, mask in zip(row, MASKS, strict=True):
                panel(axes, payload, way, mask)
            row[0].set_ylabel("TFLOP/s")
        for axes in panels[1]:
            axes.set_xlabel("sequence")
        figure.suptitle(
            "Attention on an H200: bf16, 32 heads of 128 channels. With a causal mask half of the FLOP count.",
            fontsize=10,
            color=plots.LABEL,
        )
        legend = panels[0][0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=2, fontsize=9)


if __name__ == "__main__":
    plot(measure.read_result("attention"))
