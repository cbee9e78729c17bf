"""Draws and writes the figures of docs/."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from optimized import measure


@contextmanager
def drawing(name: str, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """A figure and its axes to draw on; at the end of the context the figure is written to docs/<name>.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", **options)
    yield figure, axes
    measure.write_plot(measure.ROOT / "docs" / f"{name}.png", figure)
    plt.close(figure)
