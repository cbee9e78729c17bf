"""Draws docs/casts.png, docs/loss.png and docs/optimizer.png: what ops bound by memory reach, from docs/results.

    python -m optimized.bench.bandwidth_plot

It needs no GPU.
"""

import statistics
from typing import Any

from optimized import measure
from optimized.bench import plots

CASTS = {"cast_transpose": plots.BLUE, "norm": plots.ORANGE, "activation": plots.GREEN}
LOSS = {"cross_entropy": plots.PURPLE, "embedding": plots.BLUE}


def _bars(axes: Any, found: list[tuple[str, float, str]], label: str) -> None:
    for place, (_, value, colour) in enumerate(found):
        axes.barh(place, value, color=colour, height=0.72)
        axes.text(value, place, f" {value:.3g}", va="center", fontsize=9, color=plots.INK)
    axes.set_yticks(range(len(found)), [name for name, _, _ in found])
    axes.invert_yaxis()
    axes.set(xlabel=label, xlim=(0, 1.1 * max(value for _, value, _ in found)))


def shares(name: str, colours: dict[str, str]) -> None:
    """Draw docs/<name>.png: by op the median share of a copy's bandwidth; PyTorch's ops are grey."""
    found = []
    for result, colour in colours.items():
        ops: dict[str, list[float]] = {}
        for row in measure.read_result(result)["rows"]:
            op = row["op"] if colours is CASTS else f"{result} {row['op']}"
            ops.setdefault(op.replace("_", " "), []).append(100 * row["of_copy"])
        found += [
            (op, statistics.median(of), plots.GREY if "PyTorch" in op else colour) for op, of in sorted(ops.items())
        ]
    with plots.drawing(name, 1, 1, (8, 0.3 * len(found) + 1)) as (_, axes):
        axes.axvline(100, color=plots.LABEL, linestyle="--", linewidth=1)
        _bars(axes, found, "bandwidth, % of a large copy's; the median over shapes")


def optimizers() -> None:
    """Draw docs/optimizer.png: milliseconds of a step; ours green, PyTorch's grey."""
    rows = measure.read_result("adam")["rows"]
    found = [
        (name, row["ms"]["median"], plots.GREY if name.startswith("torch") else plots.GREEN)
        for row in rows
        for name in [row["optimizer"]]
    ]
    with plots.drawing("optimizer", 1, 1, (8, 0.32 * len(found) + 1)) as (_, axes):
        _bars(axes, found, f"ms a step of {measure.read_result('adam')['numbers'] / 1e6:.0f} million parameters")


if __name__ == "__main__":
    shares("casts", CASTS)
    shares("loss", LOSS)
    optimizers()
