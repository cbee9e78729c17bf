"""docs/several_gpus.png: a training step on several GPUs in each way, for each model of `data_parallel.json`.

    python -m optimized.bench.models.several_gpus_plot

Reads docs/results/data_parallel.json; needs no GPU.
"""

from typing import Any

from optimized import measure
from optimized.bench import Payload, plots
from optimized.bench.models.data_parallel import by_model, speedups


def bars(axes: Any, model: str, rows: list[dict[str, Any]]) -> None:
    """A bar a way; beside it the milliseconds, and the share of one GPU's speed."""
    found = list(speedups(rows))
    for place, (row, of_one, _) in enumerate(found):
        ms = row["ms"]["median"]
        axes.barh(place, ms, color=plots.BLUE if row["way"].startswith("Twin") else plots.GREY, height=0.7)
        share = "" if row["way"].endswith("alone") else f",  {of_one:.2f} of one GPU's speed"
        axes.text(ms, place, f"  {ms:.0f} ms{share}", va="center", fontsize=9, color=plots.INK)
    axes.set_yticks(range(len(found)), [row["way"] for row, *_ in found], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(right=1.55 * max(row["ms"]["median"] for row, *_ in found))
    axes.set_xlabel("ms a step")
    first = rows[0]
    axes.set_title(f"{first['layers']} layers of {model}'s shape, {first['tokens']:,} tokens a GPU")


def plot(payload: Payload) -> None:
    """A model under the other."""
    models = by_model(payload)
    with plots.drawing("several_gpus", len(models), 1, (9.5, 3.2 * len(models)), squeeze=False) as (_, axes):
        for one, (model, rows) in zip(axes[:, 0], models.items(), strict=True):
            bars(one, model, rows)


if __name__ == "__main__":
    plot(measure.read_result("data_parallel"))
