"""Draws docs/training.png: a GPT's losses in bf16 and FP8, and words of an H200 beside those that a CPU computes.

    python -m optimized.bench.models.training_plot

It reads docs/results/seeds.json and a recorded GEMM, and needs no GPU.
"""

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from optimized import measure
from optimized.bench import bits
from optimized.bench.models import seeds
from optimized.bench.plots import drawing
from optimized.recordings import products
from reference.numbers import formats

INK, QUIET, WRONG = "#222222", "#666666", "#C00000"
WORDS = 5  # of the row


def curves(axes: Axes, payload: dict[str, Any]) -> None:
    """Draw the losses in bits per byte: bf16 and each recipe of FP8, the mean over seeds and a band around it."""
    few = max(1, payload["settings"]["steps"] // 50)
    for precision, of in seeds.by_precision(payload):
        losses = bits(seeds.curve(of, precision, few))
        seeds.band(axes, few * (np.arange(losses.shape[1]) + 0.5), losses, precision)
    axes.lines[0].set_linewidth(4)  # bf16, which would be hidden below the others
    axes.set_yscale("log")
    axes.set_xlabel("training step", fontsize=12)
    axes.set_ylabel("bits per byte", fontsize=12)
    axes.tick_params(labelsize=11)
    count = len({run["seed"] for run in payload["runs"]})
    axes.set_title(f"A GPT of 124 million parameters; bands: {count} seeds", fontsize=13)
    ticks = (1, 1.5, 2, 3, 4, 6, 8)
    axes.set_yticks(ticks, labels=map(str, ticks))
    axes.minorticks_off()
    axes.legend(loc="upper right", fontsize=12)


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
    axes.set_title("Words of an FP8 GEMM", fontsize=13)
    for line, (name, row, colour) in enumerate(rows):
        height = 0.78 - 0.34 * line
        axes.text(0.0, height + 0.14, name, color=QUIET, fontsize=13, va="center")
        for place, (word, true) in enumerate(zip(_hex(row), _hex(product.out[0, :WORDS]), strict=True)):
            shade, weight = (colour, "normal") if word == true else (WRONG, "bold")
            x = place / WORDS
            axes.text(x, height, word, color=shade, weight=weight, fontsize=13, family="monospace", va="center")


def _hex(row: torch.Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08X}" for word in row.float().contiguous().view(torch.int32).tolist()]


def main() -> None:
    """Draw both pictures, one above the other, so that a phone shows them large."""
    with drawing("training", 2, 1, (7, 6), height_ratios=[1.6, 1]) as (_, (above, below)):
        curves(above, measure.read_result("seeds"))
        words(below)


if __name__ == "__main__":
    main()
