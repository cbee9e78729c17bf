"""The pages of docs/: short, with drawings that their script draws, and with links that lead somewhere."""

import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
DESIGN = ("attention", "cast", "compile", "gemm", "layer", "norm", "recipes", "record", "simulator", "tapes")
DRAWN = (*DESIGN, "inference", "parallel", "two_runs")  # and pages without a log
LONG = ("glossary", "numerics", "results", "transformer_engine_api")  # lists, the contract, and generated tables
MOST_WORDS = 800
MOST_ENTRIES = 40
with mock.patch.object(sys, "path", [str(DOCS / "drawings"), *sys.path]):  # as for a script
    DRAW = runpy.run_path(str(DOCS / "drawings" / "draw.py"))


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def written(page: str) -> str:
    """A page without its generated tables."""
    return re.sub(r"<!-- results: begin -->.*?<!-- results: end -->", "", page, flags=re.DOTALL)


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    without_code = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [path for path in PAGES if path.stem not in LONG], ids=by_name)
def test_a_page_is_short(path: Path) -> None:
    words = written(path.read_text("utf-8")).split()
    assert len(words) <= MOST_WORDS, f"{path.name} has {len(words)} words; a page has at most {MOST_WORDS}"


@pytest.mark.parametrize("name", DRAWN)
def test_a_design_page_has_its_drawing(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text("utf-8")
    assert f"](drawings/{name}.svg)" in page
    assert (DOCS / "drawings" / f"{name}.svg").is_file()
    assert name not in DESIGN or f"](log/{name}.md)" in page


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))], ids=by_name
)
def test_every_link_leads_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text("utf-8")):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{by_name(path)} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), f"{by_name(path)} links to {link}: no such heading"


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    for path in [*PAGES, *(DOCS / "log").glob("*.md")]:
        assert path.name == "README.md" or f"]({path.relative_to(DOCS)})" in index, f"docs/README.md lacks {path.name}"


def test_pages_that_python_sources_name_exist() -> None:
    for folder in ("reference", "optimized", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"\bdocs/[\w/]+\.(?:md|svg)\b", path.read_text("utf-8")):
                assert (ROOT / page).is_file(), f"{by_name(path)} names {page}, which is not there"


def test_the_drawings_are_what_the_script_draws() -> None:
    files = {path.stem: path for path in (DOCS / "drawings").glob("*.svg")}
    assert files.keys() == DRAW["DRAWINGS"].keys() == set(DRAWN)
    for name, path in files.items():
        svg = path.read_text("utf-8")
        assert svg == DRAW["DRAWINGS"][name]().svg(), "run `python docs/drawings/draw.py` and commit"
        assert len(svg.encode()) < 40_000


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_stays_inside_its_canvas(name: str) -> None:
    root = ElementTree.fromstring(DRAW["DRAWINGS"][name]().svg())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    svg = "{http://www.w3.org/2000/svg}"
    for box in root.findall(f"{svg}rect"):
        x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width, box.attrib
        assert 0 <= y <= y + h <= height, box.attrib
    for text in root.findall(f"{svg}text"):
        length = 0.5 * float(text.attrib["font-size"]) * len(text.text or "")  # roughly
        left = float(text.attrib["x"]) - length * {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]]
        assert 0 <= left <= left + length <= width, text.text
        assert 0 < float(text.attrib["y"]) < height, text.text


def test_the_glossary_is_a_list_of_short_entries() -> None:
    entries = re.findall(r"^### (.+)\n(.+(?:\n(?!\n|#).+)*)", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE)
    names = [name.lower() for name, _ in entries]
    assert names == sorted(names)
    assert 20 <= len(entries) <= MOST_ENTRIES
    for name, text in entries:
        assert text.rstrip().endswith("."), name
        assert len(re.findall(r"\.(?=\s|$)", text)) <= 2, f"{name}: an entry is one or two sentences"
