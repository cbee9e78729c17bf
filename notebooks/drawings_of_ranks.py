"""The drawings of deep dive 17: orders of a sum over ranks, the chain, and bytes; their look is in pictures.py."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle
from pictures import GREY, INK, LABEL, PALE, WRONG, Y

from reference.parallel.gradient_tree import Nodes, nodes, owned, push
from reference.support.palette import DARK_BLUE, DARK_GREEN, YELLOW

RANK = (DARK_BLUE, YELLOW, DARK_GREEN, GREY)  # a rank is no tensor
ON_RANK = ("white", INK, "white", INK)  # text on it
Place = tuple[float, float]


def apart(shares: Mapping[str, Sequence[float]]) -> None:
    """The share of weights whose words are not those of one process, after each step."""
    _, axes = plt.subplots(figsize=(8.5, 2.6))
    for (name, values), style in zip(shares.items(), ("-", "--", ":"), strict=True):
        axes.plot(range(1, len(values) + 1), [100 * one for one in values], ls=style, color=WRONG, label=name)
    axes.axhline(0, color=INK, lw=1, label="one process")
    axes.set(xlabel="training step", ylabel="other words, %", ylim=(-1, None))
    axes.legend(loc="lower right")


def _line(axes: plt.Axes, a: Place, b: Place) -> None:
    axes.plot((a[0], b[0]), (a[1], b[1]), color=LABEL, lw=1, zorder=1)


def _dot(axes: plt.Axes, at: Place, colour: str) -> None:
    axes.scatter(*at, s=90, color=colour, edgecolor=INK, lw=0.8, zorder=3)


def _leaves(axes: plt.Axes, groups: int, ranks: int) -> list[int]:
    """The microbatches along the bottom, under each its number; which rank has each."""
    of = [rank for rank in range(ranks) for _ in owned(groups, ranks, rank)]
    for leaf, rank in enumerate(of):
        axes.add_patch(Rectangle((leaf - 0.36, -0.36), 0.72, 0.62, fc=RANK[rank], ec="white"))
        axes.text(leaf, -0.06, leaf, ha="center", va="center", color=ON_RANK[rank], size=9)
    for rank in range(ranks):
        mine = owned(groups, ranks, rank)
        axes.text((mine.start + mine.stop - 1) / 2, -0.75, f"rank {rank}", ha="center", va="center", size=8)
    return of


def orders(ranks: int, groups: int = 8) -> None:
    """Who adds what: each rank its own and then the library, or one tree for any number of ranks."""
    _, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2))
    _leaves(left, groups, ranks)
    tops: list[tuple[Place, int]] = []
    for rank in range(ranks):
        mine = owned(groups, ranks, rank)
        at: Place = (mine.start, 0.26)
        for height, leaf in enumerate(mine[1:], 1):
            new = (leaf - 0.5, 0.45 * height + 0.3)
            _line(left, at, new)
            _line(left, (leaf, 0.26), new)
            _dot(left, new, RANK[rank])
            at = new
        tops.append((at, rank))
    if ranks > 1:
        left.add_patch(Rectangle((-0.4, 3.6), groups - 0.2, 0.62, fc=PALE, ec=WRONG, lw=1.5))
        left.text((groups - 1) / 2, 3.91, "all-reduce: in the library's order", ha="center", va="center", size=9)
        for top, _ in tops:
            _line(left, top, (top[0], 3.6))
    left.set_title(f"usual, {ranks} rank{'s' * (ranks > 1)}")

    of = _leaves(right, groups, ranks)
    travel = {one for rank in range(ranks) for one in nodes(groups, owned(groups, ranks, rank))} if ranks > 1 else set()
    found: Nodes[tuple[Place, range]] = []

    def add(a: tuple[Place, range], b: tuple[Place, range]) -> tuple[Place, range]:
        which = range(a[1].start, b[1].stop)
        new = ((a[0][0] + b[0][0]) / 2, max(a[0][1], b[0][1], 0.3) + 1.1)
        _line(right, a[0], new)
        _line(right, b[0], new)
        owners = {of[one] for one in which}
        _dot(right, new, RANK[owners.pop()] if len(owners) == 1 else "white")
        if which in travel:
            right.scatter(*new, s=260, facecolor="none", edgecolor=WRONG, lw=1.5, zorder=4)
        return new, which

    for leaf in range(groups):
        one = range(leaf, leaf + 1)
        if one in travel:
            right.add_patch(Rectangle((leaf - 0.43, -0.43), 0.86, 0.76, fc="none", ec=WRONG, lw=1.5))
        push(found, one, ((float(leaf), 0.26), one), groups, add)
    right.set_title(f"the tree, {ranks} rank{'s' * (ranks > 1)} (red: travels)" if ranks > 1 else "the tree, 1 rank")
    for axes in (left, right):
        axes.set(xlim=(-0.7, groups - 0.3), ylim=(-1.1, 4.5))
        axes.axis("off")


def chain(ranks: int, bands: int) -> float:
    """When each rank computes each band of rows of the output; returns when the last ends, in works of one rank."""
    _, axes = plt.subplots(figsize=(8.5, 0.6 + 0.5 * ranks))
    width = 1 / bands
    for rank in range(ranks):
        for band in range(bands):
            at = (rank + band) * width
            axes.add_patch(Rectangle((at, rank - 0.36), width, 0.72, fc=RANK[rank], ec="white"))
            axes.text(at + width / 2, rank, band, ha="center", va="center", size=8, color=ON_RANK[rank])
            if rank + 1 < ranks:
                a, b = (at + width, rank + 0.2), (at + width, rank + 0.72)
                axes.add_patch(FancyArrowPatch(a, b, arrowstyle="-|>", mutation_scale=8, color=WRONG, zorder=3))
    end = (ranks + bands - 1) * width
    axes.set_yticks(range(ranks), [f"rank {rank}, part {rank} of K" for rank in range(ranks)], color=INK)
    axes.set(xlim=(0, max(end, 1.6) + 0.02), ylim=(ranks - 0.4, -0.6))
    axes.set_xlabel("time, in works of one rank (numbers: bands of rows; red: accumulators travel)")
    return end


def costs(bars: Mapping[str, Mapping[int, float]]) -> None:
    """Bytes that a rank sends for each number of the gradient; a group of bars for each number of ranks."""
    _, axes = plt.subplots(figsize=(8.5, 2.8))
    colours = (GREY, Y, DARK_BLUE)
    for place, ((name, values), colour) in enumerate(zip(bars.items(), colours, strict=True)):
        where = [ranks + 0.26 * (place - 1) for ranks in values]
        shown = axes.bar(where, list(values.values()), 0.24, color=colour, label=name)
        axes.bar_label(shown, [f"{one:.2f}" for one in values.values()], size=8, padding=2)
    ticks = list(next(iter(bars.values())))
    axes.set_xticks(ticks, [f"{ranks} ranks" for ranks in ticks])
    highest = max(max(values.values()) for values in bars.values())
    axes.set(ylabel="bytes sent by a rank,\nfor each bf16 gradient", ylim=(0, 1.3 * highest))
    axes.legend(loc="upper left", ncols=3, fontsize=8)
