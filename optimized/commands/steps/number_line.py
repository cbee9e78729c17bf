"""Step 1, the FP8 number line: which numbers 8 bits can represent, and how far a number moves when it is cast."""

import matplotlib.ticker
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from optimized.commands.report import Report
from optimized.commands.steps import Outcome
from optimized.commands.steps.style import COLOURS, figure
from reference.numbers import formats
from reference.support import palette

FIELD_COLOURS = {"sign": palette.SIGN, "exponent": palette.EXPONENT, "mantissa": palette.MANTISSA}


def _bits(axes: Axes, fmt: formats.Format8, code: int, y: float) -> None:
    """Draw the eight bits of one code, its fields in colours, and its value."""
    names = ["sign"] + ["exponent"] * fmt.exponent_bits + ["mantissa"] * fmt.mantissa_bits
    for place, name in enumerate(names):
        axes.add_patch(Rectangle((place, y), 0.94, 0.8, facecolor=FIELD_COLOURS[name], edgecolor="white", linewidth=1))
        axes.text(place + 0.47, y + 0.4, str(code >> (7 - place) & 1), ha="center", va="center", size=11)
    fields = fmt.fields(code)
    scale = 1 << fmt.mantissa_bits
    axes.text(-0.3, y + 0.4, fmt.name, ha="right", va="center", size=11, weight="bold")
    fraction = f"{fields.mantissa}/{scale}"
    factor = f"(1 + {fraction})" if fields.exponent else fraction  # without a 1: subnormal, of the lowest exponent
    value = f"{factor} · 2^({max(fields.exponent, 1)} − {fmt.bias}) = {fields.value:g}"
    axes.text(8.3, y + 0.4, value, va="center", size=11)


def bits_picture(value: float = 0.35) -> Figure:
    """The code of `value` in both formats, bit by bit."""
    fig = figure(9, 1.7)
    axes = fig.add_subplot()
    for row, fmt in enumerate(formats.FORMATS):
        code = int(formats.cast(torch.tensor([value]), fmt).view(torch.uint8)[0])
        _bits(axes, fmt, code, -1.15 * row)
    for place, name in ((0.47, "sign"), (2.9, "exponent"), (6.4, "mantissa")):
        axes.text(place, 1.0, name, ha="center", size=9, color=palette.LABEL)
    axes.set(xlim=(-1.6, 15), ylim=(-1.3, 1.35))
    axes.axis("off")
    return fig


def line_picture() -> Figure:
    """Every positive value of both formats: near zero on a linear scale, and all of them by powers of two."""
    fig = figure(9, 3.6)
    near, far = fig.subplots(2, 1)
    for row, fmt in enumerate(formats.FORMATS):
        values = [v for v in fmt.values() if v > 0]
        colour = COLOURS[fmt.name]
        near.vlines([0.0, *(v for v in values if v <= 2)], row - 0.32, row + 0.32, color=colour, linewidth=0.9)
        far.vlines(values, row - 0.32, row + 0.32, color=colour, linewidth=0.9)
        far.text(values[-1] * 1.5, row, f"{values[-1]:,.0f}", va="center", size=9)
    near.set(xlim=(-0.01, 2.02), title="from 0 to 2")
    far.set_xscale("log", base=2)
    far.set(xlim=(2.0**-17, 2.0**19), title="all positive values, by powers of two")
    for axes in (near, far):
        axes.set_yticks([0, 1], [fmt.name for fmt in formats.FORMATS])
        axes.set_ylim(1.6, -0.6)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    return fig


def error_picture() -> Figure:
    """The relative error of a cast with scale 1, by the magnitude of the number."""
    x = torch.logspace(-18, 18, 1801, base=2.0, dtype=torch.float32)
    fig = figure(9, 3.6)
    panels = fig.subplots(2, 1, sharex=True)
    for axes, fmt in zip(panels, formats.FORMATS, strict=True):
        error = (formats.decode(formats.cast(x, fmt)) - x).abs() / x
        colour = COLOURS[fmt.name]
        axes.fill_between(x.numpy(), 100 * error.numpy(), color=colour, alpha=0.25, linewidth=0)
        axes.plot(x.numpy(), 100 * error.numpy(), color=colour, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set(ylim=(0, 104), xlim=(2.0**-18, 2.0**18), title=fmt.name)
        axes.title.set_color(colour)
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(decimals=0))
    for at, text in ((2.0**-14.2, "too small: becomes 0"), (2.0**14.2, "too large: saturates")):
        panels[0].text(at, 82, text, size=9, color=palette.LABEL, ha="center", va="top")
    panels[1].set_xlabel("x")
    fig.supylabel("error / x", size=10)
    return fig


def run(report: Report) -> Outcome:
    report.section("The FP8 number line")
    report.text(
        "FP8 training rounds both operands of the matrix products in linear layers to eight bits, because a tensor "
        "core multiplies eight bits twice as fast as sixteen. Norms, attention, parameters and the optimizer keep 16 "
        "or 32 bits.",
        "Two formats share the work: <b>E4M3</b> has more mantissa bits and is used for activations and weights; "
        "<b>E5M2</b> has more exponent bits and is used for gradients, whose magnitudes are spread more widely. Using "
        "both is the recipe's format HYBRID.",
    )
    report.picture(
        bits_picture(),
        "<b>The number 0.35 in both formats.</b> Neither format has 0.35. E4M3 rounds it to the nearest of its 8 "
        "values from 0.25 up to 0.5, E5M2 to the nearest of its 4.",
        "The bits of 0.35 in E4M3 and E5M2",
    )
    report.picture(
        line_picture(),
        "<b>Every positive value there is.</b> Above: values crowd towards zero, because each power of two is cut "
        "into the same number of steps. Below: by powers of two the ticks are evenly spread. E4M3 ends at 448; "
        "E5M2 reaches 57,344 but has half as many values in each power of two.",
        "The positive values of E4M3 and E5M2 as ticks on a line",
    )
    report.picture(
        error_picture(),
        "<b>What a cast costs.</b> Inside a format's range the relative error is bounded, by 1/17 for E4M3 and 1/9 for "
        "E5M2. Outside it rises to 100 %. So before a cast every tensor is multiplied by its <code>scale</code>: the "
        "format's largest value divided by the tensor's <code>amax</code>, its largest magnitude. After the product "
        "the scales are divided out again. Steps 2 and 5 show which amax is taken.",
        "Relative error of casts to E4M3 and E5M2 over magnitude",
    )
    count = " and ".join(f"{len(fmt.values())} ({fmt.name})" for fmt in formats.FORMATS)
    return Outcome("FP8 number line", f"different finite numbers: {count}")
