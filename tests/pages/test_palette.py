"""One palette, reference/support/palette.py: pictures, lessons, drawings and style sheets have no colours beside it."""

import re
from pathlib import Path

import pytest

from reference.support import palette

ROOT = Path(__file__).parents[2]
KNOWN = {value for value in vars(palette).values() if isinstance(value, str) and re.fullmatch("#[0-9a-f]{6}", value)}
FILES = [
    *(ROOT / "notebooks").glob("*.py"),
    *(ROOT / "docs" / "drawings").glob("*.py"),
    *(ROOT / "optimized" / "commands" / "steps").glob("*.py"),
    ROOT / "optimized" / "commands" / "replay_page.py",
    ROOT / "optimized" / "bench" / "plots.py",
]
FORMATS = ("e4m3", "e5m2", "e2m1", "e8m0", "wrong")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_picture_has_the_colours_of_the_palette(path):
    found = {colour.lower() for colour in re.findall(r"#[0-9a-fA-F]{6}\b", path.read_text("utf-8"))}
    assert found <= KNOWN, f"{found - KNOWN}: take a colour of reference/support/palette.py"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "site").rglob("*.css")), ids=lambda path: path.name)
def test_a_style_sheet_gives_a_format_its_colour(path):
    for name, colour in re.findall(rf"--({'|'.join(FORMATS)}):\s*(#\w+)", path.read_text("utf-8")):
        assert colour == getattr(palette, name.upper()), name


def test_no_two_tensors_have_one_colour():
    assert len({palette.X, palette.W, palette.Y, palette.GRAD, palette.WRONG}) == 5
    assert len({getattr(palette, name.upper()) for name in FORMATS}) == len(FORMATS)
