"""The look of the report's pictures. Figures are made without pyplot: no window, no global state, nothing to close."""

from contextlib import AbstractContextManager
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from reference.support import palette

COLOURS = {
    "fp32": palette.FP32,
    "bf16": palette.BF16,
    "fp8": palette.FP8,
    "E4M3": palette.E4M3,
    "E5M2": palette.E5M2,
    "input": palette.X,
    "weight": palette.W,
    "output": palette.Y,
    "grad_output": palette.GRAD,
    "good": palette.RIGHT,
}

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": palette.GREY,
    "axes.labelcolor": palette.INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "xtick.color": palette.LABEL,
    "ytick.color": palette.LABEL,
    "legend.frameon": False,
    "svg.hashsalt": "twin",
    "svg.fonttype": "path",
}


def figure(width: float = 9.0, height: float = 3.2) -> Figure:
    """An empty figure of that many inches."""
    return Figure(figsize=(width, height), layout="constrained")


def styled() -> AbstractContextManager[None]:
    """The context that pictures are drawn and written in."""
    return rc_context(RC)
