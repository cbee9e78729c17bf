"""Walk from the FP8 number line to a trained model, and write an HTML report of it.

The steps: the FP8 number line; one Linear in plain PyTorch, in 16 bits and in FP8; one Transformer layer in plain
PyTorch, of modules, of fused modules, as one TransformerLayer and in FP8; the CPU predicting words that an H200
recorded; a small GPT that learns the standard library's sources in bf16 and in FP8; the layer's speed. On a machine
with a Hopper GPU every step runs on both sides, and the exit code is 1 if any word differs.
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from optimized.commands import CommandError, outputs, positive
from optimized.commands.report import Report
from optimized.commands.steps import Outcome, linear, number_line, recorded, speed, training, tutorial
from optimized.commands.steps import Progress as StepProgress
from optimized.commands.steps.style import styled
from optimized.cuda.device import hopper
from optimized.training import corpus
from optimized.training.settings import Settings

SUMMARY = "begin here: from the FP8 number line to a trained model, with an HTML report"
QUICK: dict[str, Any] = {"steps": 12, "rows": 2, "hidden": 32, "sequence": 32}
QUICK_FILES = 40
FULL_STEPS = 240


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path("twin_report.html"), help="the report (default: ./twin_report.html)"
    )
    parser.add_argument("--steps", type=positive, default=None, help=f"training steps (default: {Settings().steps})")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help=f"train for {FULL_STEPS} steps: minutes on a CPU")
    length.add_argument("--quick", action="store_true", help="a tiny model for a few steps, to see that it all runs")


def _settings(args: argparse.Namespace) -> Settings:
    if args.full and args.steps is not None:
        raise CommandError(f"--full trains for {FULL_STEPS} steps; without --steps {args.steps} it is accepted.")
    settings = replace(Settings(), **(QUICK if args.quick else {"steps": FULL_STEPS} if args.full else {}))
    return settings if args.steps is None else replace(settings, steps=args.steps)


def _machine() -> str:
    gpu = hopper()
    device = torch.cuda.get_device_name(gpu) if gpu is not None else "no Hopper GPU: everything ran on the CPU"
    threads = torch.get_num_threads()
    versions = f"Python {platform.python_version()} · torch {torch.__version__} · {threads} thread{'s' * (threads > 1)}"
    return f"{time.strftime('%Y-%m-%d %H:%M')} · {device} · {versions}"


def _steps(report: Report, settings: Settings, files: int | None, bars: StepProgress, quick: bool) -> Iterator[Outcome]:
    """Run the steps in order."""
    yield number_line.run(report)
    yield linear.run(report)
    yield tutorial.run(report, bars)
    yield recorded.run(report, bars)
    yield training.run(report, corpus.read(files), settings, bars)
    yield speed.run(report, live=not quick)


def _line(outcome: Outcome) -> str:
    """The terminal's line about a step."""
    mark = {True: " [green]equal[/]", False: " [red]DIFFERENT[/]", None: ""}[outcome.equal]
    return f"[bold]{escape(outcome.step)}:[/] {escape(outcome.result)}{mark}"


def run(args: argparse.Namespace, console: Console) -> int:
    settings = _settings(args)
    outputs.check("--output", args.output, outputs.WALKTHROUGH)
    report = Report(
        "FP8 training, bit by bit",
        "A walk from the FP8 number line to a model trained in FP8, in which a CPU computes exactly the bits "
        f"that a Hopper GPU computes.<br><small>{_machine()}</small>",
    )
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), *bar, console=console) as progress, styled():

        def bars(name: str, total: int) -> Callable[[], None]:
            """Add a bar and return a function that advances it by one."""
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        found = []
        for outcome in _steps(report, settings, QUICK_FILES if args.quick else None, bars, args.quick):
            found.append(outcome)
            progress.console.print(_line(outcome), highlight=False)
            # The part that is finished can be read.
            outputs.write("--output", args.output, outputs.WALKTHROUGH, report.html())
    report.section("What this run found")
    report.text(
        "Steps 3 and 4 compare every bit. Step 5 trains one small model, which is an example and no proof for large "
        "ones. Step 6 is a measurement on a GPU."
    )
    verdicts = {True: "equal in every bit", False: "DIFFERENT", None: "–"}
    report.table(["step", "result", "bits"], [[o.step, o.result, verdicts[o.equal]] for o in found])
    outputs.write("--output", args.output, outputs.WALKTHROUGH, report.html())
    console.print(f"Report: {args.output.resolve()}", soft_wrap=True)
    return 1 if any(outcome.equal is False for outcome in found) else 0
