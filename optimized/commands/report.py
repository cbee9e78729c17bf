"""One self-contained HTML page of text, tables and pictures.

Pictures are matplotlib figures, embedded as SVG data URIs so that ids of two pictures cannot collide.
"""

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

WORD = re.compile(r"[0-9A-F]{8}")
NUMERIC = set("0123456789+-−.±")
STYLE_FILE = Path(__file__).with_name("report.css")


def svg(figure: Figure) -> str:
    """The figure as SVG text; the same figure gives the same bytes."""
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def escape(text: object) -> str:
    """`text` as HTML text."""
    return html.escape(str(text))


@dataclass
class Report:
    """A page that is built from top to bottom: `section`, then `text`, `table`, `picture`, `columns`."""

    title: str
    subtitle: str
    _body: list[str] = field(default_factory=list)
    _sections: list[str] = field(default_factory=list)

    def section(self, title: str, verdict: str = "") -> None:
        """Start a section; `verdict` is a short result beside its title."""
        self._sections.append(title)
        anchor = f"s{len(self._sections)}"
        badge = f'<span class="verdict">{escape(verdict)}</span>' if verdict else ""
        number = f'<span class="number">{len(self._sections)}</span>'
        self._body.append(f'<h2 id="{anchor}">{number}{escape(title)}{badge}</h2>')

    def text(self, *paragraphs: str) -> None:
        """Add paragraphs of HTML; escape any text that is not HTML."""
        self._body.extend(f"<p>{paragraph}</p>" for paragraph in paragraphs)

    def columns(self, *blocks: tuple[str, str]) -> None:
        """Add preformatted texts side by side, each with a heading."""
        cells = "".join(f"<div><h4>{escape(head)}</h4><pre>{escape(text)}</pre></div>" for head, text in blocks)
        self._body.append(f'<div class="columns">{cells}</div>')

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
        """Add a table; cells that start with a digit are set as numbers, 32-bit words in hexadecimal as code."""

        def cell(content: object) -> str:
            text = str(content)
            kind = ' class="w"' if WORD.fullmatch(text) else ' class="n"' if text[:1] in NUMERIC else ""
            return f"<td{kind}>{escape(text)}</td>"

        heads = "".join(f"<th>{escape(name)}</th>" for name in head)
        body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
        note = f"<figcaption>{caption}</figcaption>" if caption else ""
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        self._body.append(f'<figure class="table">{table}{note}</figure>')

    def picture(self, figure: Figure, caption: str, alternative: str) -> None:
        """Add a figure, with a caption (HTML) and an alternative text for those who cannot see it."""
        data = base64.b64encode(svg(figure).encode()).decode()
        self._body.append(
            f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{escape(alternative)}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )

    def html(self) -> str:
        """The whole page."""
        links = "".join(f'<li><a href="#s{i}">{escape(s)}</a></li>' for i, s in enumerate(self._sections, 1))
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(self.title)}</title>'
            f"<style>{STYLE_FILE.read_text()}</style></head><body><header><h1>{escape(self.title)}</h1>"
            f"<p>{self.subtitle}</p></header><nav><ol>{links}</ol></nav><main>{''.join(self._body)}</main>"
            f"</body></html>\n"
        )
