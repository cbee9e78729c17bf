"""What every lesson uses: the look of its pictures, claims that are checked, and pictures to play with.

`claim(condition, "E5M2 reaches further.")` prints ✓ and the sentence. Where a cell was changed, and the sentence is no
longer true, it says what was changed. It raises only in CI, and only in a lesson that nobody changed.

`play(draw, scale=(1, 64))` draws `draw()` with its default values; in JupyterLab, with a slider for each control.
"""

import difflib
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from optimized.bench import plots
from reference.support import palette
from reference.support.palette import (  # noqa: F401 (for the lessons)
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    EXPONENT,
    FP32,
    GRAD,
    GREY,
    INK,
    LABEL,
    MANTISSA,
    PALE,
    SIGN,
    WRONG,
    W,
    X,
    Y,
)

COLOUR = {name: getattr(palette, name) for name in ("E4M3", "E5M2", "E2M1", "E8M0", "BF16", "FP32")}


def style() -> None:
    """Set matplotlib's style for a lesson."""
    plt.rcParams.update(
        {
            **plots.STYLE,
            "figure.dpi": 80,
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "lines.linewidth": 2,
        }
    )


def sqnr(exact: torch.Tensor, got: torch.Tensor) -> float:
    """Signal to quantisation noise, 10·log10(Σ exact² / Σ (exact − got)²), in dB: 6 dB are one bit."""
    exact, got = exact.double(), got.double()
    noise = (exact - got).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise)) if noise else math.inf


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where `inspect` looks
    spec.loader.exec_module(module)
    return module


nano = _load(Path(__file__).parents[1] / "examples" / "nano_fp8.py")
"""FP8 training in one file: the lessons quote its functions."""


def show(function: Callable[..., Any]) -> None:
    """Print the source of a function, as its file has it."""
    print(inspect.getsource(function).rstrip())


# ---- claims ----


def _code(notebook: Path) -> list[str]:
    """The source of each code cell."""
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text("utf-8"))["cells"] if "outputs" in cell]


LESSONS = {path.stem: _code(path) for path in sorted(Path(__file__).parent.glob("*.ipynb"))}
"""The code of each lesson, as the file was when the lesson began."""


def changes(ran: Sequence[str], lessons: dict[str, list[str]]) -> list[str]:
    """Each line that differs between the cells that ran and their lesson, in words. Guesses may differ."""
    if not lessons:
        return []

    def kinship(cells: list[str]) -> tuple[int, float]:
        """How many cells are equal; where only the first has run, and was changed, how like it is to the lesson's."""
        first = difflib.SequenceMatcher(None, ran[0], cells[0], autojunk=False).quick_ratio() if ran and cells else 0.0
        return len(set(cells) & set(ran)), first

    own = max(lessons.values(), key=kinship)
    now: dict[int, str] = {}  # of each cell of the lesson: what ran in its place last
    for source in ran:
        likeness = [difflib.SequenceMatcher(None, source, cell, autojunk=False).ratio() for cell in own]
        best = max(range(len(own)), key=likeness.__getitem__, default=-1)
        if best >= 0 and likeness[best] > 0.5:
            now[best] = source
    found = []
    for place, source in now.items():
        before = [line.strip() for line in own[place].splitlines() if not line.startswith("guess")]
        after = [line.strip() for line in source.splitlines() if not line.startswith("guess")]
        for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if kind != "equal":
                found.append(f"`{'; '.join(after[c:d])}` in place of `{'; '.join(before[a:b])}`")
    return found


def _ran() -> list[str]:
    """The cells that ran in this notebook, the one that runs included."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return [] if shell is None else [source.rstrip("\n") for source in shell.user_ns.get("In", ()) if source]


def claim(condition: object, text: str) -> None:
    """Print ✓ and the sentence if the condition holds; else what was changed, and what the lesson's numbers give."""
    if condition:
        print(f"✓ {text}")
        return
    changed = changes(_ran(), LESSONS)
    if changed:
        print(f"✗ With the lesson's numbers: {text}\n  Not with yours: {', '.join(changed)}.")
        return
    sentence = f"✗ With the lesson's numbers: {text} This run found something else."
    if os.environ.get("CI"):
        raise AssertionError(sentence)
    print(sentence)


# ---- widgets ----


def _has_front_end() -> bool:
    """Whether somebody can move a slider: a front end sends the id of the cell that it runs, nbconvert does not."""
    if "google.colab" in sys.modules:
        return True
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and "cellId" in (kernel.get_parent() or {}).get("metadata", {})


def widgets(function: Callable[..., object], controls: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A widget for each control, by name, and the box of all of them above the picture."""
    import ipywidgets

    def draw(**values: Any) -> None:
        function(**values)
        plt.show()

    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    made = {
        name: ipywidgets.FloatText(defaults[name])
        if control is float
        else ipywidgets.interactive.widget_from_abbrev(control, defaults[name])
        for name, control in controls.items()
    }
    for name, widget in made.items():
        widget.description = name.replace("_", " ")
        if isinstance(widget, ipywidgets.IntSlider | ipywidgets.FloatSlider):
            widget.continuous_update = False  # a slow picture is drawn once, when the slider rests
    return made, ipywidgets.VBox([*made.values(), ipywidgets.interactive_output(draw, made)])


def play(function: Callable[..., object], **controls: Any) -> None:
    """Draw with the function's defaults; where there is a front end, with a widget for each control.

    A control is what ipywidgets' `interact` takes: (lowest, highest), (lowest, highest, step), a list of choices, a
    bool; or `float`: any number may be typed. It starts at the function's default.
    """
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    unknown = [name for name in controls if defaults.get(name, inspect.Parameter.empty) is inspect.Parameter.empty]
    if unknown:
        raise ValueError(
            f"play: control {unknown[0]!r}; a parameter of {function.__name__} with a default is accepted."
        )
    if _has_front_end():
        sys.modules["IPython"].display.display(widgets(function, controls)[1])
        return
    function(**{name: defaults[name] for name in controls})
    plt.show()
