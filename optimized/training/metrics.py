"""The numbers of a run: lines of JSON, added to a file as they come, and a picture of them.

A line has `step` and what is known of it: loss, rate, norm; tokens_per_second, tflops (of the steps since the last line
that has them); held_out; sha256.
"""

import json
import math
from pathlib import Path
from typing import Any

from optimized import measure
from reference import files


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; the last one may be a part of one, which a killed process has left."""
    if not path.is_file():
        return []
    found = []
    for text in files.read(path).decode(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            found.append(line)
    return found


class Metrics:
    """The lines of one run in `path`; those after `step`, where it goes on, are removed."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.lines = [line for line in _lines(path) if line["step"] <= step]
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
        axes.legend(frameon=False)
        measure.write_plot(path, figure)
        plt.close(figure)
