"""Visit every page of the built site in a Chromium, on a phone and on a screen, light and dark, and say what is wrong:

    mkdocs build --strict && PYTHONPATH=.:tests python tests/tools/visit_site.py site [--pictures FOLDER] [--only TEXT]

Wrong is: an error in the console, a request to another host, a page that is wider than its window, a picture that does
not load, and a picture that lets a dark page show through, where its dark letters would vanish. `--pictures` writes
each visit as a PNG, for somebody to look at; `--only` visits the pages whose path has this text.
"""

import argparse
import functools
import http.server
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shared import chromium

WIDTHS = (390, 1280)
CODE = re.compile(r"\.(py|cu|cuh)\.html$")  # a source file as a page
FRAME = "new Promise(requestAnimationFrame)"
# Each picture that cannot be seen: not loaded, or with places through which a dark ground shows. A drawing that is
# written into the page takes its colours from the page, and is not asked.
PICTURES = """
(async (dark) => {
  const wrong = [];
  const light = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const [red, green, blue, alpha] = getComputedStyle(one).backgroundColor.match(/[\\d.]+/g).map(Number);
      if (alpha !== 0) return red + green + blue > 384;
    }
    return true;
  };
  for (const image of document.images) {
    image.loading = "eager";
    await image.decode().catch(() => undefined);
    const name = image.currentSrc.split("/").pop();
    if (!image.naturalWidth) { wrong.push(`the picture ${name} is missing`); continue; }
    if (!dark || light(image.closest("p") || image)) continue;
    const canvas = new OffscreenCanvas(64, 64);
    const brush = canvas.getContext("2d");
    brush.drawImage(image, 0, 0, 64, 64);
    const pixels = brush.getImageData(0, 0, 64, 64).data;
    if (pixels.some((value, i) => i % 4 === 3 && value < 128)) wrong.push(`the dark page shows through ${name}`);
  }
  return wrong;
})"""


@dataclass
class Visits:
    """What was visited, and what was wrong: lines of page, width, light or dark, and the fault."""

    pages: int = 0
    visits: int = 0
    pictures: int = 0
    wrong: list[str] = field(default_factory=list)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of a server on this machine that shows the folder."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def faults(page: chromium.Page, address: str, dark: bool) -> list[str]:
    """What is wrong with the page that is open. Errors and requests are those since the last question."""
    scheme = "slate" if dark else "default"  # the theme follows the system's preference a moment later
    late = f"(document.body.dataset.mdColorScheme || '{scheme}') !== '{scheme}'"
    page.run(f"(async () => {{ while ({late}) await {FRAME}; }})()")
    wrong = page.run(f"{PICTURES}({str(dark).lower()})")
    if wider := page.wider_by():
        wrong.append(f"the page is {wider} px wider than its window")
    wrong += [f"console: {error}" for error in page.errors]
    wrong += [f"it asks {asked}" for asked in page.asked if not asked.startswith((f"{address}/", "data:", "blob:"))]
    page.errors.clear()
    page.asked.clear()
    return wrong


def visit(site: Path, profile: Path, pictures: Path | None = None, only: str = "", code: bool = True) -> Visits:
    """Visit the pages of a built site: all, or those whose path has `only`, or all that are no source file.

    `profile` is an empty folder for Chromium, `pictures` one for the PNGs. Pages of source files are half of all, and
    have one template.
    """
    program = chromium.found()
    if program is None:
        raise FileNotFoundError(chromium.MISSING)
    paths = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    done = Visits()
    with served(site) as address, chromium.page(program, profile) as page:
        for path in (path for path in paths if only in path and (code or not CODE.search(path))):
            done.pages += 1
            for width in WIDTHS:
                page.look(width)
                page.open(f"{address}/{path}")
                for dark in (False, True):
                    page.look(width, dark=dark)
                    where = f"{path}, {width} px, {'dark' if dark else 'light'}"
                    found = [f"{where}: {fault}" for fault in faults(page, address, dark)]
                    done.wrong += found
                    for line in found:
                        print(line, flush=True)  # a visit of all pages takes minutes
                    done.visits += 1
                    done.pictures += page.run("document.images.length")
                    if pictures is not None:
                        name = path.removesuffix(".html").replace("/", "_")
                        page.picture(pictures / f"{name}_{width}_{'dark' if dark else 'light'}.png")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description="Visit every page of the built site, and say what is wrong.")
    parser.add_argument("site", type=Path, help="the folder that `mkdocs build` wrote")
    parser.add_argument("--pictures", type=Path, help="write each visit as a PNG into this folder")
    parser.add_argument("--only", default="", help="visit only pages whose path has this text")
    chosen = parser.parse_args()
    if chosen.pictures is not None:
        chosen.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        done = visit(chosen.site, Path(profile), chosen.pictures, chosen.only)
    print(f"{done.pages} pages, {done.visits} visits, {done.pictures} pictures, {len(done.wrong)} faults")
    return 1 if done.wrong or not done.visits else 0


if __name__ == "__main__":
    sys.exit(main())
