"""The numbers of a run: lines of JSON, added to a file as they come, and a picture of them.

A line has `step` and what is known of it: loss, rate, norm; tokens_per_second, tflops (of the steps since the last line
that has them); held_out; sha256.
"""

import json
import math
from pathlib import Path
from typing import Any

from optimized import measure
from reference.support import files


def _lines(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The lines of a file, and the half line at its end that a killed process has left.

    Raises:
        reference.support.files.Damaged: another line is none of a run's.
    """
    if not files.is_there(path):
        return [], ""
    *whole, half = files.read(path).decode(errors="replace").split("\n")
    found = []
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not _is_line(line):
            raise files.Damaged(
                f"{path} is damaged, at line {number} ({text[:40]!r}): an object with a step and numbers is accepted; "
                f"mend it, or move the file away, and the run goes on without it."
            )
        found.append(line)
    return found, half


def _is_line(line: Any) -> bool:
    """Whether it is an object with a step, whose other values are numbers, or the text of a hash."""
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return False
    return all(isinstance(x, str) if name == "sha256" else type(x) in (int, float) for name, x in line.items())


class Metrics:
    """The lines of one run in `path`; those after `step`, where it goes on, are removed.

    Attributes:
        removed: what of them was removed, in words.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        found, half = _lines(path)
        self.lines = [line for line in found if line["step"] <= step]
        later = len(found) - len(self.lines)
        parts = [f"{later} lines of steps after {step}"] * bool(later) + ["half a line at its end"] * bool(half)
        self.removed = f"{path}: removed {' and '.join(parts)}." if parts else ""
        files.write(path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def add(self, step: int, **numbers: Any) -> None:
        """A line; numbers that are None are left out."""
        line = {"step": step, **{name: value for name, value in numbers.items() if value is not None}}
        files.append(self.path, json.dumps(line) + "\n")
        self.lines.append(line)

    def of(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have a number of this name, and the numbers."""
        found = [(line["step"], line[name]) for line in self.lines if name in line]
        return [step for step, _ in found], [value for _, value in found]

    def plot(self, path: Path) -> None:
        """Draw the losses, in bits per byte."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        for name, label, style in (("loss", "training", "-"), ("held_out", "held-out text", "o")):
            steps, losses = self.of(name)
            if steps:
                axes.plot(steps, [loss / math.log(2) for loss in losses], style, label=label, linewidth=1)
        axes.set(xlabel="step", ylabel="bits per byte")
        if axes.lines:
            axes.legend(frameon=False)
        measure.write_plot(path, figure, {"Software": "twin train"})
        plt.close(figure)
