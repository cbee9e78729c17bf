"""docs/elementary.png: the error of the chosen functions against x, and the price of every candidate.

    python -m optimized.bench.elementary_plot

Reads docs/results/elementary.json and computes the errors with `reference`; needs no GPU.
"""

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.ticker import FuncFormatter

from optimized import measure
from optimized.bench import elementary_error as error
from reference import elementary

INK, QUIET = "#222222", "#888888"
COLOURS = {"fast": "#1b9e77", "tanh": "#a6761d", "grid": "#7570b3", "operations": "#d95f02"}


def kind(function: str) -> str:
    """Which kind of arithmetic a candidate uses."""
    if "tanh" in function:
        return "tanh"
    if "grid15" in function or "f32" in function or function == "exp":
        return "grid"
    return "operations" if function.split("_")[-1] in ("poly", "poly6", "lean", "ieee", "newton") else "fast"


def _error_panel(axis: Any, title: str, x: torch.Tensor, y: torch.Tensor, truth: torch.Tensor, unit: str) -> None:
    """The largest and the mean error in 120 bins of x."""
    values = error.ulps(y, truth) if unit == "ulp" else (y.double() - truth).abs()
    low, high = float(x.min()), float(x.max())
    bins = ((x - low) / (high - low) * 120).long().clamp(max=119)
    centres = low + (np.arange(120) + 0.5) * (high - low) / 120
    top = torch.zeros(120, dtype=torch.float64).scatter_reduce(0, bins, values, "amax")
    count = torch.bincount(bins, minlength=120)
    mean = torch.zeros(120, dtype=torch.float64).scatter_add(0, bins, values) / count.clamp(min=1)
    seen = count.numpy() > 0
    axis.step(
        centres[seen], top.numpy()[seen], where="mid", color=COLOURS["operations"], linewidth=1.1, label="largest"
    )
    axis.step(centres[seen], mean.numpy()[seen], where="mid", color=COLOURS["fast"], linewidth=1.1, label="mean")
    axis.set_title(title, fontsize=9, loc="left", color=INK)
    axis.set_xlabel("x", fontsize=8)
    axis.set_ylabel("error, ulp" if unit == "ulp" else "error, absolute", fontsize=8)
    axis.set_ylim(bottom=0)
    if unit != "ulp":
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}"))


def _errors(axes: list[Any]) -> None:
    x = torch.from_numpy(np.arange(0x3A000000, 0x42AE0000, 397, dtype=np.uint32).view(np.float32)).neg()
    x = torch.cat([x, -torch.linspace(0, 87, 400_000)])
    _error_panel(axes[0], "exp: fp32, x ≤ 0", x, elementary.exp(x), error.truth("exp", x.double()), "ulp")
    panels: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor], str], ...] = (
        ("gelu", elementary.gelu, "ulp"),
        ("dgelu", elementary.dgelu, "absolute"),
        ("silu", elementary.silu, "ulp"),
    )
    for axis, (name, function, unit) in zip(axes[1:], panels, strict=True):
        x = error.sixteen_bit_values(torch.float16)
        x = x[x.abs() <= 6]
        title = f"{name}: every fp16 value, |x| ≤ 6"
        _error_panel(axis, title, x, function(x.half()), error.truth(name, x.double()), unit)
    axes[0].legend(fontsize=7, frameon=False)


def _price(axis: Any, result: dict[str, Any], names: tuple[str, ...], kernel: str, title: str) -> None:
    """Error (to the right: worse) against time over the identity's in the same kernel."""
    for name in names:
        for function in error.CANDIDATES[name]:
            errors = result["errors"][function]
            x = errors["fp16"]["max_absolute"] if "fp16" in errors else errors["max_relative"]
            if kernel == "gemm":
                times, key, base = result["gemm"]["times"], function, "identity"
            else:
                times, key, base = result["stream"]["times"], f"{function} e4m3", "identity e4m3"
            if key not in times or (kernel == "gemm" and function.endswith("ieee")):  # far above: in the page's table
                continue
            y = 100 * (times[key]["median"] / times[base]["median"] - 1)
            axis.plot(x, y, "o", color=COLOURS[kind(function)], markersize=5)
            axis.annotate(
                function,
                (x, y),
                xytext=(4, 3 if name == "dgelu" else -7),
                textcoords="offset points",
                fontsize=6.5,
                color=INK,
            )
    axis.set_xscale("log")
    axis.axhline(0, color=QUIET, linewidth=0.6)
    axis.margins(x=0.25, y=0.12)
    axis.set_title(title, fontsize=9, loc="left", color=INK)
    axis.set_ylabel("% over the identity", fontsize=8)
    axis.set_xlabel("largest error (exp: relative; others: absolute, fp16 inputs)", fontsize=8)


def main() -> None:
    """Draw docs/elementary.png."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = measure.read_result("elementary")
    figure = pyplot.figure(figsize=(12, 7.2), layout="constrained")
    grid = figure.add_gridspec(2, 12, height_ratios=(1, 1.35))
    _errors([figure.add_subplot(grid[0, 3 * i : 3 * i + 3]) for i in range(4)])
    fc1 = "fc1's FP8 GEMM, 8192x16384x4096, in the epilogue"
    stream = "bf16 → E4M3 over 8192x16384, bound by memory"
    _price(figure.add_subplot(grid[1, :4]), result, ("gelu", "dgelu"), "gemm", fc1)
    _price(figure.add_subplot(grid[1, 4:8]), result, ("gelu", "dgelu"), "stream", stream)
    _price(figure.add_subplot(grid[1, 8:]), result, ("exp",), "stream", stream)
    for axis in figure.axes:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Line2D([], [], marker="o", linestyle="", color=colour) for colour in COLOURS.values()]
    labels = ["ex2.approx, rcp.approx", "tanh.approx", "on a grid + corrections", "correctly rounded operations only"]
    figure.axes[4].legend(handles, labels, fontsize=7, frameon=False, loc="upper right")
    measure.write_plot(measure.ROOT / "docs" / "elementary.png", figure)


if __name__ == "__main__":
    main()
