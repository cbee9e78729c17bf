"""The drawings of the deep dive on fusing; their look is in pictures.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from drawings import COLOUR
from matplotlib.patches import Rectangle
from pictures import GREY, INK, PALE, WRONG, X, Y

WAYS = {  # kernel: what it reads, what it writes: (name, bytes a value, colour)
    "current": (
        ("norm", [("x", 2, X)], [("y", 2, Y)]),
        ("amax", [("y", 2, Y)], []),
        ("cast, transpose", [("y", 2, Y)], [("q", 1, Y), ("qᵀ", 1, Y)]),
    ),
    "delayed": (
        ("norm", [("x", 2, X)], [("y", 2, Y)]),
        ("cast, transpose, amax", [("y", 2, Y)], [("q", 1, Y), ("qᵀ", 1, Y)]),
    ),
    "fused": (("norm, cast, transpose, amax", [("x", 2, X)], [("q", 1, Y), ("qᵀ", 1, Y)]),),
}
TITLES = {
    "current": "current scaling: the scale is this tensor's own",
    "delayed": "delayed scaling, two kernels",
    "fused": "delayed scaling, fused",
}


def ways() -> dict[str, float]:
    """Three ways from a norm to codes, by their kernels; the bytes a value of each."""
    found = {}
    _, panels = plt.subplots(1, 3, figsize=(8.5, 2.7), width_ratios=[3, 2.2, 1.5])
    for axes, (way, kernels) in zip(panels, WAYS.items(), strict=True):
        place = 0.0
        for name, reads, writes in kernels:
            wide = max(2.6, 0.16 * len(name))
            axes.add_patch(Rectangle((place, 1.05), wide, 0.9, fc=PALE, ec=GREY))
            axes.text(
                place + wide / 2, 1.5, name.replace(", ", ",\n"), ha="center", va="center", size=8, linespacing=0.95
            )
            for tensors, height in ((reads, 2.1), (writes, 0.3)):
                left = place + (wide - sum(size for _, size, _ in tensors)) / 2
                for text, size, colour in tensors:
                    axes.add_patch(Rectangle((left, height), size, 0.6, fc=colour, ec="white", lw=1.5))
                    axes.text(left + size / 2, height + 0.3, text, ha="center", va="center", size=9)
                    left += size
            place += wide + 0.5
        total = sum(size for _, reads, writes in kernels for _, size, _ in reads + writes)
        found[way] = float(total)
        axes.set_title(f"{TITLES[way]}\n{total} bytes a value", size=9)
        axes.set(xlim=(-0.2, place - 0.2), ylim=(0.1, 2.9))
        axes.axis("off")
    return found


def impatient(amax_so_far: Sequence[float], wrong: Sequence[float], delayed: int) -> None:
    """The amax of the rows so far, and the share of wrong codes in each block of rows."""
    _, (top, bottom) = plt.subplots(2, 1, figsize=(8.5, 3.2), sharex=True)
    places = range(len(wrong))
    top.step(places, amax_so_far, where="mid", color=Y, label="amax of the rows so far")
    top.axhline(amax_so_far[-1], color=INK, lw=1, ls="--", label="amax of the tensor")
    top.set(ylabel="amax of y", ylim=(0, 1.15 * amax_so_far[-1]))
    top.legend(loc="lower right", ncols=2)
    bottom.bar(places, [100 * share for share in wrong], color=WRONG)
    bottom.set(xlabel="block of rows, in the order of time", ylabel="wrong codes, %", ylim=(0, 100))
    bottom.set(xlim=(-0.6, len(wrong) - 0.4))
    bottom.text(len(wrong) - 0.6, 75, f"delayed scaling: {delayed} wrong codes in every block", ha="right")


def _draw(axes: plt.Axes, row: int, kernels: Sequence[Any], height: float = 0.7) -> None:
    for what, colour in COLOUR.items():
        bars = [(at / 1e3, us / 1e3) for _, at, us, category in kernels if category == what]
        label = what if row == 0 else None
        axes.broken_barh(bars, (row - height / 2, height), color=colour, ec="white", lw=0.0, label=label)


def timelines(variants: Mapping[str, Any], span: Mapping[str, float]) -> None:
    """Every kernel of a training step, from left to right; a line for each way to build the layer."""
    _, axes = plt.subplots(figsize=(8.5, 3.3))
    for row, (name, one) in enumerate(variants.items()):
        _draw(axes, row, one["kernels"])
        text = f" {span[name] / 1e3:.2f} ms, {len(one['kernels'])} kernels"
        axes.text(span[name] / 1e3, row, text, va="center", size=8)
    labels = [
        name.replace(", te.", ",\nte.").replace(", Lay", ",\nLay").replace(", att", ",\natt") for name in variants
    ]
    axes.set_yticks(range(len(variants)), labels, size=8, color=INK)
    axes.invert_yaxis()
    axes.set(xlabel="ms on the GPU", xlim=(0, 1.22 * max(span.values()) / 1e3))
    axes.legend(loc="lower right", fontsize=8, ncols=2)


def predicted_and_measured(predicted: Mapping[str, float], measured: Mapping[str, float]) -> None:
    """Microseconds that each fusion saves."""
    _, axes = plt.subplots(figsize=(8.5, 2.7))
    rows = range(len(predicted))
    axes.barh(
        [row - 0.19 for row in rows], predicted.values(), 0.36, color=GREY, label="predicted: bytes / a copy's speed"
    )
    axes.barh([row + 0.19 for row in rows], measured.values(), 0.36, color=INK, label="measured in the traces")
    axes.set_yticks(rows, predicted, color=INK)
    axes.invert_yaxis()
    axes.set(xlabel="µs saved in one step", xlim=(0, 1.3 * max(measured.values())))
    axes.legend(loc="lower right")
