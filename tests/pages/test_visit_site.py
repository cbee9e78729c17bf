"""tests/tools/visit_site.py sees each fault that it looks for, in pages that have one each."""

import struct
import zlib
from pathlib import Path

import pytest
from shared import chromium
from tools import visit_site

pytestmark = pytest.mark.skipif(chromium.found() is None, reason=chromium.MISSING)

HEAD = (
    '<!doctype html><meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
)
NIGHT = "<style>@media (prefers-color-scheme: dark) { body { background: #111; } }</style>"
PAGES = {
    "fine.html": '<p><img src="opaque.png">',
    "wide.html": '<div style="width: 700px">wider than a phone</div>',
    "console.html": "<script>console.error('something is wrong')</script>",
    "elsewhere.html": '<img src="http://127.0.0.2:9/away.png" alt="">',
    "missing.html": '<p><img src="gone.png">',
    "night.html": '<p><img src="clear.png">',
    "light_ground.html": '<p style="background: #fff"><img src="clear.png">',
}
EVERY = {(width, dark) for width in visit_site.WIDTHS for dark in ("light", "dark")}


def png(path: Path, alpha: int) -> None:
    """A picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 6, 0, 0, 0)
    pixel = zlib.compress(bytes([0, 0, 0, 0, alpha]))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixel) + chunk(b"IEND", b""))


def test_each_fault_is_seen_where_it_is(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    png(site / "opaque.png", 255)
    png(site / "clear.png", 0)
    for name, body in PAGES.items():
        (site / name).write_text(f"{HEAD}{NIGHT}<body>{body}", "utf-8")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    done = visit_site.visit(site, tmp_path / "profile", pictures)

    def seen(page: str, words: str) -> set[tuple[int, str]]:
        return {(w, k) for w, k in EVERY for line in done.wrong if line.startswith(f"{page}, {w} px, {k}: {words}")}

    assert (done.pages, done.visits) == (len(PAGES), 4 * len(PAGES))
    assert len(list(pictures.iterdir())) == done.visits
    assert not [line for line in done.wrong if line.startswith(("fine", "light_ground"))]
    assert seen("wide.html", "the page is ") == {(390, "light"), (390, "dark")}
    assert seen("missing.html", "the picture gone.png is missing") == EVERY
    assert seen("night.html", "the dark page shows through clear.png") == {(390, "dark"), (1280, "dark")}
    for page, words in (("console.html", "console: "), ("elsewhere.html", "it asks http://127.0.0.2:9/away.png")):
        assert {width for width, _ in seen(page, words)} == set(visit_site.WIDTHS)
