"""The walkthrough's pictures: what they draw is what the formats and the runs have, and every word can be read."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from optimized.commands.report import Report
from optimized.commands.steps import linear, number_line, recorded, training, tutorial
from optimized.commands.steps.style import styled
from optimized.recordings import tensor_core as recordings
from optimized.recordings.tensor_core import Product
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


def test_each_part_of_a_layer_is_in_one_box() -> None:
    """Whoever computes the layer, no part is left out or done twice."""
    (axes,) = tutorial.boxes_picture().axes
    boxes = [one.get_bbox() for one in axes.patches if isinstance(one, Rectangle)]
    parts = [text for text in axes.texts if text.get_text() in tutorial.PARTS]
    assert len(parts) == len(tutorial.BOXES) * len(tutorial.PARTS)
    for text in parts:
        assert sum(box.contains(*text.get_position()) for box in boxes) == 1, text


def test_each_layer_has_more_from_the_library_than_the_one_before() -> None:
    """From nothing to everything; a part that is in a coloured box once stays in one."""
    (axes,) = tutorial.boxes_picture().axes
    boxes = [one for one in axes.patches if isinstance(one, Rectangle)]
    plain, columns = boxes[0].get_facecolor(), sorted({one.get_x() for one in boxes})
    found = []
    for column in columns:
        coloured = [one for one in boxes if one.get_x() == column and one.get_facecolor() != plain]
        middles = [one.get_bbox() for one in coloured]
        at = column + boxes[0].get_width() / 2
        found.append({row for row in range(len(tutorial.PARTS)) for box in middles if box.contains(at, row + 0.5)})
    assert found[0] == set()
    assert all(before <= now for before, now in itertools.pairwise(found))
    assert found[-2] == found[-1] == set(range(len(tutorial.PARTS)))


@pytest.mark.parametrize("value", [0.35, 1.0, 0.013, 3.7, 1e-5])
def test_the_formula_beside_the_bits_has_their_value(value: float) -> None:
    formulas = [text.get_text() for text in number_line.bits_picture(value).axes[0].texts if "2^" in text.get_text()]
    for text, fmt in zip(formulas, formats.FORMATS, strict=True):
        found = re.fullmatch(r"(\(1 \+ )?(\d+)/(\d+)\)? · 2\^\((\d+) − (\d+)\) = (\S+)", text)
        assert found is not None, text
        mantissa, steps, exponent, bias = map(int, found.groups()[1:5])
        nearest = float(formats.decode(formats.cast(torch.tensor([value]), fmt))[0])
        shown = ((found[1] is not None) + mantissa / steps) * 2.0 ** (exponent - bias)
        assert shown == nearest
        assert float(found[6]) == pytest.approx(nearest, rel=1e-5)  # six digits


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


@pytest.fixture(scope="module")
def ways() -> list[linear.Variant]:
    """One `Linear` in four ways."""
    found, _ = linear.variants()
    return found


def decibels(ways: list[linear.Variant]) -> list[dict[str, float]]:
    """The noise of each way's results after the first, against products in float64."""
    x, weight, bias, gradient = (tensor.double().numpy() for tensor in linear._data())
    exact = {"output": x @ weight.T + bias, "dgrad": gradient @ weight, "wgrad": gradient.T @ x}
    noise = [{key: exact[key] - one.results[key].double().numpy() for key in exact} for one in ways[1:]]
    return [
        {key: 20 * math.log10(np.linalg.norm(exact[key]) / np.linalg.norm(one[key])) for key in exact} for one in noise
    ]


def test_the_second_step_in_fp8_has_less_noise(ways: list[linear.Variant]) -> None:
    """In its gradients, whose scales are known then; and the table has these numbers."""
    found = decibels(ways)
    bf16, first, second = found
    assert bf16["output"] > 45
    assert min(first["output"], second["output"]) > 25
    for key in ("dgrad", "wgrad"):
        assert second[key] > first[key] + 10
    table = linear.rows(ways)
    assert [row[1] for row in table] == [linear.SUBSCRIPT[key] for one in found for key in one]
    assert [row[0] for row in table if row[0]] == [one.name for one in ways[1:]]
    for cell, number in zip((row[2] for row in table), (one[key] for one in found for key in one), strict=True):
        assert float(cell.removesuffix(" dB")) == pytest.approx(number, abs=0.051)


def test_bars_are_as_high_as_the_table_says(ways: list[linear.Variant]) -> None:
    """And points have the gradient of fp32 and that of FP8, before and after scales are known."""
    bars, *clouds = linear.picture(ways).axes
    heights = [bar.get_height() for container in bars.containers for bar in container]
    assert [f"{height:.1f} dB" for height in heights] == [row[2] for row in linear.rows(ways)]
    assert max(heights) < bars.get_ylim()[1]
    sides = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for container in bars.containers for bar in container)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(sides)), "no bar hides another"
    for axes, way in zip(clouds, ways[2:], strict=True):
        points = np.asarray(axes.collections[0].get_offsets())
        for column, one in zip(points.T, (ways[0], way), strict=True):
            assert np.array_equal(column, one.results["wgrad"].double().flatten()[: len(column)].numpy())


@pytest.fixture(scope="module")
def product() -> Product:
    """The one that the report shows."""
    return recorded.shown(list(recordings.products()))


def test_only_the_model_of_the_tensor_core_has_the_recorded_words(product: Product) -> None:
    assert (product.formats, product.m, product.n, product.k) == recorded.SHOWN
    equal = [np.asarray(axes.collections[0].get_array()) for axes in recorded.picture(product).axes]
    assert [one.size for one in equal] == [product.out.numel()] * 3
    assert equal[0].all()
    assert all(one.mean() < 0.1 for one in equal[1:]), "an ordinary sum may meet a word"


def test_recorded_words_stand_above_the_same_ones(product: Product) -> None:
    """In hexadecimal; ordinary sums have others."""
    words = product.out[0, : recorded.WORDS_SHOWN].numpy().view(np.uint32)
    listed, model, *others = (row[1:] for row in recorded.word_rows(product))
    assert [int(word, 16) for word in listed] == words.tolist()
    assert model == listed
    assert len(others) == 2
    assert all(other != listed for other in others)
