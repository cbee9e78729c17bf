"""How every picture of the lessons looks: a colour for each tensor, as in docs/drawings, and the style.

The palette is Okabe and Ito's, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/). E4M3 holds
x and w, E5M2 gradients: a format has the colour of what it holds.
"""

from collections.abc import Callable

import matplotlib.pyplot as plt

from optimized.bench import plots

X, W, Y, GRAD = plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE  # x, w, y, and gradients
WRONG = plots.RED  # a wrong word, an error, a warning
GREY, PALE = plots.GREY, plots.PALE  # whatever is no tensor
INK, LABEL = plots.INK, plots.LABEL  # text and lines; text beside them
E4M3, E5M2 = X, GRAD


def style() -> None:
    """Set matplotlib's style for a lesson."""
    plt.rcParams.update(
        {
            **plots.STYLE,
            "figure.dpi": 80,
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "lines.linewidth": 2,
        }
    )


def claim(condition: object, text: str) -> None:
    """Print ✓ and the text if the condition holds, ✗ and the text if it does not."""
    print("✓" if condition else "✗", text)


def play(function: Callable[..., object], **controls: object) -> None:
    """The function with sliders or boxes for its arguments; without ipywidgets, with its defaults."""
    try:
        from ipywidgets import interact
    except ImportError:
        function()
    else:
        interact(function, **controls)
