"""What the commands show: their cases, tables and the walkthrough's report, compared with tests/golden/commands.

A test that fails shows the first lines that differ; where the change was meant, record it with
`PYTHONPATH=.:tests python tests/snapshots.py` and read the diff.
"""

import argparse
import functools
import hashlib
import io
import itertools
import re
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import figures
import pytest
import snapshots
import torch
from dry_gpu import DryGpu
from rich.console import Console
from torch.overrides import TorchFunctionMode

from optimized import measure
from optimized.commands import corpus, parity_cases, parity_inputs, walkthrough
from optimized.commands.language_model import Settings
from optimized.commands.report import Report
from optimized.commands.sides import Tally
from optimized.commands.steps import linear, number_line, recorded, training, tutorial
from optimized.commands.steps.style import styled

FOLDER = "commands"


def content(x: torch.Tensor) -> str:
    """Shape, dtype and a digest of the words."""
    x = x.detach().contiguous()
    words = hashlib.sha256(x.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:10]
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} {words}"


class Uploads(TorchFunctionMode):
    """Notes what goes from the CPU to the GPU."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_gpu = any("cuda" in str(one) for one in (*args[1:], *kwargs.values()) if not isinstance(one, torch.Tensor))
        if func is torch.Tensor.to and to_gpu and args[0].device.type == "cpu":
            self.lines.append(f"to the GPU: {content(args[0])}")
        if func is torch.tensor and to_gpu:
            self.lines.append(f"to the GPU: {args[0]}")
        return func(*args, **kwargs)


def of(value: Any) -> str:
    """An argument of a case."""
    if isinstance(value, functools.partial):
        keywords = [f"{key}={of(one)}" for key, one in value.keywords.items()]
        return f"{of(value.func)}({', '.join([*map(of, value.args), *keywords])})"
    if isinstance(value, torch.Tensor):
        return content(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(of, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{key}={of(one)}' for key, one in value.items())})"
    return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else str(value)


def run_of_parity_cases() -> snapshots.Sections:
    """Every case, and what the ops among those that are only compared live get and launch."""
    found = list(parity_cases.cases())
    listed = [f"{case.op} | {case.name} | live={case.live} | {of(case.run)}" for case in found]
    notes: list[str] = []
    for case in found:
        if case.live and not case.run.func.__module__.endswith("layers"):  # type: ignore[attr-defined]
            with DryGpu() as gpu, Uploads(gpu.lines):
                outputs = case.run(torch.device("cuda"))
            notes += [f"-- {case.op}, {case.name}", *gpu.lines]
            notes += [f"{case.key(name)}: {x.dtype} {list(x.shape)}" for name, x in outputs.items()]
    return {"cases": (listed, 100), "live": (snapshots.repeats(notes), 40)}


def run_of_parity_inputs() -> snapshots.Sections:
    """What Philox draws for the cases."""
    lines = [f"every word: {content(parity_inputs.every_word(dtype))}" for dtype in parity_inputs.WIDE]
    for dtype, shape, seed in itertools.product(parity_inputs.WIDE, ((1, 7), (40, 3)), (1, 2)):
        lines.append(f"numbers {shape} {seed}: {content(parity_inputs.numbers(shape, dtype, seed))}")
    for dtype, seed in itertools.product(parity_inputs.FP8, (1, 2)):
        lines.append(f"codes {seed}: {content(parity_inputs.codes((16, 32), dtype, seed))}")
    return {"inputs": (lines, 100)}


class Pictures(Report):
    """A report whose pictures are the lines of their figures."""

    def picture(self, figure: Any, caption: str, alternative: str) -> None:
        self._body += [f"<figure {alternative}>", *figures.lines(figure, digits=3), f"</figure {caption}>"]


def lines_of(report: Report) -> list[str]:
    """Its text, a paragraph or a row of a table per line."""
    text = re.sub(r"(</tr>|</p>|</h2>|</figcaption>|</pre>)", "\\1\n", "\n".join(report._body))
    return [line for line in text.splitlines() if line.strip()]


def made_up_text() -> corpus.Corpus:
    """Bytes that are the same with every Python."""
    data = b"".join(b"def f%d(x):\n    return x + %d\n\n" % (i * i, i) for i in range(400))
    return corpus.Corpus(data=data, files=3, digest="of the day")


def run_of_walkthrough() -> snapshots.Sections:
    """The steps of the report, the training with a tiny model on text that is made up."""
    settings = Settings(**{**walkthrough.QUICK, "steps": 6})
    bars: list[str] = []

    def bar(name: str, total: int) -> Callable[[], None]:
        bars.append(f"{name}: {total}")
        return lambda: bars.append(name)

    found: dict[str, tuple[list[str], int]] = {}
    clock = itertools.count()
    steps: dict[str, Callable[[Report], Any]] = {
        "number line": number_line.run,
        "linear": linear.run,
        "tutorial": lambda report: tutorial.run(report, bar),
        "recorded": lambda report: recorded.run(report, bar),
        "training": lambda report: training.run(report, made_up_text(), settings, bar),
    }
    with styled(), mock.patch.object(training, "time", types.SimpleNamespace(perf_counter=lambda: next(clock))):
        for name, step in steps.items():
            report = Pictures("title", "subtitle")
            outcome = step(report)
            found[name] = [str(outcome), *lines_of(report)], 70
    return {**found, "bars": (snapshots.repeats(bars), 20)}


RUNS: dict[str, Callable[[], snapshots.Sections]] = {
    "parity_cases": run_of_parity_cases,
    "parity_inputs": run_of_parity_inputs,
    "walkthrough": run_of_walkthrough,
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_shown_is_what_is_recorded(name: str) -> None:
    snapshots.check(FOLDER, name, RUNS[name]())
