"""docs/gemm_roofline.png: products of many sizes under the roof that memory and the tensor cores make.

    python -m optimized.bench.gemm_roofline

Reads docs/results/gemm.json, gemm_sweep.json and cast_transpose.json (the copy); needs no GPU.
"""

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np

from optimized import measure
from optimized.bench.gemm_sweep import choice

PLOT = measure.ROOT / "docs" / "gemm_roofline.png"
OURS, THEIRS, INK = "#1b9e77", "#8a919c", "#222222"
# Operations of a multiprocessor's tensor cores in a cycle: a wgmma of 64 x 256 x 32 in FP8 (x 16 in 16 bits) takes 128.
FLOP_PER_CYCLE = {"fast": 8192, "split": 8192, "bf16": 4096}


def intensity(kind: str, m: int, n: int, k: int) -> float:
    """Operations per byte that must move: each operand once, and a 16-bit output."""
    return 2 * m * n * k / ((m + n) * k * (2 if kind == "bf16" else 1) + 2 * m * n)


def peak(kind: str, provenance: Mapping[str, Any]) -> float:
    """TFLOP/s of all tensor cores at the highest clock, which the power limit allows to none that is busy for long."""
    megahertz = float(provenance["nvidia_smi"]["clocks.max.sm"].split()[0])
    return FLOP_PER_CYCLE[kind] * provenance["gpu"]["processors"] * megahertz * 1e-6


def plot(results: Mapping[str, Mapping[str, Any]]) -> None:
    """A panel per kind: the sweep as dots (L2 flushed), the layer's products as stars, ours and cuBLASLt's."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sweep, layer = results["gemm_sweep"], results["gemm"]
    copy = results["cast_transpose"]["rows"][0]["copy_terabytes_per_second"]
    figure, panels = plt.subplots(1, 3, figsize=(12, 4.4), sharey=True, layout="constrained")
    for axes, kind in zip(panels, FLOP_PER_CYCLE, strict=True):
        top = peak(kind, layer["provenance"])
        xs = np.geomspace(1, 4000, 200)
        axes.plot(xs, np.minimum(copy * xs, top), color=INK, lw=1.2)
        axes.annotate(f"{copy:.1f} TB/s", (3, 3.4 * copy), rotation=38, fontsize=8, color=INK, ha="center")
        axes.annotate(f"{top:.0f} TFLOP/s", (4000, 1.12 * top), fontsize=8, color=INK, ha="right")
        rows = [row for row in sweep["rows"] if row["kind"] == kind]
        for side, colour in (("theirs", THEIRS), ("ours", OURS)):
            dots, stars = [], []
            for row in rows:
                ms = row["ms"]["theirs" if side == "theirs" else choice(row, sweep["processors"])["tile"]]
                size = (row["m"], row["n"], row["k"])
                dots.append((intensity(kind, *size), 2e-9 * np.prod(size, dtype=float) / ms))
            for row in (row for row in layer["rows"] if row["kind"] == kind):
                stars.append((intensity(kind, row["m"], row["n"], row["k"]), row["tflops"][side]))
            label = "ours" if side == "ours" else "cuBLASLt's, as torch calls it"
            axes.scatter(*zip(*dots, strict=True), s=7, color=colour, alpha=0.6, lw=0, label=label)
            axes.scatter(*zip(*stars, strict=True), s=42, marker="*", color=colour, edgecolor=INK, lw=0.3)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title({"fast": "FP8, fast", "split": "FP8, split", "bf16": "bf16"}[kind], fontsize=10)
        axes.set_xlabel("operations per byte that must move")
    panels[0].set_ylabel("TFLOP/s")
    panels[0].set_ylim(0.5, 3500)
    panels[0].legend(loc="lower right", fontsize=8, frameon=False)
    measure.write_plot(PLOT, figure)
    plt.close(figure)


if __name__ == "__main__":
    names = ("gemm", "gemm_sweep", "cast_transpose")
    plot({name: measure.read_result(name) for name in names})
