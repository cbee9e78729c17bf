"""The picture of `twin drill`: what became of flipped bits, by what was flipped."""

from typing import Any

from optimized.bench import plots

_SHOWN = {
    "word": ("the op and the word named", plots.BLUE),
    "op": ("the op named", plots.GREEN),
    "later": ("a later op named", plots.PURPLE),
    "no effect": ("no result changed", plots.PALE),
    "not judged": ("by an op that is not judged", plots.ORANGE),
    "missed": ("missed", plots.RED),
}


def plot(payload: dict[str, Any]) -> None:
    """Write docs/drill.png."""
    kinds = list(payload["kinds"].items())
    with plots.drawing("drill", 1, 1, (8.0, 0.34 * len(kinds) + 1.4)) as (_, axes):
        ends = [0.0] * len(kinds)
        for outcome, (label, colour) in _SHOWN.items():
            shares = [100 * found["outcomes"][outcome] / found["flips"] for _, found in kinds]
            if any(shares):
                axes.barh(range(len(kinds)), shares, left=ends, color=colour, label=label, height=0.7)
            ends = [end + share for end, share in zip(ends, shares, strict=True)]
        axes.set_yticks(range(len(kinds)), [kind for kind, _ in kinds])
        axes.invert_yaxis()
        axes.set(xlim=(0, 100), xlabel="% of the flips")
        axes.legend(loc="lower left", bbox_to_anchor=(-0.1, 1.0), ncols=3, fontsize=9)
