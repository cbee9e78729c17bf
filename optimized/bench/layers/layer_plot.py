"""Draws docs/layer.png from docs/results/layer.json: each contestant's step, and the parts of our FP8 steps.

    python -m optimized.bench.layers.layer_plot

It needs no GPU.
"""

from typing import Any

from optimized import measure
from optimized.bench import plots
from optimized.bench.layers.layer_models import Case
from optimized.bench.layers.layer_tables import name

THEIRS, ENGINE, INSIDE, OUTSIDE = plots.GREY, plots.LABEL, plots.GREEN, plots.PURPLE
# Groups of ops from bottom to top: label, colour, and how the ops' names start. An op is in the first group that fits.
GROUPS = (
    ("attention", plots.PURPLE, ("attention", "_scaled_dot")),
    ("GEMMs, some with epilogues", plots.GREEN, ("gemm",)),
    ("casts and transposes", plots.BLUE, ("cast", "multi_cast", "cat_cast", "dbias")),
    ("norms", plots.ORANGE, ("norm",)),
    ("everything else", THEIRS, ("",)),
)


def bars(axis: Any, case: dict[str, Any], size: float = 7) -> None:
    """Draw a bar for each contestant and the parts as a dashed line, with letters of `size` points."""
    rows = case["rows"]
    for place, row in enumerate(rows):
        others = {"PyTorch": THEIRS, "Transformer Engine": ENGINE}
        colour = INSIDE if row["in_contract"] else others.get(row["step"].split(",")[0], OUTSIDE)
        axis.barh(place, row["ms"]["median"], color=colour, height=0.72)
        axis.text(
            row["ms"]["median"], place, f" {row['ms']['median']:.2f}", va="center", fontsize=size, color=plots.INK
        )
    axis.axvline(case["parts_ms"], color=plots.LABEL, linestyle="--", linewidth=1)
    axis.set_yticks(range(len(rows)), [f"{name(row)} · {row['attention']}" for row in rows], fontsize=size)
    axis.invert_yaxis()
    axis.set_xlim(right=1.15 * max(row["ms"]["median"] for row in rows))
    axis.set_xlabel("ms, forward + backward", fontsize=size + 1)
    axis.set_title(case["case"]["name"], fontsize=size + 2, loc="left", color=plots.INK)


def stack(axis: Any, case: dict[str, Any]) -> None:
    """Draw the time of each group of ops in the steps that were broken down, and the ceilings beside them."""
    ceilings = case["ceilings"]
    products = ("×".join(map(str, shape[:3])) for shape in Case(**case["case"]).products().values())
    columns = {
        "cuBLASLt +\ncuDNN": {
            "attention": ceilings["attention forward"] + ceilings["attention backward"],
            "GEMMs, some with epilogues": sum(ceilings[sizes] for sizes in products),
        }
    }
    for row in case["rows"]:
        if "ops" in row:
            times = dict.fromkeys((label for label, _, _ in GROUPS), 0.0)
            for op in row["ops"]:
                times[next(label for label, _, starts in GROUPS if op["op"].startswith(starts))] += op["ms"]
            columns[f"ours, FP8,\n{row['attention']} attention"] = times
    bottoms = dict.fromkeys(columns, 0.0)
    for label, colour, _ in GROUPS:
        heights = {column: times.get(label, 0.0) for column, times in columns.items()}
        axis.bar(list(columns), list(heights.values()), 0.6, bottom=list(bottoms.values()), color=colour, label=label)
        for place, (column, height) in enumerate(heights.items()):
            if height > 0.3:
                middle = bottoms[column] + height / 2
                axis.text(place, middle, f"{height:.2f}", ha="center", va="center", fontsize=7, color=plots.INK)
            bottoms[column] += height
    axis.set_ylabel("ms of GPU time", fontsize=8)
    axis.set_ylim(top=1.35 * max(bottoms.values()))
    axis.legend(fontsize=7, frameon=False, loc="upper left", reverse=True)
    axis.set_title(f"where the time goes: {case['case']['name']}", fontsize=8.5, loc="left", color=plots.INK)


def main() -> None:
    """Draw docs/layer.png."""
    cases = measure.read_result("layer")["cases"]
    rows = len(cases) // 2 + 1
    with plots.drawing("layer", rows, 2, (12, 4.1 * rows)) as (figure, axes):
        for axis, case in zip(axes.flat, cases, strict=False):
            bars(axis, case)
        stack(axes.flat[len(cases)], cases[0])
        for axis in axes.flat[len(cases) + 1 :]:
            axis.remove()
        for axis in axes.flat[: len(cases) + 1]:
            axis.tick_params(labelsize=7)
        figure.suptitle(
            "One transformer layer on an H200. Green: every bit defined by reference; purple: ours with cuDNN's "
            "attention or torch's dropout;\nlight grey: PyTorch; dark grey: Transformer Engine; "
            "dashed: cuBLASLt's twelve FP8 GEMMs + cuDNN's attention",
            fontsize=9,
            color=plots.LABEL,
        )


if __name__ == "__main__":
    main()
