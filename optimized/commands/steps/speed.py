"""The last step, speed: the time of the tutorial's layer by each way to compute it, and the parts of an FP8 step.

It is measured now if there is a Hopper GPU; elsewhere it is what docs/results/layer.json recorded.
"""

from typing import Any

from optimized.bench.layers import layer, layer_plot
from optimized.bench.layers.layer_models import CASES
from optimized.bench.layers.layer_tables import name
from optimized.bench.table import origin
from optimized.commands import tables
from optimized.commands.report import Report
from optimized.commands.steps import Outcome
from optimized.commands.steps.style import figure
from optimized.cuda.device import hopper
from reference.support import files

STEP = "Speed"
QUICKSTART = CASES[1]  # fp16, no mask, dropout: the layer of Transformer Engine's quickstart
HEAD = ("step", "attention", "milliseconds", "× PyTorch's fastest", "every bit defined")


def results(live: bool) -> tuple[dict[str, Any], str] | None:
    """The times of the quickstart's layer and where they were measured; None if there are none."""
    if live and hopper() is not None:
        return layer.measured(QUICKSTART, repeats=2), "Measured just now, on this machine."
    payload = tables.load("layer")
    if payload is None:
        return None
    try:
        (case,) = (one for one in payload["cases"] if one["case"]["name"] == QUICKSTART.name)
        table(case)
        return case, f"Recorded: {origin(payload)}".replace("**", "")
    except (LookupError, TypeError, ValueError) as error:
        raise files.Damaged(
            f"the recorded result layer.json is damaged: it has no whole {QUICKSTART.name!r}."
        ) from error


def medians(case: dict[str, Any]) -> tuple[dict[tuple[str, str], float], float]:
    """Milliseconds by step and attention, and those of PyTorch's fastest way."""
    times = {(row["step"], row["attention"]): row["ms"]["median"] for row in case["rows"]}
    return times, min(ms for (step, _), ms in times.items() if step.startswith("PyTorch"))


def table(case: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each way to compute the layer, under `HEAD`."""
    times, plain = medians(case)
    return [
        (name(row), attention, f"{ms:.2f}", f"{plain / ms:.2f}", "yes" if row["in_contract"] else "no")
        for ((_, attention), ms), row in zip(times.items(), case["rows"], strict=True)
    ]


def run(report: Report, live: bool) -> Outcome:
    try:
        found = results(live)
    except files.Damaged as error:
        return Outcome(STEP, str(error))
    if found is None:
        return Outcome(STEP, "no recorded results in this installation")
    case, where = found
    times, plain = medians(case)
    gain = {way: plain / times["TransformerLayer, FP8", way] for way in ("exact", "cuDNN")}
    result = (
        f"on one {'Hopper GPU' if live and hopper() is not None else 'H200, recorded'}: FP8 is {gain['exact']:.2f}× "
        f"faster than PyTorch's fastest way, {gain['cuDNN']:.2f}× with cuDNN's attention (the layer of Transformer "
        "Engine's quickstart: fp16, dropout)"
    )
    report.section("How fast is it?", f"{gain['exact']:.2f} ×")
    report.text(
        f"The layer of step 3 in a large size ({QUICKSTART.name}; hidden {QUICKSTART.hidden}, sequence "
        f"{QUICKSTART.sequence}), forward and backward on a Hopper GPU: by plain PyTorch, by this project's modules, "
        "and by NVIDIA's Transformer Engine. “exact” is this project's attention, of which a CPU predicts every bit; "
        "no CPU predicts the bits of cuDNN's attention."
    )
    report.table(HEAD, table(case), where)
    drawn = figure(9.0, 7.0)
    bars, stack = drawn.subplots(2, 1)
    layer_plot.bars(bars, case)
    layer_plot.stack(stack, case)
    report.picture(
        drawn,
        "Above, the time of a step, each way; the dashed line is what NVIDIA's libraries take for the twelve GEMMs and "
        "the attention alone. Below, what the FP8 steps consist of, each kernel timed by itself.",
        "bars of milliseconds per step, and stacked times per group of kernels",
    )
    return Outcome(STEP, result)
