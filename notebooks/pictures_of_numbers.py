"""The drawings of lessons 1 to 3; their look is in pictures.py."""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle
from pictures import COLOUR, EXPONENT, GREY, INK, LABEL, MANTISSA, SIGN, WRONG, X, Y, sqnr

from reference import formats
from reference.numbers.formats import Format8


def code_of(number: float, fmt: Format8) -> int:
    """The code that a number is cast to, 0 to 255."""
    return int(formats.cast(torch.tensor(float(number)), fmt).view(torch.uint8))


def code(number: float = 0.35) -> None:
    """Lesson 1: a number's codes, bit by bit, and its neighbours on the number line."""
    _, panels = plt.subplots(2, 2, figsize=(8.5, 3.4), width_ratios=[1, 1.15])
    for (left, right), fmt in zip(panels, formats.FORMATS, strict=True):
        _bits(left, fmt, code_of(number, fmt))
        _neighbours(right, fmt, number)


def _bits(axes: plt.Axes, fmt: Format8, word: int) -> None:
    kinds = [SIGN] + [EXPONENT] * fmt.exponent_bits + [MANTISSA] * fmt.mantissa_bits
    for place, colour in enumerate(kinds):
        axes.add_patch(Rectangle((place, 0), 0.92, 0.9, facecolor=colour))
        axes.text(place + 0.46, 0.43, word >> (7 - place) & 1, ha="center", va="center", size=12)
    names = [("sign", 0.46), ("exponent", 1 + fmt.exponent_bits / 2), ("mantissa", 8 - fmt.mantissa_bits / 2)]
    for name, place in names:
        axes.text(place, 1.05, name, ha="center", size=8, color=LABEL)
    f = fmt.fields(word)
    sign, lead, exponent = "−" if f.sign else "", 1 if f.exponent else 0, max(f.exponent, 1)
    text = f"{sign}({lead} + {f.mantissa}/{1 << fmt.mantissa_bits}) · 2^({exponent} − {fmt.bias})"
    shown = f"{text} = {f.value:g}" if f.kind in ("normal", "subnormal", "zero") else f.kind
    axes.text(0, -0.5, shown, va="center", size=10)
    axes.set(xlim=(-0.1, 8.1), ylim=(-0.9, 1.8))
    axes.set_title(f"{fmt.name}, code 0x{word:02X}", size=10, weight="bold")
    axes.axis("off")


def _neighbours(axes: plt.Axes, fmt: Format8, number: float) -> None:
    values, got = np.array(sorted(fmt.values())), fmt.value(code_of(number, fmt))
    axes.axis("off")
    if not math.isfinite(got):
        return
    place = int(np.searchsorted(values, got))
    near = values[max(place - 4, 0) : place + 5]
    low, high = min(near[0], number), max(near[-1], number)
    axes.vlines(near, -0.3, 0.3, color=COLOUR[fmt.name], linewidth=2)
    for n, value in enumerate(near):
        if n % 2 == 0 or value == got:
            axes.text(value, -0.42, f"{value:.4g}", ha="center", va="top", size=8, color=LABEL)
    axes.plot([number], [0.75], "v", color=INK, markersize=7)
    axes.annotate("", (got, 0.32), (number, 0.7), arrowprops={"arrowstyle": "->", "color": INK})
    error = f", {abs(got - number) / abs(number):.1%} away" if number else ""
    axes.set_title(f"{number:g} becomes {got:g}{error}", size=10)
    edge = (high - low) * 0.06
    axes.set(xlim=(low - edge, high + edge), ylim=(-0.9, 1.0))


def number_lines() -> None:
    """Lesson 1: all positive values of both formats, near 0 and with powers of two at equal distances."""
    _, (near, far) = plt.subplots(2, 1, figsize=(8.5, 3.2))
    for row, fmt in enumerate(formats.FORMATS):
        values, colour = [v for v in fmt.values() if v > 0], COLOUR[fmt.name]
        near.vlines([0, *(v for v in values if v <= 2)], row - 0.32, row + 0.32, color=colour, linewidth=1)
        far.vlines(values, row - 0.32, row + 0.32, color=colour, linewidth=1)
        far.text(values[-1] * 1.5, row, f"{values[-1]:,.0f}", va="center", size=9)
        far.text(values[0] / 1.5, row, f"$2^{{{math.log2(values[0]):.0f}}}$", va="center", ha="right", size=9)
    near.set(xlim=(-0.01, 2.02))
    far.set_xscale("log", base=2)
    far.set(xlim=(2.0**-20, 2.0**19))
    for axes in (near, far):
        axes.set_yticks([0, 1], ["E4M3", "E5M2"])
        axes.set_ylim(1.6, -0.6)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)


def stairs(shown: Sequence[Format8] = formats.FORMATS) -> None:
    """Lesson 1: a cast as stairs, with its ties, and where it saturates."""
    _, (near, far) = plt.subplots(1, 2, figsize=(8.5, 3.0), width_ratios=[1.2, 1])
    x, wide = torch.linspace(0.9, 2.35, 4001), torch.logspace(-3, 18, 2001, base=2.0)
    for fmt in shown:
        colour = COLOUR[fmt.name]
        near.step(x, formats.decode(formats.cast(x, fmt)), color=colour, linewidth=1.6, label=fmt.name)
        values = torch.tensor([v for v in fmt.values() if 0.9 <= v <= 2.4])
        ties = (values[1:] + values[:-1]) / 2
        near.plot(ties, formats.decode(formats.cast(ties, fmt)), "o", color=colour, markersize=4)
        far.plot(wide, formats.decode(formats.cast(wide, fmt)), color=colour)
        far.axhline(fmt.largest, color=GREY, linewidth=0.8)
        far.text(0.13, fmt.largest * 1.3, f"{fmt.name} saturates at {fmt.largest:,.0f}", size=9)
    near.plot(x, x, color=GREY, linewidth=0.8)
    near.set(xlabel="x", ylabel="cast(x); dots are ties")
    near.legend()
    far.set(xlabel="x", xscale="log", yscale="log", ylim=(0.1, 4e5))


def through(x: torch.Tensor, fmt: Format8, scale: float | torch.Tensor) -> torch.Tensor:
    """x scaled, cast, and back."""
    return formats.decode(formats.cast(x * scale, fmt)) / scale


def range_of(x: torch.Tensor, fmt: Format8, scale: float) -> None:
    """Lesson 2: where the scaled magnitudes of x lie in a format's range, and what is lost."""
    size = (x * scale).abs()
    places = torch.log2(size[size > 0]).numpy()
    got = through(x, fmt, scale)
    zero, saturated = float((got == 0).float().mean()), float((size > fmt.largest).float().mean())
    _, axes = plt.subplots(figsize=(8.5, 2.6))
    least, normal, most = (
        math.log2(v) for v in (fmt.smallest_normal * 2.0**-fmt.mantissa_bits / 2, fmt.smallest_normal, fmt.largest)
    )
    counts, edges = np.histogram(places, np.arange(-40, 41, 0.5))
    inside = (edges[:-1] + 0.25 >= least) & (edges[:-1] + 0.25 <= most)
    colours = [COLOUR[fmt.name] if one else WRONG for one in inside]
    axes.bar(edges[:-1], counts / x.numel() * 100, width=0.46, align="edge", color=colours)
    axes.axvspan(least, normal, color=GREY, alpha=0.3, linewidth=0)
    for edge, name, side in ((least, "0 below", "right"), (most, f"{fmt.largest:,.0f}", "left")):
        axes.axvline(edge, color=INK, linewidth=1)
        axes.text(edge, 20.5, f" {name} ", ha=side, size=9, color=LABEL)
    axes.text((least + normal) / 2, 16.5, "sub-\nnormal", ha="center", size=8, color=LABEL)
    axes.set(xlim=(-34, 34), ylim=(0, 23), xlabel="log2 of the scaled magnitude", ylabel="% of the tensor")
    quality = sqnr(x, got)
    words = f"{zero:.1%} become 0, {saturated:.1%} saturate, SQNR {max(quality, 0):.1f} dB"
    axes.set_title(f"{fmt.name}, scale 2^{math.log2(scale):g}: {words}")


def plateaus(x: torch.Tensor, powers: Sequence[int]) -> dict[str, list[float]]:
    """Lesson 2: the SQNR of x with each power of two as scale, drawn; in dB, by format."""
    curves = {fmt.name: [sqnr(x, through(x, fmt, 2.0**p)) for p in powers] for fmt in formats.FORMATS}
    _, axes = plt.subplots(figsize=(8.5, 2.8))
    for fmt in formats.FORMATS:
        axes.plot(powers, curves[fmt.name], color=COLOUR[fmt.name], label=fmt.name)
        right = fmt.largest / float(x.abs().max())
        axes.plot([math.log2(right)], [sqnr(x, through(x, fmt, right))], "o", color=INK, zorder=3)
    axes.text(powers[0], 29, "too small:\nsubnormal, then 0", color=LABEL)
    axes.text(powers[-1], 15, "too large:\nsaturated", color=LABEL, ha="right")
    axes.set(xlabel="log2(scale); dots: largest value / amax", ylabel="SQNR, dB", ylim=(-2, 44))
    axes.legend(loc="upper left", ncols=2)
    return curves


def steps(amax: Sequence[float], room: Sequence[float], late: Sequence[float], now: Sequence[float]) -> None:
    """Lesson 2: amax and room of each step, and what each rule leaves of x."""
    _, (top, bottom) = plt.subplots(2, 1, figsize=(8.5, 4.0), sharex=True)
    places = range(len(amax))
    top.step(places, amax, where="mid", color=X, label="amax of x")
    top.step(places, room, "--", where="mid", color=INK, label="room: 448 / yesterday's scale")
    top.set(yscale="log", ylim=(0.8, 3000))
    top.legend(loc="upper right", ncols=2)
    bottom.plot(places, now, ".-", color=Y, label="today's scale", linewidth=4)
    bottom.plot(places, late, ".-", color=INK, label="yesterday's", linewidth=1.5)
    bottom.set(xlabel="step", ylabel="SQNR of the cast, dB", ylim=(0, 38))
    bottom.legend(loc="lower right", ncols=2)


def lost(shares: Mapping[str, float], title: str) -> None:
    """Lesson 2: which share of the ordinary numbers becomes 0, with one scale for each group."""
    _, axes = plt.subplots(figsize=(8.5, 2.1))
    shown = axes.barh(list(shares), [100 * value for value in shares.values()], color=WRONG, height=0.6)
    axes.bar_label(shown, [f"{value:.1%}" for value in shares.values()], padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="% of the ordinary numbers that become 0", xlim=(0, 112), title=title)
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def aligned(pairs: Sequence[tuple[float, float]], answer: float) -> None:
    """Lesson 3: the bits of each product, one below the other; below them the exact sum and the tensor core's."""
    products = [a * b for a, b in pairs]
    rows = [(f"{a:g} · {b:g}", number, Y) for (a, b), number in zip(pairs, products, strict=True)]
    rows += [("exact sum", math.fsum(products), GREY), ("tensor core", answer, INK)]
    top = max(math.frexp(number)[1] for _, number, _ in rows)
    _, axes = plt.subplots(figsize=(8.5, 0.9 + 0.24 * len(rows)))
    for y, (name, number, colour) in enumerate(rows):
        y += 0.5 * (y >= len(products))
        for bit in range(-6, top):
            if int(abs(number) * 2.0**6) >> (bit + 6) & 1:
                hatch = "////" if number < 0 else None
                axes.add_patch(Rectangle((-bit, y), 0.9, 0.8, facecolor=colour, edgecolor="white", lw=0, hatch=hatch))
        axes.text(-top + 0.5, y + 0.4, name, ha="right", va="center", size=9)
        axes.text(7.6, y + 0.4, f"{number:g}", ha="left", va="center", size=9)
    powers = range(top - 1, -7, -2)
    axes.set_xticks([0.45 - p for p in powers], [f"$2^{{{p}}}$" for p in powers], size=8)
    axes.set(xlim=(-top - 3, 11), ylim=(len(rows) + 0.5, -0.3), yticks=[])
    axes.set_title("each box is a bit that is 1; hatched: a negative number")
    axes.spines[["left", "bottom"]].set_visible(False)


def counting(steps: Sequence[int], sums: Mapping[str, Sequence[float]]) -> None:
    """Lesson 3: what a chain of instructions has counted after so many."""
    _, axes = plt.subplots(figsize=(8.5, 2.6))
    for (how, values), line, colour in zip(sums.items(), ("-", "--"), (WRONG, INK), strict=True):
        axes.plot(steps, values, line, marker="o", color=colour, label=how)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="instructions", ylabel="sum")
    axes.legend()
