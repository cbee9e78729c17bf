"""The page of `twin replay`: the verdict, a picture of the step, and a table for each layer."""

import math
from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.figure import Figure

from optimized.commands.report import Report, escape
from optimized.commands.steps.style import COLOURS, figure, styled
from reference.inspect.recorded_step.file import Recording, op_in_words
from reference.inspect.recorded_step.replay import Difference, Result
from reference.inspect.recorded_step.statistics import Row, Statistics
from reference.inspect.recorded_step.words import in_words, life
from reference.numbers import formats
from reference.support import palette

_KINDS = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_LARGEST = {"float8_e4m3fn": formats.E4M3.largest, "float8_e5m2": formats.E5M2.largest}
_DIFFERENT = palette.WRONG
_HEAD = ("op", "of", "tensor", "type", "amax", "scale", "saturated", "underflowed", "SQNR\u00a0dB", "NaN, inf")
_SHOWN = 20  # differences


def page(recording: Recording, result: Result, statistics: Statistics, origin: str, verdict: Sequence[str]) -> str:
    """The whole page as HTML."""
    with styled():
        report = Report("A training step, replayed", escape(origin))
        report.section("What was found", "the same bits" if result.equal else "")
        report.text(*map(escape, verdict))
        rest = result.differences[1:_SHOWN]
        if rest:
            report.table(
                ["op", "what differs"], [[_link(one.op, statistics), in_words(recording, one)] for one in rest]
            )
        if result.differences:
            _tensor(report, recording, result.differences[0], statistics)
        report.text(*_firsts(recording, statistics))
        if statistics.rows:
            _step(report, result, statistics)
            _layers(report, statistics.rows, result.differences)
        return report.html()


def _anchor(number: int) -> Markup:
    """An op's number, which links lead to."""
    return Markup(f'<a id="op-{number}">{number}</a>')


def _link(number: int, statistics: Statistics) -> object:
    """An op's number, which leads to its row below, if it has one."""
    if any(row.op == number for row in statistics.rows):
        return Markup(f'<a href="#op-{number}">{number}</a>')
    return number


def _tensor(report: Report, recording: Recording, first: Difference, statistics: Statistics) -> None:
    """The ops that wrote and read the tensor that differs, from first to last."""
    known = recording.names.get((first.region.storage, first.region.offset))
    report.section("The tensor", known or "")
    rows = life(recording, first.region)
    marked = [i for i, (number, how, *_) in enumerate(rows) if number == first.op and (how != "wrote") == first.read]
    near = range(max(0, min(marked, default=0) - _SHOWN // 2), max(marked, default=0) + _SHOWN // 2)
    cells = [[_link(number, statistics), *more] for i, (number, *more) in enumerate(rows) if i in near]
    caption = (
        f"What each op left or found in {escape(first.tensor)}: two digests that are equal mean the same bits. "
        f"Marked is the first op that differs; numbers lead to its row in the tables of layers."
    )
    head = ["op", "did", "which", "digest"]
    report.table(head, cells, caption, {i - near.start for i in marked})


def _firsts(recording: Recording, statistics: Statistics) -> list[str]:
    """Where NaN and infinity began."""
    found = []
    for special in ("NaN", "infinity"):
        if special in statistics.first:
            number, _, what = statistics.first[special]
            found.append(escape(f"The first {special}: {op_in_words(recording, number)}, {what}."))
    return found or ["There is no NaN and no infinity in anything that an op of <code>twin::</code> read or wrote."]


def _step(report: Report, result: Result, statistics: Statistics) -> None:
    report.section("The step in one picture")
    report.picture(
        _picture(result, statistics),
        "Each point is one result of an op, from left to right in the order in which they ran. <b>Above</b>: its SQNR "
        "against the op in float64; 6 dB are one bit. <b>Below</b>: how far the numbers before a cast to FP8 fill the "
        "format, in powers of two: at 0 the largest number becomes the largest code, above 0 the cast clips, and "
        "each step below 0 leaves a binade unused. A red line marks the first difference, a grey one the first NaN.",
        "SQNR of each result, and how far casts fill FP8",
    )


def _picture(result: Result, statistics: Statistics) -> Figure:
    drawn = figure(9.0, 4.6)
    above, below = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for dtype, name in _KINDS.items():
        rows = [row for row in statistics.rows if row.dtype == dtype]
        exact = [row for row in rows if row.sqnr is not None and math.isfinite(row.sqnr)]
        colour = COLOURS.get(name, COLOURS["fp32"])
        if exact:
            above.plot([row.op for row in exact], [row.sqnr for row in exact], "o", ms=4, color=colour, label=name)
        casts = [(row.op, row.amax * row.scale / _LARGEST[dtype]) for row in rows if row.scale is not None]
        casts = [(op, filled) for op, filled in casts if filled > 0]
        if casts:
            below.plot([op for op, _ in casts], [math.log2(filled) for _, filled in casts], "o", ms=4, color=colour)
    low, high = below.get_ylim()
    below.set_ylim(min(low, -1.0), max(high, 0.5))  # a recipe that fills the format exactly has no range of its own
    below.axhline(0, lw=0.8, color=palette.GREY)
    for axes in (above, below):
        if result.differences:
            axes.axvline(result.differences[0].op, color=_DIFFERENT, lw=1.2)
        if "NaN" in statistics.first:
            axes.axvline(statistics.first["NaN"][0], color=COLOURS["fp32"], lw=1.2)
    above.set_ylabel("SQNR, dB")
    below.set_ylabel("log2 of amax · scale\n/ largest code")
    below.set_xlabel("op")
    if above.get_legend_handles_labels()[0]:
        above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return drawn


def _layers(report: Report, rows: Sequence[Row], differences: Sequence[Difference]) -> None:
    report.section("Layer by layer")
    report.text(
        "<b>amax</b> is the largest magnitude, of codes that of the numbers before the cast; <b>scale</b> is what they "
        "were multiplied by. <b>Saturated</b> is the share of numbers that the cast clipped, <b>underflowed</b> the "
        "share that became 0. <b>SQNR</b> compares a result with the op in float64, from the same inputs."
    )
    for at, phase in dict.fromkeys((row.at, row.phase) for row in rows):
        where = ", ".join(part for part in (at or "outside of a layer", phase) if part)
        report.text(f"<b>{escape(where)}</b>")
        here = [row for row in rows if (row.at, row.phase) == (at, phase)]
        marked = {i for i, row in enumerate(here) if any(row.op == one.op for one in differences)}
        report.table(_HEAD, [_cells(row) for row in here], marked=marked)


def _cells(row: Row) -> list[object]:
    form = f"{_KINDS.get(row.dtype, row.dtype)}\u00a0{'×'.join(map(str, row.shape))}"
    counts = f"{row.nan:,}, {row.infinite:,}" if row.nan or row.infinite else "0"
    numbers = [_number(row.amax), _number(row.scale), _share(row.saturated), _share(row.underflowed), _number(row.sqnr)]
    return [_anchor(row.op), _breakable(row.name), _breakable(row.tensor), form, *numbers, counts]


def _breakable(name: str) -> str:
    """A name that may be broken after each part of it, by spaces without width."""
    return name.replace("_", "_\u200b").replace(".", ".\u200b")


def _number(x: float | None) -> str:
    return "–" if x is None else "exact" if math.isinf(x) else f"{x:.4g}"


def _share(x: float | None) -> str:
    return "–" if x is None else "0" if x == 0 else f"{100 * x:.3g} %"
