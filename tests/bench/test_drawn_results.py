"""A picture of a committed result is what its program draws of that result today, dot by dot."""

import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import numpy as np
import pytest
from PIL import Image

from optimized import measure
from optimized.bench import bandwidth_plot, drill_plot
from optimized.bench.kernels import attention_plot, gemm_shapes
from optimized.bench.layers import ladder, layer_plot, layer_sweep, speed_plot
from optimized.bench.models import seeds, several_gpus_plot, single_gpu_plot, train, training_plot


def of(module: Any, result: str) -> Callable[[], None]:
    return lambda: module.plot(measure.read_result(result))


PICTURES: dict[str, Callable[[], None]] = {
    "attention": of(attention_plot, "attention"),
    "casts": lambda: bandwidth_plot.shares("casts", bandwidth_plot.CASTS),
    "drill": of(drill_plot, "drill"),
    "gemm_shapes": of(gemm_shapes, "gemm_shapes"),
    "ladder": of(ladder, "ladder"),
    "layer": layer_plot.main,
    "layer_sweep": of(layer_sweep, "layer_sweep"),
    "loss": lambda: bandwidth_plot.shares("loss", bandwidth_plot.LOSS),
    "optimizer": bandwidth_plot.optimizers,
    "seeds": of(seeds, "seeds"),
    "several_gpus": of(several_gpus_plot, "data_parallel"),
    "single_gpu": of(single_gpu_plot, "single_gpu"),
    "speed": of(speed_plot, "layer"),
    "train": of(train, "train"),
    "training": training_plot.main,
}
PROGRAMS = [
    *(bandwidth_plot, attention_plot, gemm_shapes, ladder, layer_plot, layer_sweep, speed_plot),
    *(seeds, several_gpus_plot, single_gpu_plot, train, training_plot),
]
OTHERS = {"elementary", "gemm_roofline", "report"}  # of no result


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_program_draws(name: str) -> None:
    """Another version of matplotlib may draw letters otherwise: it draws all the same, and nothing is compared."""
    given: list[tuple[Path, Any]] = []
    with mock.patch.object(measure, "write_plot", lambda path, figure: given.append((path, figure))):
        PICTURES[name]()
    ((path, figure),) = given
    assert path == measure.ROOT / "docs" / f"{name}.png"
    committed = Image.open(path)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    if f"version{matplotlib.__version__}," in committed.info["Software"]:
        now, then = (np.asarray(one.convert("RGB"), np.int16) for one in (Image.open(file), committed))
        assert now.shape == then.shape
        # Another CPU may round the shade of an edge otherwise.
        assert int(np.abs(now - then).max()) <= 2, "draw it again; the program's docstring says how"


def test_every_picture_of_a_result_is_compared() -> None:
    found = {path.stem for path in (measure.ROOT / "docs").glob("*.png")}
    assert found == PICTURES.keys() | OTHERS


class ReadError(Exception):
    """A program asked for a result."""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.split(".")[-1])
def test_who_runs_a_program_draws_and_who_imports_it_does_not(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "read_result", mock.Mock(side_effect=ReadError))
    monkeypatch.setattr(sys, "argv", [program.__file__])
    runpy.run_path(program.__file__, run_name="imported")
    with pytest.raises(ReadError):
        runpy.run_path(program.__file__, run_name="__main__")
