"""Run a recorded training step again on this CPU, and name the first number that differs.

The file is one that `te.record` has written, on a GPU or a CPU. Every op of the step that has known bits runs again by
its definition in `reference`; its inputs and its results are compared with what was recorded. A page shows for each
tensor amax, scale, saturation, underflow and SQNR, and where NaN and infinity first appear. The exit code is 0 if every
word is the same, 1 if one differs, and 2 if the file cannot be replayed.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from optimized.commands import CommandError, outputs
from optimized.commands.replay_page import page
from reference.inspect.recorded_step import file
from reference.inspect.recorded_step.replay import Refused, Result, replay
from reference.inspect.recorded_step.statistics import Statistics
from reference.inspect.recorded_step.words import coverage, in_words

SUMMARY = "run a recorded training step again on a CPU: the first number that differs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the file of a recorded step (te.record)")
    parser.add_argument(
        "--output", type=Path, default=Path("twin_replay.html"), help="the page (default: ./twin_replay.html)"
    )


def verdict(recording: file.Recording, result: Result) -> list[str]:
    """What was found, line by line."""
    how = "Different bits" if not result.equal else "The same bits" if result.ops else "Nothing judged"
    first = f"{how}: {coverage(recording, result)}."
    aside = (
        f"Compared: {result.words:,} words of results, and {result.looks:,} tensors between those that wrote and "
        f"read them. Ops that are not judged had the inputs that were left for them; what they computed is not known."
    )
    if result.equal:
        return [first, aside]
    lines = [first, f"First: {in_words(recording, result.differences[0])}"]
    if len(result.differences) > 1:
        lines.append(f"{len(result.differences) - 1} more tensors differ, each judged by what the other device had.")
    if result.ended is not None:
        lines.append(f"Nothing after op {result.ended} was compared: what the other device had there is not known.")
    return lines


UNCHECKED = (
    "The file has version 1 of the format, without checksums: whether its digests and random states are whole cannot "
    "be checked."
)


def origin(recording: file.Recording) -> str:
    """Where and when a step was recorded."""
    about = recording.about["provenance"]
    return f"{len(recording.ops)} ops, recorded on {about['gpu'] or 'a CPU'} at {about['date']}, torch {about['torch']}"


def run(args: argparse.Namespace, console: Console) -> int:
    outputs.check("--output", args.output, outputs.REPLAY)
    try:
        recording = file.read(args.file)
        statistics = Statistics(recording)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("replaying", total=len(recording.ops))

            def observe(number: int, op: file.Op, *tensors: list[torch.Tensor]) -> None:
                progress.update(task, completed=number, description=op.at or "replaying")
                statistics(number, op, *tensors)

            result = replay(recording, observe)
    except FileNotFoundError as error:
        raise CommandError(str(error)) from error
    except Refused as error:
        raise CommandError(f"{args.file} cannot be replayed: {error}") from error
    lines = [*verdict(recording, result), *([] if recording.checked else [UNCHECKED])]
    for line in (f"{args.file}: {origin(recording)}", *lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    outputs.write(
        "--output", args.output, outputs.REPLAY, page(recording, result, statistics, origin(recording), lines)
    )
    console.print(f"Report: {args.output.resolve()}", markup=False, highlight=False, soft_wrap=True)
    return 0 if result.equal else 1
