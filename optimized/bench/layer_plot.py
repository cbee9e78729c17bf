"""Draws docs/layer.png from docs/results/layer.json: each contestant's step, and the parts of our FP8 steps.

    python -m optimized.bench.layer_plot

It needs no GPU.
"""

from typing import Any

from optimized import measure
from optimized.bench import plots
from optimized.bench.layer_models import Case
from optimized.bench.layer_tables import name

INK, QUIET = "#222222", "#888888"
THEIRS, ENGINE, INSIDE, OUTSIDE = "#c9ced6", "#5b6876", "#1b9e77", "#7570b3"
# Groups of ops from bottom to top: label, colour, and how the ops' names start. An op is in the first group that fits.
GROUPS = (
    ("attention", "#7570b3", ("attention", "_scaled_dot")),
    ("GEMMs, some with epilogues", "#1b9e77", ("gemm",)),
    ("casts and transposes", "#d95f02", ("cast", "multi_cast", "cat_cast", "dbias")),
    ("norms", "#e6ab02", ("norm",)),
    ("everything else", THEIRS, ("",)),
)


def bars(axis: Any, case: dict[str, Any], size: float = 7) -> None:
    """Draw a bar for each contestant and the parts as a dashed line, with letters of `size` points."""
    rows = case["rows"]
    for place, row in enumerate(rows):
        others = {"PyTorch": THEIRS, "Transformer Engine": ENGINE}
        colour = INSIDE if row["in_contract"] else others.get(row["step"].split(",")[0], OUTSIDE)
        axis.barh(place, row["ms"]["median"], color=colour, height=0.72)
        axis.text(row["ms"]["median"], place, f" {row['ms']['median']:.2f}", va="center", fontsize=size, color=INK)
    axis.axvline(case["parts_ms"], color=QUIET, linestyle="--", linewidth=1)
    axis.set_yticks(range(len(rows)), [f"{name(row)} · {row['attention']}" for row in rows], fontsize=size)
    axis.invert_yaxis()
    axis.set_xlim(right=1.15 * max(row["ms"]["median"] for row in rows))
    axis.set_xlabel("ms, forward + backward", fontsize=size + 1)
    axis.set_title(case["case"]["name"], fontsize=size + 2, loc="left", color=INK)


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
                ink = INK if colour == THEIRS else "white"
                axis.text(place, middle, f"{height:.2f}", ha="center", va="center", fontsize=7, color=ink)
            bottoms[column] += height
    axis.set_ylabel("ms of GPU time", fontsize=8)
    axis.set_ylim(top=1.35 * max(bottoms.values()))
    axis.legend(fontsize=7, frameon=False, loc="upper left", reverse=True)
    axis.set_title(f"where the time goes: {case['case']['name']}", fontsize=9, loc="left", color=INK)


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
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(
            "One transformer layer on an H200. Green: every bit defined by reference; violet: ours with cuDNN's "
            "attention or torch's dropout;\nlight grey: PyTorch; dark grey: Transformer Engine; "
            "dashed: cuBLASLt's twelve FP8 GEMMs + cuDNN's attention",
            fontsize=9,
            color=QUIET,
        )


if __name__ == "__main__":
    main()
