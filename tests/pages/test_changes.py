"""Core lessons take a minute at most; and every "change one cell" is executed, and shows what it is said to show.

A Markdown cell that suggests changes holds them in its metadata, too:
`"changes": [{"cell": "cell-03", "replace": "LENGTH = 8", "with": "LENGTH = 16", "see": "..."}]`. `see` is a
part of what the changed cell or a later one prints. A change that the reader has to find has `"shown": false`; `"and"`
lists more [cell, replace, with]. `nox -s notebooks` runs this file.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason='pip install -e ".[notebooks]"'),
]
ROOT = Path(__file__).parents[2]
RUN = """
import io, json, sys
from contextlib import redirect_stdout
import matplotlib
matplotlib.use("agg")
from IPython.core.interactiveshell import InteractiveShell
cells, changed, see = json.load(sys.stdin)
shell, seen = InteractiveShell.instance(), io.StringIO()
for place, source in enumerate(cells):
    with redirect_stdout(seen if place >= changed else io.StringIO()):
        shell.run_cell(source, store_history=True).raise_error()
    if see and see in seen.getvalue():
        break
else:
    if see:
        sys.exit(f"{see!r} is not in:\\n{seen.getvalue()}")
"""


def run(cells, changed, see, seconds):
    """The cells in a fresh process; from cell `changed` on, `see` is looked for, and ends the run."""
    return subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([cells, changed, see]),
        env={**os.environ, "CI": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT / "notebooks",
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def suggested():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            for number, change in enumerate(cell["metadata"].get("changes", ())):
                yield pytest.param(path, cell, change, id=f"{path.stem}-{number}")


@pytest.mark.parametrize(("path", "cell", "change"), list(suggested()))
def test_a_suggested_change_runs_and_shows_what_it_should(path, cell, change):
    text = "".join(cell["source"])
    if change.get("shown", True):
        for word in (change["replace"], change["with"]):
            assert f"`{word}`" in text, f"{word} is not in the cell that the reader sees"
    code = [one for one in json.loads(path.read_text("utf-8"))["cells"] if one["cell_type"] == "code"]
    cells, ids = ["".join(one["source"]) for one in code], [one["id"] for one in code]
    for name, old, new in [(change["cell"], change["replace"], change["with"]), *change.get("and", ())]:
        at = ids.index(name)
        assert cells[at].count(old) == 1, f"{old} is not once in {name}"
        cells[at] = cells[at].replace(old, new)
    done = run(cells, ids.index(change["cell"]), change["see"], 300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("0*.ipynb")), ids=lambda path: path.stem)
def test_a_core_lesson_runs_within_a_minute(path):
    """Imports included, with one thread; `nox -s notebooks` runs two at a time."""
    code = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    done = run(["".join(cell["source"]) for cell in code], 0, None, 60)
    assert done.returncode == 0, done.stderr
