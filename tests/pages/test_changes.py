"""Lessons run, the core ones in a minute; and every "change one cell" is executed, and shows what it is said to show.

A Markdown cell that suggests changes holds them in its metadata, too:
`"changes": [{"cell": "cell-03", "replace": "LENGTH = 8", "with": "LENGTH = 16", "see": "..."}]`. `see` is a
part of what the changed cell or a later one prints. A change that the reader has to find has `"shown": false`; `"and"`
lists more [cell, replace, with]. `nox -s notebooks` runs this file.

A lesson is a fresh process, which runs its cells in order. Before the first cell that a change changes it forks, and
the fork goes on with the changed cells: it has what a process of its own would have computed, without the seconds.
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
LIMIT, MINUTE = 300, 60
RUN = """
import io, json, multiprocessing.forkserver, os, sys, time, traceback
from contextlib import redirect_stdout
import matplotlib.pyplot
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
import reference
matplotlib.use("agg")
cells, changes = json.load(sys.stdin)
# IPython's history is written by a thread, which a fork would not have.
shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))

def run(source, out):
    with redirect_stdout(out):
        shell.run_cell(source, store_history=True).raise_error()

def changed(place, name, new, since, see):
    seen = io.StringIO()
    try:
        for at in range(place, len(cells)):
            run(new.get(str(at), cells[at]), seen if at >= since else io.StringIO())
            if see in seen.getvalue():
                return 0
        print(f"{name}: {see!r} is not in:\\n{seen.getvalue()}", file=sys.stderr)
    except BaseException:
        print(name, traceback.format_exc(), sep=": ", file=sys.stderr)
    return 1

wrong = False
for place, source in enumerate(cells):
    for name, new, since, see in changes:
        if min(map(int, new)) == place:
            multiprocessing.forkserver._forkserver._stop()  # a fork cannot ask a server that is not its child
            child = os.fork()
            if not child:
                os._exit(changed(place, name, new, since, see))
            wrong |= os.waitpid(child, 0)[1] != 0
    run(source, io.StringIO())
print(time.process_time())  # of this process alone: not of its forks, nor of what else runs on the machine
sys.exit(wrong)
"""


def changed(path, cells):
    """Of each change that a lesson suggests: its name, the changed cells, since which one a text is seen, the text."""
    code = [one for one in cells if one["cell_type"] == "code"]
    ids, texts = [one["id"] for one in code], ["".join(one["source"]) for one in code]
    for cell in cells:
        for number, change in enumerate(cell["metadata"].get("changes", ())):
            if change.get("shown", True):
                for word in (change["replace"], change["with"]):
                    assert f"`{word}`" in "".join(cell["source"]), f"{word} is not in the cell that the reader sees"
            new = {}
            for name, old, now in [(change["cell"], change["replace"], change["with"]), *change.get("and", ())]:
                at = ids.index(name)
                text = new.get(at, texts[at])
                assert text.count(old) == 1, f"{old} is not once in {name}"
                new[at] = text.replace(old, now)
            yield f"{path.stem}-{cell['id']}-{number}", new, ids.index(change["cell"]), change["see"]


def is_core(path):
    return path.stem.startswith("0")


LONGEST = "11_which_scale"  # it begins first, and then the last ones
LESSONS = [
    path
    for path in sorted(
        (ROOT / "notebooks").glob("*.ipynb"), key=lambda path: (path.stem == LONGEST, path), reverse=True
    )
    if is_core(path) or '"changes"' in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_suggested_changes_run_and_show_what_they_should(path):
    """The lesson runs to its end. A core one takes a minute of a processor at most, imports included, one thread."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    changes, core = list(changed(path, cells)), is_core(path)
    texts = ["".join(one["source"]) for one in cells if one["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([texts, changes]),
        env={**os.environ, "CI": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT / "notebooks",
        capture_output=True,
        text=True,
        timeout=LIMIT * (1 + len(changes)),
    )
    assert done.returncode == 0, done.stderr
    seconds = float(done.stdout.splitlines()[-1])
    assert not core or seconds < MINUTE
