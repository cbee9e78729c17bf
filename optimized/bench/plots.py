"""A figure of docs/, drawn and written, in the colours and the style of the lessons (notebooks/pictures.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from optimized import measure
from reference.support.palette import BLUE, GREEN, GREY, INK, LABEL, ORANGE, PALE, PURPLE, RED

__all__ = ["BLUE", "GREEN", "GREY", "INK", "LABEL", "ORANGE", "PALE", "PURPLE", "RED", "STYLE", "drawing"]

STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LABEL,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "xtick.color": LABEL,
    "ytick.color": LABEL,
    "legend.frameon": False,
}


@contextmanager
def drawing(name: str, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """A figure and its axes to draw on; at the end of the context the figure is written to docs/<name>.png."""
    path = measure.repository(f"docs/{name}.png") / "docs" / f"{name}.png"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with matplotlib.rc_context(STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", **options)
        yield figure, axes
        measure.write_plot(path, figure)
        plt.close(figure)
