"""The walkthrough's pictures: what they draw is what the formats and the runs have, and every word can be read."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from optimized.commands.report import Report
from optimized.commands.steps import number_line, training, tutorial
from optimized.commands.steps.style import styled
from optimized.training import corpus
from optimized.training.monitor import TENSORS, Run
from optimized.training.settings import Settings
from optimized.training.trainer import Trainer
from reference.numbers import formats


def run(precision: str) -> Run:
    """Of 80 steps, whose losses fall; of codes, as many as their number, and the first and the largest not at all."""
    one = Run(precision, trainer=None)  # type: ignore[arg-type]
    one.losses = [5.0 / (1 + step) + (precision == "FP8") * 0.01 for step in range(80)]
    for moment, name in itertools.product(("first step", "last step"), TENSORS):
        one.codes[moment, name], one.lost[moment, name] = torch.arange(256), 0.125
    return one


RUNS = [run("bf16"), run("FP8")]
PICTURES: dict[str, Callable[[], Figure]] = {
    "bits": number_line.bits_picture,
    "line": number_line.line_picture,
    "error": number_line.error_picture,
    "boxes": tutorial.boxes_picture,
    "loss": lambda: training.loss_picture(RUNS),
    "codes": lambda: training.codes_picture(RUNS[1]),
}


@pytest.fixture(autouse=True)
def in_the_reports_style() -> Iterator[None]:
    with styled():
        yield


def words(figure: Figure) -> list[Text]:
    """Those that are drawn; labels of ticks outside the limits are not."""
    found = list(figure.texts)
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        legend = axes.get_legend()
        found += legend.get_texts() if legend else []
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [one for one in found if one.get_visible() and one.get_text().strip()]


@pytest.mark.parametrize("name", PICTURES)
def test_no_word_lies_on_another_or_outside(name: str) -> None:
    figure = PICTURES[name]()
    figure.draw_without_rendering()
    places = [(one.get_text(), one.get_window_extent()) for one in words(figure)]
    assert len(places) >= 3
    for text, place in places:
        assert place.x0 >= 0 <= place.y0, text
        assert place.x1 <= figure.bbox.x1, text
        assert place.y1 <= figure.bbox.y1, text
    for (one, here), (other, there) in itertools.combinations(places, 2):
        width = min(here.x1, there.x1) - max(here.x0, there.x0)
        height = min(here.y1, there.y1) - max(here.y0, there.y0)
        assert width <= 1 or height <= 1, (one, other)


@pytest.mark.parametrize("name", ["bits", "boxes"])
def test_boxes_lie_beside_each_other_and_around_their_words(name: str) -> None:
    """No two share a dot; each word in the columns of boxes is in one, or is a heading."""
    (axes,) = PICTURES[name]().axes
    boxes = [one for one in axes.patches if isinstance(one, Rectangle)]
    for a, b in itertools.combinations([one.get_bbox() for one in boxes], 2):
        assert a.x1 < b.x0 or b.x1 < a.x0 or a.y1 < b.y0 or b.y1 < a.y0
    low, high = axes.get_xlim()
    assert all(low <= one.get_x() and one.get_x() + one.get_width() <= high for one in boxes)
    inside = [sum(one.get_bbox().contains(*text.get_position()) for text in axes.texts) for one in boxes]
    assert min(inside) >= 1


@pytest.mark.parametrize("value", [0.35, 1.0, 0.013, 3.7])
def test_bits_are_those_of_the_code(value: float) -> None:
    (axes,) = number_line.bits_picture(value).axes
    boxes = [one for one in axes.patches if isinstance(one, Rectangle)]
    for row, fmt in enumerate(formats.FORMATS):
        of_row = boxes[8 * row : 8 * row + 8]
        assert len({one.get_y() for one in of_row}) == 1
        digits = [
            next(text.get_text() for text in axes.texts if one.get_bbox().contains(*text.get_position()))
            for one in of_row
        ]
        nearest = float(formats.decode(formats.cast(torch.tensor([value]), fmt))[0])
        assert fmt.value(int("".join(digits), 2)) == nearest
        assert any(text.get_text().endswith(f"= {nearest:g}") for text in axes.texts)
        colours = [one.get_facecolor() for one in of_row]
        widths = [len(list(group)) for _, group in itertools.groupby(colours)]
        assert widths == [1, fmt.exponent_bits, fmt.mantissa_bits]


def test_the_line_has_every_value() -> None:
    near, far = number_line.line_picture().axes
    for row, fmt in enumerate(formats.FORMATS):
        positive = [value for value in fmt.values() if value > 0]
        drawn: list[Any] = [[line[0, 0] for line in axes.collections[row].get_segments()] for axes in (near, far)]
        assert drawn[1] == positive
        assert drawn[0] == [0.0, *(value for value in positive if value <= 2)]
    assert far.get_xlim()[0] < min(formats.E5M2.values(), key=lambda value: (value <= 0, value))


def test_the_error_of_a_cast_is_bounded_inside_the_range() -> None:
    """By half a step of the mantissa: 1/17 and 1/9, as the report says; outside it rises to all of the number."""
    for axes, fmt in zip(number_line.error_picture().axes, formats.FORMATS, strict=True):
        x, percent = (np.asarray(one, np.float64) for one in axes.lines[0].get_data())
        inside = (x >= 2.0 ** (1 - fmt.bias)) & (x <= fmt.largest)
        bound = 100 / ((2 << fmt.mantissa_bits) + 1)
        assert 0.9 * bound < percent[inside].max() <= bound * (1 + 1e-6)
        assert percent[x < 2.0 ** (-fmt.bias - fmt.mantissa_bits)].min() == 100
        low, high = axes.get_ylim()
        assert low == 0
        assert 100 < high < 110


def test_the_losses_are_in_bits() -> None:
    curve, gap = training.loss_picture(RUNS).axes
    for one, line in zip(RUNS, curve.lines[::2], strict=True):
        assert np.asarray(line.get_ydata()) == pytest.approx(np.array(one.losses) / math.log(2))
    assert {line.get_label() for line in curve.lines[1::2]} == {"bf16", "FP8"}
    assert np.asarray(gap.lines[1].get_ydata()) == pytest.approx(0.01 / math.log(2))


def test_the_codes_are_shares_at_powers_of_two() -> None:
    figure = training.codes_picture(RUNS[1])
    for place, axes in enumerate(figure.axes):
        fmt = formats.E5M2 if TENSORS[place % 3] == "grad_output" else formats.E4M3
        magnitudes = np.arange(128) * 2 + 128
        share = 100 * magnitudes / magnitudes.sum()
        heights = {round(one.get_x() + one.get_width() / 2): one.get_height() for one in axes.patches}
        wanted = {code: share[code] for code in range(1, fmt.largest_code + 1)}
        assert heights == pytest.approx(wanted)
        assert len({b - a for a, b in itertools.pairwise(axes.get_xticks())} - {0}) == 1
        for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
            assert label.get_text() == f"$2^{{{round(math.log2(fmt.value(int(at))))}}}$"
            assert fmt.value(int(at)) == 2.0 ** round(math.log2(fmt.value(int(at))))
        (text,) = axes.texts
        assert f"{fmt.largest_code + 1} magnitudes used\nbecame zero: 12 %" in text.get_text()
        assert axes.get_ylim()[1] > max(heights.values())
        assert axes.get_xlim() == (0, 128)


def test_the_sentence_about_the_model_has_its_sizes() -> None:
    settings, text, report = Settings(), corpus.read(5), Report("title", "introduction")
    training._introduce(report, text, settings)
    page = report.html()
    model = Trainer(settings, text, "cpu").model
    sizes = [tuple(p.shape) for p in model.parameters()]
    ffn = max(rows for rows, *rest in sizes if rest == [settings.hidden] and rows not in (256, 3 * settings.hidden))
    assert f"({settings.heads} heads, {settings.hidden} → {ffn} → {settings.hidden})" in page
    assert f"{settings.steps} steps of {settings.rows * settings.sequence} guesses" in page
    assert f"{text.files:,} files, {len(text.data):,} bytes" in page
    assert f"A GPT of {settings.layers} causal" in page
