"""One self-contained HTML page of text, tables and pictures (report.html.j2).

Pictures are matplotlib figures, embedded as SVG data URIs so that ids of two pictures cannot collide.
"""

import base64
import html
import io
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

WORD = re.compile(r"[0-9A-F]{8}")
NUMERIC = set("0123456789+-−.±")
FOLDER = Path(__file__).parent
PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
)


def svg(figure: Figure) -> str:
    """The figure as SVG text; the same figure gives the same bytes."""
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def escape(text: object) -> str:
    """`text` as HTML text."""
    return html.escape(str(text))


def _look(cell: str) -> str:
    """The class of a table's cell: w is a 32-bit word in hexadecimal, n a number."""
    return "w" if WORD.fullmatch(cell) else "n" if cell[:1] in NUMERIC else ""


@dataclass
class Report:
    """A page that is built from top to bottom: `section`, then `text`, `table`, `picture`, `columns`."""

    title: str
    subtitle: str
    _blocks: list[tuple[str, Any]] = field(default_factory=list)
    _sections: list[str] = field(default_factory=list)

    def section(self, title: str, verdict: str = "") -> None:
        """Start a section; `verdict` is a short result beside its title."""
        self._sections.append(title)
        self._blocks.append(("section", {"number": len(self._sections), "title": title, "verdict": verdict}))

    def text(self, *paragraphs: str) -> None:
        """Add paragraphs of HTML; escape any text that is not HTML."""
        self._blocks.extend(("text", Markup(paragraph)) for paragraph in paragraphs)

    def columns(self, *blocks: tuple[str, str]) -> None:
        """Add preformatted texts side by side, each with a heading."""
        self._blocks.append(("columns", blocks))

    def table(
        self, head: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "", marked: Container[int] = ()
    ) -> None:
        """Add a table with a caption (HTML); numbers and 32-bit words in hexadecimal are set as such.

        A cell that is `Markup` stands as it is. `marked`: the numbers of the rows that are set off.
        """
        cells = [
            (i in marked, [(_look(text), text) for text in (x if isinstance(x, Markup) else str(x) for x in row)])
            for i, row in enumerate(rows)
        ]
        self._blocks.append(("table", {"head": head, "rows": cells, "caption": Markup(caption)}))

    def picture(self, figure: Figure, caption: str, alternative: str) -> None:
        """Add a figure, with a caption (HTML) and an alternative text for those who cannot see it."""
        data = base64.b64encode(svg(figure).encode()).decode()
        self._blocks.append(("picture", {"data": data, "caption": Markup(caption), "alternative": alternative}))

    def html(self) -> str:
        """The whole page."""
        return PAGES.get_template("report.html.j2").render(
            title=self.title,
            subtitle=Markup(self.subtitle),
            style=Markup((FOLDER / "report.css").read_text()),
            sections=self._sections,
            blocks=self._blocks,
        )
