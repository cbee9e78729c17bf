"""The site (mkdocs.yml, docs/site): built strictly from this checkout, and from one with broken links, which fails."""

import html.parser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import chromium
from tools import visit_site

pytestmark = [
    pytest.mark.slow,  # `nox -s site` runs them
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None,
        reason='the site\'s generator is not installed: pip install -e ".[site]"',
    ),
]

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built: Path | None = request.config.getoption("--site")
    if built is not None:
        return built
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


class Addresses(html.parser.HTMLParser):
    """What a page fetches, and where its links lead."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: set[str] = set()
        self.linked: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, address in attrs:
            if address and name in ("href", "src", "data-src", "poster"):
                (self.linked if tag == "a" else self.fetched).add(address)


def test_every_address_leads_to_a_file_of_the_site(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 50
    for page in pages:
        found = Addresses(page.read_text("utf-8"))
        for address in found.fetched | {link for link in found.linked if not re.match(r"https?:", link)}:
            assert not re.match(r"\w+:|//", address), f"{page.relative_to(site)} fetches {address}"
            path = urllib.parse.unquote(urllib.parse.urlsplit(address).path)
            target = (page.parent / path).resolve() if path else page
            assert target.is_relative_to(site.resolve()), address
            assert target.is_file() or (target / "index.html").is_file(), f"{page.relative_to(site)} names {address}"


def test_the_pages_are_readme_the_documents_and_the_notebooks(site: Path) -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *NOTEBOOKS]:
        place = site / path.relative_to(ROOT).with_suffix(".html")
        if path.name == "README.md" and path.parent != ROOT:  # the site's index is the microscope
            place = place.with_name("index.html")
        text = path.read_text("utf-8")
        if path.suffix == ".ipynb":
            text = "".join(json.loads(text)["cells"][0]["source"])
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        assert title, path.name
        assert f">{title[1]}<a" in place.read_text("utf-8"), f"{place.name} does not show {path.name}"
    assert "class Format" in re.sub(r"<[^>]+>", "", (site / "reference/numbers/formats.py.html").read_text("utf-8"))
    assert "gemm.json" in (site / "docs/results/index.html").read_text("utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_shown_with_its_outputs(site: Path, path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    page = (site / "notebooks" / f"{path.stem}.html").read_text("utf-8")
    drawn = sum("image/png" in output.get("data", {}) for output in outputs)
    assert drawn == len(list((site / "notebooks").glob(f"{path.stem}_*.png"))) == page.count(f'src="{path.stem}_')
    assert page.count('class="output no-copy ') == len(outputs) - drawn
    formulas = sum("$" in "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert page.count("<math") >= formulas
    assert "arithmatex" not in page


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Where a server on this machine shows the site."""

    with visit_site.served(site) as where:
        yield where


@pytest.mark.skipif(chromium.found() is None, reason=chromium.MISSING)
def test_every_page_is_whole_on_a_phone_and_a_screen(site: Path, tmp_path: Path) -> None:
    done = visit_site.visit(site, tmp_path, code=False)  # the tool visits source files, too
    assert done.wrong == []
    assert done.visits == 4 * done.pages > 400
    assert done.pictures > 300


@pytest.mark.skipif(chromium.found() is None, reason=chromium.MISSING)
def test_the_home_works_inside_the_theme(address: str, tmp_path: Path) -> None:
    program = chromium.found()
    assert program is not None
    with chromium.page(program, tmp_path) as page:

        def is_dark() -> bool:
            style = "getComputedStyle(document.querySelector('.card'))"
            found = page.run(f"[{style}.backgroundColor, {style}.color]")
            card, ink = (sum(map(int, re.findall(r"\d+", colour))) for colour in found)
            return card < ink

        for width in (390, 1280):
            for dark in (False, True):
                page.look(width, dark=dark)
                page.open(f"{address}/index.html")
                assert page.run('document.querySelectorAll(".scope .card").length') == 4
                assert page.wider_by() == 0
                assert is_dark() == dark
        for switch, dark in ((1, False), (2, True)):  # the theme's own switch, against what the system prefers
            page.look(1280, dark=not dark)
            page.run(f"document.getElementById('__palette_{switch}').click()")
            assert is_dark() == dark
        assert page.errors == []
        assert page.asked
        assert all(asked.startswith((address, "data:", "blob:")) for asked in page.asked)


def test_what_is_broken_fails_the_build(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    for name in ("docs", "notebooks", "reference", "optimized", "examples", "tests/golden", "tests/simulator"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "CITATION.cff", "noxfile.py"):
        shutil.copy(ROOT / name, root)
    (root / "docs" / "site" / "api.py").write_text("pages = tuple\n", "utf-8")  # the pages of names take long
    settings = (root / "mkdocs.yml").read_text("utf-8")
    (root / "mkdocs.yml").write_text(settings.replace('  - Names: ["docs/api/*.md"]\n', ""), "utf-8")
    broken = ["gone.md", "glossary.md#gone", "#gone", "../reference/gone.py", "../gone/", "/docs/tour.md", "gone.png"]
    with (root / "docs" / "tour.md").open("a", encoding="utf-8") as page:
        page.writelines(f"\n![a picture]({link})\n" if ".png" in link else f"\n[a link]({link})\n" for link in broken)
    lost, unlisted = "lost.md", root / "docs" / "unlisted.md"
    notebook = json.loads(NOTEBOOKS[0].read_text("utf-8"))
    notebook["cells"][0]["source"].append(f"\n\n[a lesson's link](../docs/{lost})\n")
    (root / "notebooks" / NOTEBOOKS[0].name).write_text(json.dumps(notebook), "utf-8")
    unlisted.write_text("# A page that the navigation lacks\n", "utf-8")
    done = build(root, tmp_path / "site")
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    for link in [*broken, f"../docs/{lost}"]:
        assert sum(f"link '{link}'" in line for line in warnings) == 1, f"{link}: {done.stderr}"
    assert f"  - docs/{unlisted.name}\n" in done.stderr
    assert len(warnings) == len(broken) + 2
