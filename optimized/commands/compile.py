"""Compile, ahead of time, every kernel that the layers launch at their defaults, so that no step waits for a compiler.

It needs no GPU. Each compiled kernel goes to the cache (~/.cache/twin-engine/cubin, or under XDG_CACHE_HOME) at once: a
run that is interrupted leaves what it has compiled, and the next run goes on from there.
"""

import argparse
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from optimized import ahead, compiler, defaults
from optimized.commands import CommandError, check_folder, positive
from optimized.device import MissingDependency
from reference import files

SUMMARY = "compile every kernel that the layers launch at their defaults, ahead of time"
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=positive, default=None, help="kernels at a time (default: one for each core)")


def run(args: argparse.Namespace, console: Console) -> int:
    folder = files.cache_folder("cubin")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"the cache's folder {folder} cannot be made ({error.strerror}).") from error
    check_folder("the cache", folder)
    begun = time.perf_counter()
    try:
        wanted = defaults.configurations()
        missing = ahead.missing(wanted)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("compiling for sm_90a", total=len(missing))
            ahead.build(missing, args.jobs or ahead.cores(), lambda: progress.advance(task))
    except KeyboardInterrupt:
        console.print(
            "Stopped. What is compiled stays, and so does what is under way; `twin compile` goes on from there."
        )
        return INTERRUPTED
    except (MissingDependency, compiler.CompileError) as error:
        raise CommandError(str(error)) from error
    seconds, there = time.perf_counter() - begun, len(wanted) - len(missing)
    console.print(f"{len(missing)} kernels compiled, {there} were there, in {seconds:.0f} s: {folder}", soft_wrap=True)
    return 0
