"""docs/single_gpu.png: samples a second and GiB of each rung of `twin bench single_gpu`.

    python -m optimized.bench.models.single_gpu_plot

Reads docs/results/single_gpu.json; needs no GPU.
"""

from typing import Any

from optimized import measure
from optimized.bench import Payload, plots
from optimized.bench.models.single_gpu_tables import GIB, gib, ladder, speed

INK, QUIET = "#101418", "#5b6876"
# Okabe and Ito's colours, as in docs/drawings: x blue, w orange, y green, gradients purple.
PARTS = {
    "weights": ("#e69f00", "weights"),
    "optimizer": ("#2fb58c", "optimizer's state"),
    "activations": ("#56b4e9", "activations"),
    "rest": ("#cc79a7", "gradients and temporaries, at the peak"),
}
BASE, OURS = "#b9c0c8", "#0072b2"


def shares(row: dict[str, Any]) -> dict[str, float]:
    """GiB of the peak: what is there in any case, what forward keeps, and the rest."""
    memory = row["memory"]
    found = {name: memory[name] / GIB for name in ("weights", "optimizer", "activations")}
    return {**found, "rest": max(0.0, gib(row) - sum(found.values()))}


def speeds(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A bar a row; what is new at it is its label."""
    for place, row in enumerate(rows):
        colour = OURS if row["setting"]["layers"] == "te" else BASE
        low, high = (row["samples_per_second"][key] for key in ("p10", "p90"))
        axes.barh(place, speed(row), color=colour, height=0.7)
        axes.plot([low, high], [place, place], color=INK, linewidth=1.2)
        axes.text(max(high, speed(row)), place, f"  {speed(row):.0f}", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(right=1.1 * max(row["samples_per_second"]["p90"] for row in rows))
    axes.set_xlabel("samples a second")
    axes.set_title("Blue: this project's layers", fontsize=9, color=QUIET, loc="left")


def memories(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A bar a row, of the parts of its peak."""
    lefts = [0.0] * len(rows)
    for part, (colour, label) in PARTS.items():
        widths = [shares(row)[part] for row in rows]
        axes.barh(range(len(rows)), widths, left=lefts, color=colour, height=0.7, label=label)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, row in enumerate(rows):
        axes.text(lefts[place], place, f"  {gib(row):.1f}", va="center", fontsize=9, color=INK)
    axes.set_xlim(right=1.15 * max(lefts))
    axes.set_xlabel("GiB at the peak of a step")


def _label(row: dict[str, Any]) -> str:
    name = row["setting"]["name"]
    return f"({name})" if row["setting"]["side"] else name


def plot(payload: Payload) -> None:
    """Both beside each other, rung under rung."""
    rows = [row for row, _ in ladder(payload)]
    with plots.drawing("single_gpu", 1, 2, (11.5, 5), sharey=True) as (figure, (left, right)):
        speeds(left, rows)
        memories(right, rows)
        for axes in (left, right):
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
        sizes = payload["sizes"]
        figure.suptitle(
            f"Training a BERT of {sizes['layers']} layers, hidden {sizes['hidden']}, sequence {sizes['sequence']}, on "
            "one H200: each row adds one technique to those above it (in brackets: tried, not kept)",
            fontsize=10,
            color=INK,
        )
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=4, fontsize=9, frameon=False)


if __name__ == "__main__":
    plot(measure.read_result("single_gpu"))
