"""The look of the report's pictures. Figures are made without pyplot: no window, no global state, nothing to close."""

from contextlib import AbstractContextManager
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

COLOURS = {
    "fp32": "#6b7785",
    "bf16": "#2456a6",
    "fp8": "#d1682b",
    "E4M3": "#d1682b",
    "E5M2": "#7a3f9d",
    "input": "#d1682b",
    "weight": "#2456a6",
    "grad_output": "#7a3f9d",
    "good": "#1a7f4b",
}

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": "#1d2733",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "xtick.color": "#5b6876",
    "ytick.color": "#5b6876",
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
