"""The drawings of lessons 4 and 5 and of the deep dives; their look is in pictures.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle
from pictures import GRAD, GREY, INK, LABEL, PALE, WRONG, W, X, Y

COLOUR = {  # of a category of ops: none of them is a tensor
    "GEMM": PALE,
    "attention": GREY,
    "norm": "#f0e442",
    "activation": "#0072b2",
    "cast": WRONG,
    "other": INK,
}


def decibels(bars: Mapping[str, float]) -> None:
    """Lesson 4: the SQNR of y, dx and dw."""
    _, axes = plt.subplots(figsize=(6, 2.2))
    shown = axes.barh(range(3), [min(value, 50) for value in bars.values()], color=(Y, GRAD, W), height=0.6)
    axes.bar_label(shown, ["exact" if value > 100 else f"{value:.1f} dB" for value in bars.values()], padding=4)
    axes.set_yticks(range(3), bars)
    axes.invert_yaxis()
    axes.set(xlabel="SQNR, dB: how much of each result is left", xlim=(0, 60))


def three_products() -> None:
    """Lesson 4: what each product of a linear layer reads, and along which side it sums."""
    _, panels = plt.subplots(1, 3, figsize=(8.5, 2.3))
    sizes = {"tokens": 1.5, "inputs": 1.0, "outputs": 1.9}
    products = (
        ("forward: y = x wᵀ", ("x", X, "tokens", "inputs"), ("w", W, "outputs", "inputs")),
        ("backward: dx = g w", ("g", GRAD, "tokens", "outputs"), ("wᵀ", W, "inputs", "outputs")),
        ("backward: dw = gᵀ x", ("gᵀ", GRAD, "outputs", "tokens"), ("xᵀ", X, "inputs", "tokens")),
    )
    for axes, (title, *operands) in zip(panels, products, strict=True):
        left = 0.0
        for name, colour, rows, columns in operands:
            high, wide = sizes[rows], sizes[columns]
            axes.add_patch(Rectangle((left, 0), wide, high, fc=colour, ec="white"))
            axes.text(left + wide / 2, high / 2, name, ha="center", va="center", color="white", weight="bold")
            axes.annotate("", (left + wide, -0.22), (left, -0.22), arrowprops={"arrowstyle": "->", "color": INK})
            axes.text(left + wide / 2, -0.35, columns, ha="center", va="top", size=8)
            axes.text(left - 0.08, high / 2, rows, ha="right", va="center", rotation=90, size=8, color=LABEL)
            left += wide + 0.75
        axes.set_title(title, size=10)
        axes.set(xlim=(-0.5, 4.8), ylim=(-0.8, 2.0))
        axes.axis("off")


def traffic(gigabytes: Mapping[str, Mapping[str, float]]) -> None:
    """Lessons 4 and 15: the GB of a training step by category, a bar for each way to build the layer."""
    _, axes = plt.subplots(figsize=(8.5, 0.75 + 0.38 * len(gigabytes)))
    for row, parts in enumerate(gigabytes.values()):
        left = 0.0
        for what, colour in COLOUR.items():
            axes.barh(row, parts[what], left=left, color=colour, ec="white", lw=0.8, label=None if row else what)
            left += parts[what]
        axes.text(left + 0.1, row, f"{left:.1f}", va="center", size=9)
    axes.set_yticks(range(len(gigabytes)), gigabytes, color=INK)
    axes.invert_yaxis()
    axes.set(xlabel="GB moved in one training step", xlim=(0, 13.5))
    axes.legend(loc="center right", fontsize=7.5)


def differing_words(runs: Mapping[str, Sequence[int]], weights: int) -> None:
    """Lesson 5: how many words of the weights differ after each step."""
    _, axes = plt.subplots(figsize=(8.5, 2.6))
    for colour, (label, counts) in zip((WRONG, X, Y, W, GRAD), runs.items(), strict=False):
        axes.plot(range(1, len(counts) + 1), counts, "o-", color=colour, label=label, markersize=5, linewidth=1.8)
    axes.axhline(weights, color=GREY, linewidth=1, linestyle="--")
    axes.text(1, 1.4 * weights, "all weights", color=LABEL, size=8, va="bottom")
    axes.set_yscale("symlog", linthresh=1, linscale=0.4)
    axes.set(xlabel="step", ylabel="words that differ", ylim=(-0.3, 9e6), yticks=(0, 1, 1e2, 1e4, 1e6))
    axes.set_yticklabels(("0", "1", "100", "10⁴", "10⁶"))
    axes.minorticks_off()
    axes.legend(fontsize=9, loc="center right")


def bits_of_a_word(bit: int) -> None:
    """Lesson 5: an fp32 word, which of its bits bf16 and E4M3 keep, and the one that flips."""
    _, axes = plt.subplots(figsize=(8.5, 1.1))
    for one in range(32):
        axes.add_patch(Rectangle((31 - one, 0), 0.92, 1, fc=WRONG if one == bit else PALE if one < 23 else GREY))
        text = {"ha": "center", "va": "center", "size": 8, "color": "white" if one == bit else INK}
        axes.text(31 - one + 0.46, 0.5, str(one), **text)
    parts = ((0, 1, "sign"), (1, 9, "exponent"), (9, 12, "in E4M3"), (12, 16, "in bf16"), (16, 32, "in fp32 only"))
    for left, right, name in parts:
        axes.plot((left + 0.1, right - 0.2), (1.2, 1.2), color=LABEL, linewidth=1)
        axes.text((left + right) / 2, 1.35, name, ha="center", va="bottom", size=8, color=LABEL)
    axes.set(xlim=(-0.3, 32.3), ylim=(-0.1, 2.1))
    axes.axis("off")


def outliers(size: torch.Tensor) -> None:
    """Which scale: the magnitudes of a gradient, tile by tile. `size` is [tokens, features]."""
    rows, cols = 4, 8  # 4 tokens: the same place in four texts
    tiles = size.square().view(size.shape[0] // rows, rows, -1, cols).mean((1, 3)).sqrt()
    features = size.shape[1]
    fig, axes = plt.subplots(figsize=(8.5, 2.9))
    look = {"cmap": "magma", "vmin": -16, "vmax": -2, "interpolation": "nearest"}
    shown = axes.imshow(torch.log2(tiles / size.max()).numpy(), aspect="auto", extent=(0, features, 64, 0), **look)
    axes.set(xlabel="features: q, k, v of each of the two heads", ylabel="place in the text", title="|g| / amax")
    axes.set_xticks(range(0, features + 1, 64))
    for place, name in enumerate("qkvqkv"):
        axes.text(64 * place + 32, 61, name, color="white", ha="center")
    axes.grid(visible=False)
    bar = fig.colorbar(shown, ax=axes)
    bar.set_ticks([-16, -9, -2], labels=["$2^{-16}$", "$2^{-9}$", "$2^{-2}$"])


def errors_by_size(edges: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """Which scale: the mean relative error of numbers of like size, a curve for each recipe."""
    looks = {
        "current, E5M2": (GRAD, "-"),
        "current, E4M3": (X, "-"),
        "block of 128": (Y, "-"),
        "MXFP8": (INK, "--"),
        "NVFP4, nearest": (W, "-"),
    }
    _, axes = plt.subplots(figsize=(8.5, 3.1))
    for name, curve in curves.items():
        colour, line = looks[name]
        at = [k + 0.5 for k in edges]
        axes.plot(at, curve, line, color=colour, linewidth=5 if name == "block of 128" else 2, label=name)
    axes.set(xlabel="how far below the amax: k, where |g| is about amax / 2ᵏ", ylabel="mean relative error, %")
    axes.set(yscale="log", xlim=(0, 21.5), ylim=(1.5, 115), xticks=range(0, 22, 3))
    axes.set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.legend(fontsize=9, loc="upper left")


def late_and_now(late: Sequence[float], now: Sequence[float]) -> None:
    """Which scale: the SQNR of each step's gradient with delayed and with current scaling."""
    _, axes = plt.subplots(figsize=(8.5, 2.4))
    axes.plot(now, color=GREY, linewidth=6, label="current scaling")
    axes.plot(late, color=GRAD, label="delayed scaling")
    axes.set(xlabel="step", ylabel="SQNR of g, dB", ylim=(0, 30), xlim=(-0.5, len(now)))
    axes.legend(fontsize=9, loc="lower right")


def recipes(losses: Mapping[str, Sequence[float]], ill: Mapping[str, Sequence[float]]) -> None:
    """Which scale: losses of each recipe, without and with an enormous channel."""
    colours = {
        "bf16": GREY,
        "delayed": GRAD,
        "current": X,
        "rowwise": "tab:brown",
        "block": Y,
        "mxfp8": INK,
        "nvfp4": W,
    }
    _, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.1), sharey=True)
    for axes, runs, title in ((left, losses, "as it is"), (right, ill, "with an enormous channel")):
        for name, colour in colours.items():
            look = {"color": colour, "linewidth": 6 if name == "bf16" else 1.6}
            axes.plot(runs[name], "--" if name == "mxfp8" else "-", **look)
        axes.set(xlabel="step", title=title, xlim=(0, len(losses["bf16"])), ylim=(0, 8.5))
    left.set_ylabel("loss, bits a byte")
    left.legend(colours, fontsize=8, ncols=2)


def what_casts_keep(summary: Sequence[Any], samples: Sequence[Any]) -> None:
    """Which layers: the SQNR of each linear map's tensors, and the most underflow in each step."""
    colours = {"input": X, "weight": W, "grad_output": GRAD}
    names = [
        f"{one.layer}.{one.part}".rstrip(".").replace("layers.", "").replace("self_attention.", "") for one in summary
    ]
    maps = list(dict.fromkeys(names))
    _, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2), width_ratios=[1.3, 1])
    for place, (role, colour) in enumerate(colours.items()):
        values = [one.sqnr for one in summary if one.role == role]
        at = [row + 0.25 * (place - 1) for row in range(len(maps))]
        left.barh(at, values, height=0.22, color=colour, label=role)
    left.set_yticks(range(len(maps)), maps, size=8)
    left.invert_yaxis()
    left.set(xlabel="SQNR, dB", title="what each cast keeps", xlim=(0, 52))
    left.legend(fontsize=8, loc="lower right")
    steps = sorted({one.step for one in samples})
    for role, colour in colours.items():
        worst = [max(one.underflowed_share for one in samples if (one.step, one.role) == (s, role)) for s in steps]
        right.plot(steps, [100 * share + 1e-4 for share in worst], "o-", color=colour, markersize=4)
    right.set(xlabel="step", title="the tensor with the most underflow, %", yscale="log", ylim=(1e-4, 200))
    right.axhline(5, color=LABEL, linewidth=1, linestyle="--")
    right.text(steps[-1], 6, "what auto_precision accepts", color=LABEL, size=8, ha="right", va="bottom")


def sabotage(found: Mapping[int, Any]) -> None:
    """Which layers: the SQNR and the underflow of the head's input, for larger and larger biases."""
    _, (left, right) = plt.subplots(1, 2, figsize=(8.5, 2.6))
    left.plot(list(found), [one.sqnr for one in found.values()], "o-", color=INK, markersize=4)
    left.set(xlabel="k: a bias of 2ᵏ", title="SQNR of the head's input, dB", ylim=(0, None))
    right.plot(list(found), [100 * one.underflowed_share for one in found.values()], "o-", color=WRONG, markersize=4)
    right.set(xlabel="k: a bias of 2ᵏ", title="its elements that become 0, %", ylim=(0, 105))


def losses(runs: Mapping[str, Sequence[float]]) -> None:
    """Losses by step: the first run is a wide grey line, the last is dashed."""
    looks = [(GREY, "-", 6), (X, "-", 2), (WRONG, "-", 2), (INK, "--", 2)]
    _, axes = plt.subplots(figsize=(8.5, 2.9))
    for (name, run), (colour, line, width) in zip(runs.items(), looks, strict=False):
        axes.plot(run, line, color=colour, linewidth=width, label=name)
    axes.set(xlabel="step", ylabel="loss, bits a byte", xlim=(0, len(next(iter(runs.values())))), ylim=(0, 8.5))
    axes.legend(fontsize=9)
