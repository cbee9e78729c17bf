"""Boxes, text and arrows as SVG, in the colours of reference/support/palette.py (see draw.py)."""

from xml.sax.saxutils import escape

from reference.support.palette import GREY, INK, MIDDLE

HOLLOW = ""
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


class Drawing:
    """Boxes, text and arrows on a canvas of `width` by `height`."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="{FONT}" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{MIDDLE}"/></marker></defs>',
        ]

    def text(self, x: float, y: float, label: str, size: float = 13, anchor: str = "start", bold: bool = False) -> None:
        """Lines of text, the first with its baseline at y."""
        self._text(x, y, label, size, anchor, MIDDLE, bold)

    def inner(self, x: float, y: float, label: str) -> None:
        """Text on a box, around x."""
        self._text(x, y, label, 12, "middle", INK)

    def _text(self, x: float, y: float, label: str, size: float, anchor: str, fill: str, bold: bool = False) -> None:
        weight = ' font-weight="600"' if bold else ""
        for i, line in enumerate(label.split("\n")):
            self.lines.append(
                f'<text x="{x:g}" y="{y + i * size * 1.3:g}" font-size="{size:g}" text-anchor="{anchor}" '
                f'fill="{fill}"{weight}>{escape(line)}</text>'
            )

    def box(self, x: float, y: float, w: float, h: float, label: str = "", fill: str = GREY, size: float = 12) -> None:
        """A box with its label in the middle; HOLLOW is a dashed outline."""
        look = f'fill="{fill}" stroke="{INK}" stroke-opacity=".45"'
        if fill == HOLLOW:
            look = f'fill="none" stroke="{MIDDLE}" stroke-dasharray="4 3"'
        self.lines.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" {look}/>')
        if label:
            top = y + h / 2 - label.count("\n") * size * 0.65 + size * 0.36
            self._text(x + w / 2, top, label, size, "middle", MIDDLE if fill == HOLLOW else INK)

    def arrow(self, *points: float, dashed: bool = False, both: bool = False) -> None:
        """An arrow through points x, y, x, y, ..."""
        pairs = " ".join(f"{a:g},{b:g}" for a, b in zip(points[::2], points[1::2], strict=True))
        extra = (' stroke-dasharray="4 3"' if dashed else "") + (' marker-start="url(#tip)"' if both else "")
        look = f'fill="none" stroke="{MIDDLE}" stroke-width="1.5" marker-end="url(#tip)"'
        self.lines.append(f'<polyline points="{pairs}" {look}{extra}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A thin line."""
        self.lines.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{MIDDLE}" stroke-width="1"/>')

    def svg(self) -> str:
        """The file's text."""
        return "\n".join([*self.lines, "</svg>", ""])
