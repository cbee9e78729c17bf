"""The microscope's JavaScript (docs/site/microscope) in an engine: V8 from pip, or a Chromium with the page open."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from shared import chromium

FOLDER = Path(__file__).parents[2] / "docs" / "site" / "microscope"
SOLUTIONS = Path(__file__).with_name("microscope_solutions.js")
WITHOUT_A_PAGE = ("numbers", "recorded", "puzzles")  # the scripts that know nothing of a document
# A browser has the page's scripts already; both engines get this.
MORE = """
const puzzles = makePuzzles(numbers, recorded);
const words = (base64) => new Uint32Array(numbers.bytesOf(base64).buffer);

/** The words of a tile: a [rows, k] and b [columns, k] codes, c [rows, columns] words; steps chained along k. */
function tile(a, b, c, rows, columns, k, aFormat, bFormat) {
  const [left, right, old] = [numbers.bytesOf(a), numbers.bytesOf(b), words(c)];
  const out = [];
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) {
      const pair = [left.subarray(i * k, (i + 1) * k), right.subarray(j * k, (j + 1) * k)];
      out.push(numbers.chain(...pair, old[i * columns + j], numbers[aFormat], numbers[bFormat]));
    }
  }
  return out;
}
"""


class Engine(Protocol):
    """Runs JavaScript."""

    def run(self, script: str) -> Any:
        """The value of the script's last expression."""


class V8:
    """The engine of Chromium without a browser."""

    def __init__(self) -> None:
        racer = pytest.importorskip("py_mini_racer", reason='V8 is not installed: pip install -e ".[dev]"')
        self.context = racer.MiniRacer()
        for name in WITHOUT_A_PAGE:
            self.context.eval((FOLDER / f"{name}.js").read_text("utf-8"))

    def run(self, script: str) -> Any:
        return self.context.eval(script)


@contextmanager
def engine(name: str, profile: Path) -> Iterator[Engine]:
    """An engine with the page's scripts, the solutions and `MORE`; a test that has none is skipped, and says so."""
    if name == "V8":
        found = V8()
        for script in (SOLUTIONS.read_text("utf-8"), MORE):
            found.run(script)
        yield found
        return
    program = chromium.found()
    if program is None:
        pytest.skip(chromium.MISSING)
    with chromium.page(program, profile) as page:
        page.open((FOLDER / "index.html").as_uri())
        for script in (SOLUTIONS.read_text("utf-8"), MORE):
            page.run(script)
        yield page


def _integer(digits: str) -> int | float:
    """A number without a point. From 2^53 on JavaScript's digits are the shortest that name the float64."""
    return int(digits) if abs(int(digits)) < 2**53 else float(digits)


def ask(engine: Engine, expression: str) -> Any:
    """The value of an expression by way of JSON, in which NaN and infinities are null."""
    return json.loads(engine.run(f"JSON.stringify({expression})"), parse_int=_integer)


def call(engine: Engine, function: str, *arguments: Any) -> Any:
    """The result of a function of JSON's values."""
    return ask(engine, f"({function})({', '.join(map(json.dumps, arguments))})")


def base64_of(tensor: torch.Tensor) -> str:
    """The bytes of a tensor."""
    return base64.b64encode(tensor.contiguous().view(torch.uint8).numpy().tobytes()).decode()
