"""What a figure of matplotlib's shows, as lines of text: its axes' artists with their data, not its pixels."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

LONG = 12  # points of a line that are written out


_digits = 5


def _numbers(values: Any) -> str:
    array = np.asarray(values, dtype=float).reshape(-1)
    shown = [f"{value:.{_digits}g}" for value in array[:LONG]]
    if array.size > LONG:
        shown += [f"... {array.size} in all, sum {array.sum():.{_digits}g}, last {array[-1]:.{_digits}g}"]
    return "[" + " ".join(shown) + "]"


def _colours(values: Any) -> str:
    found = list(dict.fromkeys(to_hex(one, keep_alpha=True) for one in values))
    return " ".join(found[:4]) + f" {len(found)} in all" * (len(found) > 4)


def _label(artist: Any) -> str:
    label = str(artist.get_label())
    return "" if label.startswith("_") else f" {label!r}"


def _text(text: Any) -> str:
    style = (
        f"{to_hex(text.get_color())} {text.get_fontsize():g} {text.get_ha()} {text.get_va()} {text.get_rotation():g}"
    )
    place = getattr(text, "xy", text.get_position())
    offset = f" offset {text.xyann}" if hasattr(text, "xyann") else ""
    return f"text {text.get_text()!r} at {_numbers(place)}{offset} {style}"


def _line(line: Any) -> str:
    style = f"{to_hex(line.get_color())} {line.get_linestyle()} {line.get_linewidth():g} {line.get_marker()}"
    x, y = line.get_data()
    return f"line{_label(line)} {style} {line.get_markersize():g} x {_numbers(x)} y {_numbers(y)}"


def _collection(one: Any) -> str:
    what = f"{type(one).__name__}{_label(one)} faces {_colours(one.get_facecolor())}"
    what += f" edges {_colours(one.get_edgecolor())} widths {_numbers(one.get_linewidths())}"
    if hasattr(one, "get_segments"):
        return f"{what} segments {_numbers([x for segment in one.get_segments() for x in segment.flat])}"
    offsets = one.get_offsets()
    values = one.get_array() if one.get_array() is not None else []
    sizes = one.get_sizes() if hasattr(one, "get_sizes") else []
    return f"{what} x {_numbers(offsets[:, 0])} y {_numbers(offsets[:, 1])} s {_numbers(sizes)} c {_numbers(values)}"


def _axis(name: str, axis: Any, scale: str, limits: Any) -> str:
    ticks = axis.get_ticklocs()
    labels = [label.get_text() for label in axis.get_ticklabels()]
    size = axis.get_ticklabels()[0].get_fontsize() if labels else 0
    label = axis.get_label()
    title = f"{label.get_text()!r} {label.get_fontsize():g}"
    minor = len(axis.get_minorticklocs())
    return f"{name} {title} {scale} {_numbers(limits)} ticks {_numbers(ticks)} {minor} minor {labels[:12]} {size:g}"


def lines(figure: Any, digits: int = 5) -> Iterator[str]:
    """Axis by axis; numbers with so many digits."""
    global _digits
    _digits = digits
    figure.draw_without_rendering()
    yield f"figure {_numbers(figure.get_size_inches())} {figure.get_suptitle()!r}"
    for legend in figure.legends:
        yield f"legend {[text.get_text() for text in legend.get_texts()]}"
    for axes in figure.axes:
        spec = axes.get_subplotspec()
        place = "" if spec is None else f" at {tuple(map(int, spec.get_geometry()))}"
        yield f"-- {axes.get_title()!r} {axes.get_title('left')!r}{place}"
        yield _axis("x", axes.xaxis, axes.get_xscale(), axes.get_xlim())
        yield _axis("y", axes.yaxis, axes.get_yscale(), axes.get_ylim())
        yield "spines " + " ".join(name for name, spine in axes.spines.items() if spine.get_visible())
        yield from map(_line, axes.lines)
        for patch in axes.patches:
            yield f"patch {to_hex(patch.get_facecolor())} {_numbers(patch.get_bbox().bounds)}"
        yield from map(_collection, axes.collections)
        yield from map(_text, axes.texts)
        legend = axes.get_legend()
        if legend is not None:
            texts = [f"{text.get_text()} {text.get_fontsize():g}" for text in legend.get_texts()]
            yield f"legend {texts} at {legend._loc} frame {legend.get_frame_on()}"
