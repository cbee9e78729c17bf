"""How every picture of the lessons looks: a colour for each tensor, as in docs/drawings, and the style.

The palette is Okabe and Ito's, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/). E4M3 holds
x and w, E5M2 gradients: a format has the colour of what it holds.
"""

import matplotlib.pyplot as plt

X, W, Y, GRAD = "#56b4e9", "#e69f00", "#2fb58c", "#cc79a7"  # x, w, y, and gradients
WRONG = "#d55e00"  # a wrong word, an error, a warning
GREY, PALE = "#b9c0c8", "#dfe3e8"  # whatever is no tensor
INK, LABEL = "#101418", "#5b6876"  # text and lines; text beside them
E4M3, E5M2 = X, GRAD


def style() -> None:
    """Set matplotlib's style for a lesson."""
    plt.rcParams.update(
        {
            "figure.dpi": 80,
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": LABEL,
            "axes.labelcolor": INK,
            "axes.titlesize": 10.5,
            "axes.titlelocation": "left",
            "xtick.color": LABEL,
            "ytick.color": LABEL,
            "legend.frameon": False,
            "lines.linewidth": 2,
        }
    )
