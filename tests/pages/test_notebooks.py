"""The notebooks as they are checked in: run from top to bottom, with their outputs, and small.

They run under `pytest -p nbmake --nbmake notebooks` (extra `notebooks`); here only their files are read.
"""

import json
from pathlib import Path

import pytest

from optimized import measure

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LESSONS = sorted(FOLDER.glob("[0-9]*.ipynb"))
CORE = sorted(FOLDER.glob("0*.ipynb"))


def test_there_are_lessons():
    """Five core lessons, and deep dives, which count from 11."""
    core, deep = [path for path in LESSONS if path.name < "1"], [path for path in LESSONS if path.name >= "1"]
    assert [path.name[:2] for path in core] == [f"{n:02}" for n in range(1, 6)]
    assert [path.name[:2] for path in deep] == [str(n) for n in range(11, 11 + len(deep))]


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_a_core_lesson_is_short_begins_with_a_guess_and_ends_with_its_puzzles(path):
    cells = json.loads(path.read_text())["cells"]
    text = [word for cell in cells if cell["cell_type"] == "markdown" for word in "".join(cell["source"]).split()]
    assert sum(any(letter.isalnum() for letter in word) for word in text) <= 600
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lines = [line for source in code for line in source.splitlines() if line.strip()]
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 88  # the column of a page
    assert "Predict before you run" in "".join(cells[0]["source"])
    assert any("play(" in source for source in code)
    assert any("claim(" in source for source in code)
    assert not [line for line in lines if line.strip().startswith("assert")]
    assert [source.count("puzzles.check(") for source in code][-2:] == [1, 1]
    assert any(cell["metadata"].get("changes") for cell in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_of_one_run_and_without_complaints(path):
    assert path.stat().st_size < 300 << 10
    text = path.read_text()
    assert "/home/" not in text
    assert "site-packages" not in text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1


def test_the_lesson_about_decoding_shows_what_is_recorded():
    """Once `twin bench decode --write` has run, the lesson is run again."""
    text = (FOLDER / "16_other_peoples_models.ipynb").read_text()
    shown = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", ())]
    missing = any("Times: not measured yet." in line for output in shown for line in output.get("text", ()))
    assert missing != (measure.RESULTS / "decode.json").exists()
    assert not any("transformers is not installed" in line for output in shown for line in output.get("text", ()))
