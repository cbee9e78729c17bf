"""Draws docs/training.png: a GPT's losses in bf16 and in FP8, and words of an H200 beside those that a CPU computes.

    python -m optimized.bench.models.training_plot

It reads docs/results/training.json and a recorded GEMM, and needs no GPU.
"""

import math
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from optimized import measure
from optimized.bench.plots import drawing
from optimized.recordings import products
from reference.numbers import formats

INK, QUIET, BF16, FP8, WRONG = "#222222", "#777777", "#0072B2", "#D55E00", "#C00000"
WORDS, WINDOW = 6, 50  # words of the row that are shown; steps that a point of a curve is the mean of


def curves(axes: Axes, runs: list[dict[str, Any]]) -> None:
    """Draw the losses of both runs in bits per byte: lines in training, dots on held-out text."""
    for run, colour, width in zip(runs, (BF16, FP8), (3.5, 1.2), strict=True):
        bits = np.array(run["train"]) / math.log(2)
        means = np.convolve(bits, np.ones(WINDOW) / WINDOW, mode="valid")
        axes.plot(np.arange(len(means)) + WINDOW, means, color=colour, linewidth=width, label=run["precision"])
        steps, losses = zip(*run["validation"], strict=True)
        size = 22 if run is runs[0] else 7
        axes.scatter(steps, np.array(losses) / math.log(2), color=colour, s=size, zorder=3)
    axes.set(xlabel="training step", ylabel="bits per byte", title="A GPT trained in FP8 learns as in bf16")
    axes.legend(frameon=False, title="dots: text it has not seen", loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)


def words(axes: Axes) -> None:
    """Write the first words of a row of a recorded FP8 GEMM: the H200's, this CPU's, and an ordinary sum's."""
    product = next(one for one in products() if one.k == 16384)
    ordinary = formats.decode(product.a[:1]) @ formats.decode(product.b[:WORDS]).t()
    rows = (
        ("an H200 computed", product.out[0, :WORDS], INK),
        ("this CPU computes", product.predict()[0, :WORDS], INK),
        ("a sum in fp32 gives", ordinary[0], INK),
    )
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_title(f"One row of an FP8 GEMM, {product.title.split(', ', 1)[1]}")
    for line, (name, row, colour) in enumerate(rows):
        height = 0.78 - 0.34 * line
        axes.text(0.0, height + 0.1, name, color=QUIET, fontsize=10, va="center")
        for place, (word, true) in enumerate(zip(_hex(row), _hex(product.out[0, :WORDS]), strict=True)):
            shade, weight = (colour, "normal") if word == true else (WRONG, "bold")
            x = place / WORDS
            axes.text(x, height, word, color=shade, weight=weight, fontsize=10.5, family="monospace", va="center")


def _hex(row: torch.Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08X}" for word in row.float().contiguous().view(torch.int32).tolist()]


def main() -> None:
    """Draw both pictures side by side."""
    with drawing("training", 1, 2, (11, 3.6), width_ratios=[1, 1.15]) as (_, (left, right)):
        curves(left, measure.read_result("training")["runs"])
        words(right)


if __name__ == "__main__":
    main()
