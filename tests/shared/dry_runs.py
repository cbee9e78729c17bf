"""Runs of whole benchmarks on a pretended GPU (`dry_bench`), and what each of them must give."""

import contextlib
import io
import json
import math
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import matplotlib
import pytest
from shared.asked import is_what_was_recorded
from shared.dry_bench import DryBench, Round

import optimized
from optimized import measure
from optimized.bench.layers import layer_models
from optimized.commands import tables

matplotlib.use("Agg")
from matplotlib import pyplot

Row = dict[str, Any]


class Ran(NamedTuple):
    """A benchmark's result, its tables, and what was noted."""

    payload: Row
    tables: list[Any]
    rounds: list[Round]
    lines: list[str]


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a payload."""
    if isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers(one)
    elif isinstance(value, (int, float)):
        yield value


def run(module: Any, call: Callable[..., Row] | None = None) -> Ran:
    """Run a benchmark; what every one must give is checked here."""
    told: list[float] = []
    with DryBench() as bench, contextlib.redirect_stdout(io.StringIO()):
        payload = (call or module.run)(told.append)
    assert {one.kernel.kernel for one in bench.gpu.launches} <= payload["provenance"]["kernels"].keys()
    assert payload["what" if "what" in payload else "ms"]
    payload = json.loads(json.dumps(payload))
    is_what_was_recorded(module.NAME, payload)
    assert all(map(math.isfinite, numbers(payload)))
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    details = [build for of, build in tables.DETAILS.values() if of == module.NAME]
    found = [one for build in (tables.BUILDERS[module.NAME], *details) for one in build(payload)]
    for one in found:
        assert one.title
        assert one.how.endswith(".")
        assert "pretended H200" in one.note
        assert one.rows
        assert {len(row) for row in one.rows} == {len(one.columns)}
        assert not any(re.search(r"\b(nan|inf|None)\b", cell) for row in one.rows for cell in row)
    return Ran(payload, found, bench.rounds, bench.gpu.lines)


def is_drawn(plot: Callable[[], object], name: str, panels: int | None = None) -> set[float]:
    """A picture of a result, with words at its axes and a legend: all heights of its lines, bars and points."""
    found: list[tuple[Path, Any]] = []
    with mock.patch.object(measure, "write_plot", lambda *given: found.append(given)):
        plot()
    ((path, figure),) = found
    assert path == measure.ROOT / "docs" / f"{name}.png"
    assert len(figure.axes) == (panels or len(figure.axes)) > 0
    assert figure.legends or any(axes.get_legend() for axes in figure.axes)
    assert any(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes)
    heights = set[float]()
    for axes in figure.axes:
        drawn = [float(y) for line in axes.lines for y in line.get_ydata()]
        drawn += [patch.get_height() for patch in axes.patches] + [patch.get_width() for patch in axes.patches]
        drawn += [y for one in axes.collections for _, y in one.get_offsets().tolist()]
        assert drawn
        heights |= set(drawn)
    figure.draw_without_rendering()
    pyplot.close("all")
    return heights


def launches(lines: list[str]) -> list[str]:
    """The kernels of ours among notes."""
    return [line.partition(" ")[0] for line in lines if re.match(r"[\w/]+\.\w+ \[", line)]


@contextlib.contextmanager
def layers() -> Iterator[None]:
    """The project's own layers have the place of Transformer Engine's."""
    recipes = optimized.recipe
    pool = types.SimpleNamespace(get_default_memory_pool=lambda: types.SimpleNamespace(total_bytes=lambda: 5))
    with (
        mock.patch.object(layer_models, "engine", return_value=optimized),
        pytest.MonkeyPatch.context() as patch,  # `mock.patch.dict` would unload what is imported inside
        warnings.catch_warnings(),
    ):
        patch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
        patch.setitem(sys.modules, "cupy", pool)
        warnings.simplefilter("ignore")
        yield


def percents(values: Sequence[float]) -> list[str]:
    return [f"{100 * value:.0f} %" for value in values]
