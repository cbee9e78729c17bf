"""The drawings of the deep dive on inference; their look is in pictures.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from pictures import GREY, INK, PALE, WRONG, W, X, Y


def eight_and_integers(rows: Sequence[Any], powers: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """SQNR of each tensor in FP8 and INT8, and of a product of which one channel grows."""
    _, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.1), width_ratios=[1, 1.1])
    for place, (role, colour) in enumerate((("weight", W), ("input", X))):
        found = np.array([row[2:] for row in rows if row[1] == role])
        for side, column in enumerate((0, 1)):
            across = side + 0.16 * (2 * place - 1) + np.linspace(-0.1, 0.1, len(found))
            left.plot(across, found[:, column], "o", color=colour, markersize=4, label=None if side else role)
    left.set(title="SQNR of each tensor, dB", xlim=(-0.5, 1.5), ylim=(0, None))
    left.set_xticks([0, 1], ["FP8", "INT8"])
    left.legend(fontsize=8, loc="lower left")
    for (label, errors), colour in zip(curves.items(), (INK, WRONG), strict=True):
        right.plot(powers, errors, "o-", color=colour, markersize=4, label=label)
    right.set(xlabel="k: a channel of x times 2ᵏ, its weights times 2⁻ᵏ", title="SQNR of the product x wᵀ, dB")
    right.set_xticks(powers)
    right.legend(fontsize=8)


def cache(rows: Mapping[str, Sequence[int]], operations: Mapping[str, Sequence[int]], tokens: int, prefix: int) -> None:
    """The rows that go through the layers in each forward, without a cache and with one, and their operations."""
    _, panels = plt.subplots(1, 3, figsize=(8.5, 3.2), width_ratios=[1, 1, 1.15])
    for panel, (title, computed) in zip(panels, rows.items(), strict=False):
        grid = np.zeros((len(computed), tokens))
        for i, count in enumerate(computed):
            grid[i, : prefix + i] = 1
            grid[i, prefix + i - count : prefix + i] = 2
        panel.imshow(
            grid, cmap=ListedColormap(["white", PALE, X]), vmin=0, vmax=2, aspect="auto", interpolation="nearest"
        )
        panel.set(xlabel="byte of the text", title=f"{title}: {sum(computed):,} rows")
    panels[0].set_ylabel("forward")
    for label, colour, found in zip(operations, (GREY, X), operations.values(), strict=True):
        panels[2].plot(np.cumsum(found) / 1e6, color=colour, label=label)
    panels[2].set(xlabel="forward", title="operations so far, millions", ylim=(0, None))
    panels[2].legend(fontsize=8)


def decoding(rows: Sequence[Any], batches: Sequence[int]) -> None:
    """Milliseconds of a step of one token, by batch."""
    _, panels = plt.subplots(1, len(batches), figsize=(8.5, 2.6), sharey=True)
    for panel, size in zip(panels, batches, strict=True):
        found = [(row["name"], row["ms"]["median"]) for row in rows if row["batch"] == size]
        names, times = zip(*found, strict=True)
        panel.barh(names, times, color=[X if "FP8" in name else Y if "Twin" in name else GREY for name in names])
        panel.set(xlabel="ms a step", title=f"batch {size}")
    panels[0].invert_yaxis()
