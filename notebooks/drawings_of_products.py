"""The drawings of deep dives 12 and 14: the ladder of products, and attention's order; their look is in pictures.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle
from pictures import GREY, INK, LABEL, PALE, WRONG, W, X, Y

NEW = (
    "threads copy, then multiply",
    "the copy engine (TMA) copies",
    "a ring of four k-blocks",
    "a tile of four times the size",
    "one block walks over many tiles",
    "16-byte stores, not 4-byte",
    "two blocks share w",
    "stores during the next tile",
)


def _arrow(axes: plt.Axes, a: Any, b: Any, colour: str, width: float = 1.5) -> None:
    axes.add_patch(FancyArrowPatch(a, b, arrowstyle="-|>", mutation_scale=9, color=colour, lw=width))


def _draw(axes: plt.Axes, rung: Any, new: str) -> None:
    """One multiprocessor: L2, the ring in shared memory, the tile, and the way out."""
    axes.add_patch(Rectangle((0, 0), 0.7, 4, fc=PALE))
    axes.text(0.35, 2, "L2", ha="center", va="center", rotation=90)
    for part, colour, y in ((rung.block_m, X, 2.9), (rung.block_n, W, 1.5)):
        for stage in range(rung.stages):
            axes.add_patch(Rectangle((2.9 + 0.5 * stage, y - part / 512), 0.42, part / 256, fc=colour, ec="white"))
        if rung.copy_engine:
            _arrow(axes, (0.75, y), (2.85, y), colour)
        else:
            axes.add_patch(Rectangle((1.35, y - 0.3), 0.85, 0.6, fc=GREY))
            axes.text(1.77, y, "threads", ha="center", va="center", size=7)
            _arrow(axes, (0.75, y), (1.33, y), colour)
            _arrow(axes, (2.22, y), (2.85, y), colour)
    if rung.cluster == 2:
        axes.text(1.8, 0.85, "half from\nthe neighbour", ha="center", va="center", size=7)
    _arrow(axes, (5.0, 2.2), (5.5, 2.2), INK)
    axes.text(3.8, 0.3, "shared memory", ha="center", va="center", size=7, color=LABEL)
    axes.text(6.6, 0.3, "tensor cores", ha="center", va="center", size=7, color=LABEL)
    wide, high = rung.block_n / 100, rung.block_m / 50
    for shift in (0.18, 0.0) if rung.persistent else (0.0,):
        axes.add_patch(Rectangle((5.6 + shift, 2.2 - high / 2 - shift), wide, high, fc=Y, ec="white", lw=1.2))
    axes.text(5.6 + wide / 2, 2.2, f"{rung.block_m}×{rung.block_n}", ha="center", va="center", size=8)
    start = 8.35 if rung.block_n == 256 else 6.95
    _arrow(axes, (start, 2.2), (8.95, 2.2), Y, 4 if rung.permuted else 1.2)
    if rung.name.startswith("8"):
        axes.text(8.7, 0.3, "the tile before", ha="center", va="center", size=7)
    axes.add_patch(Rectangle((9, 0.7), 0.7, 3, fc=PALE))
    axes.text(9.35, 2.2, "y", ha="center", va="center")
    axes.set_title(f"{rung.name[0]}  {new}", weight="bold", size=9)
    axes.set(xlim=(-0.1, 9.8), ylim=(-0.1, 4.1))
    axes.axis("off")


def rungs(rungs: Sequence[Any]) -> None:
    """How data moves at each rung, and what is new at it."""
    _, panels = plt.subplots(4, 2, figsize=(8.5, 7.2))
    for axes, rung, new in zip(panels.flat, rungs, NEW, strict=True):
        _draw(axes, rung, new)


def bytes_needed(rungs: Sequence[Any], needs: Callable[[Any], float], low: float, high: float) -> None:
    """What each rung asks of L2, beside what L2 delivers."""
    _, axes = plt.subplots(figsize=(8.5, 2.6))
    colours = [WRONG if needs(rung) > high else GREY for rung in rungs]
    axes.bar(range(8), [needs(rung) for rung in rungs], color=colours)
    axes.axhspan(low, high, color=X, alpha=0.4, zorder=0)
    axes.text(7.45, high + 3, "what L2 delivers", ha="right")
    axes.set_xticks(range(8), [rung.name.replace("_", "\n", 1).replace("_", " ") for rung in rungs], size=8)
    axes.set(ylabel="bytes a cycle needed")


def waves(waves: Any, wave_bytes: Any, orders: Sequence[Any], m: int, n: int, k: int) -> None:
    """The first wave of tiles in two orders, and what it needs of x and w."""
    _, panels = plt.subplots(1, 2, figsize=(8.5, 2.4))
    for axes, (name, order) in zip(panels, zip(("4: row by row", "5: in bands"), orders, strict=True), strict=True):
        wave = waves(order, m, n)[0]
        tiles_m, tiles_n = m // 128, n // 256
        axes.add_patch(Rectangle((0, 0), tiles_n, tiles_m, fc=PALE))
        for i, j in wave:
            axes.add_patch(Rectangle((j, i), 1, 1, fc=Y))
        for i in {i for i, _ in wave}:
            axes.add_patch(Rectangle((-5, i), 4, 1, fc=X))
        for j in {j for _, j in wave}:
            axes.add_patch(Rectangle((j, -3), 1, 2, fc=W))
        axes.text(-3, 12, "x", ha="center")
        axes.text(8, -3.5, "w", ha="center")
        axes.text(32, 14, f"the first rows of y's {tiles_m} × {tiles_n} tiles", ha="center", color=LABEL)
        axes.set(xlim=(-5.5, tiles_n + 0.5), ylim=(18, -5.5))
        axes.set_title(f"{name}: a wave reads {wave_bytes(wave, k) / 1e6:.0f} MB", weight="bold")
        axes.axis("off")


def stores(plain: Any, permuted: Any) -> None:
    """The columns that a warp's first store writes, before and after the permutation."""
    _, panels = plt.subplots(1, 2, figsize=(8.5, 2.3))
    for axes, (name, owned) in zip(panels, (("1 to 5", plain), ("6 to 8", permuted)), strict=True):
        first = {(lane // 4, c): lane for lane in range(32) for c in owned(lane)[0]}
        sectors = {(row, c // 16) for row, c in first}  # 16 columns of bf16 are 32 bytes
        full = sum(all((row, 16 * s + c) in first for c in range(16)) for row, s in sectors)
        for row in range(8):
            for c in range(32):
                axes.add_patch(Rectangle((c, row), 0.92, 0.92, fc=Y if (row, c) in first else PALE))
        for s in range(3):
            axes.axvline(16 * s - 0.04, color=INK, linewidth=1)
        title = f"rungs {name}: {len(owned(0))} store(s), {full} of {len(sectors)} sectors whole"
        axes.set(xlim=(-0.2, 32.2), ylim=(8.1, -0.2), xlabel="column (lines: sectors)", ylabel="row", title=title)
        axes.set(yticks=[], xticks=[0, 16, 32])


def expected_and_came(rungs: Sequence[Any], shapes: Any, tflops: Mapping[Any, float]) -> None:
    """TFLOP/s of each rung, beside what was expected and cuBLASLt."""
    names = [rung.name for rung in rungs]
    _, axes = plt.subplots(figsize=(8.5, 3.4))
    for side, (shape, hatch) in enumerate(zip(shapes, ("", "///"), strict=True)):
        places = [i + 0.4 * (side - 0.5) for i in range(len(names))]
        axes.bar(places, [tflops[name, shape] for name in names], 0.38, color=Y, hatch=hatch, ec="white", label=shape)
        library = tflops["cuBLASLt, first", shape]
        axes.axhline(library, color=LABEL, ls="-" if side == 0 else "--", lw=1, label=f"cuBLASLt, {shape}")
    spans = np.array([rung.expected for rung in rungs])
    middle, half = spans.mean(1), (spans[:, 1] - spans[:, 0]) / 2
    axes.errorbar(np.arange(8) - 0.42, middle, half, fmt="none", ecolor=INK, capsize=3, label="expected, fc1.fprop")
    axes.set_xticks(range(8), [name.replace("_", "\n", 1).replace("_", " ") for name in names], size=8)
    axes.set(ylabel="TFLOP/s", ylim=(0, 2050))
    axes.legend(ncols=3, loc="upper left", fontsize=8)
