"""Compile, ahead of time, every kernel that the layers launch at their defaults, so that no step waits for a compiler.

It needs no GPU. Each compiled kernel goes to the cache (~/.cache/twin-engine/cubin, or under XDG_CACHE_HOME) at once: a
run that is interrupted leaves what it has compiled, and the next run goes on from there.

In a clone, `--wheel` also packs what was compiled into .wheel/cubins. A wheel that is built after it takes that along,
and compiles nothing on a machine with the same NVRTC.
"""

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from optimized import defaults, measure
from optimized.commands import CommandError, check_folder, positive
from optimized.cuda import compiler, precompile, wheel_cubins
from optimized.cuda.device import MissingDependency
from reference.support import files

SUMMARY = "compile every kernel that the layers launch at their defaults, ahead of time"
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=positive, default=None, help="kernels at a time (default: one for each core)")
    parser.add_argument(
        "--wheel", action="store_true", help="pack the kernels into wheels that are built in this clone"
    )


def _pack(wanted: list[precompile.Configuration], folder: Path, console: Console) -> None:
    """Write the binaries that .wheel/hook.py puts into a wheel."""
    entries: dict[str, dict[str, bytes]] = {}
    for kernel, defines in wanted:
        name, content = compiler.entry(kernel, defines)
        entries.setdefault(kernel, {})[name] = content
    kernel, defines = wanted[0]
    first = [kernel, defines, compiler.key(kernel, defines)]
    size = wheel_cubins.write(folder, entries, {"nvrtc": compiler.nvrtc_version(), "first": first})
    console.print(f"packed: {len(wanted)} kernels, {size / 1e6:.1f} MB: {folder}", soft_wrap=True)


def run(args: argparse.Namespace, console: Console) -> int:
    pack = measure.repository("--wheel") / ".wheel" / "cubins" if args.wheel else None
    folder = files.cache_folder("cubin")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"the cache's folder {folder} cannot be made ({error.strerror}).") from error
    check_folder("the cache", folder)
    begun = time.perf_counter()
    try:
        wanted = defaults.configurations()
        missing = precompile.missing(wanted)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("compiling for sm_90a", total=len(missing))
            precompile.build(missing, args.jobs or precompile.cores(), lambda: progress.advance(task))
    except KeyboardInterrupt:
        console.print(
            "Stopped. What is compiled stays, and so does what is under way; `twin compile` goes on from there."
        )
        return INTERRUPTED
    except (MissingDependency, compiler.CompileError) as error:
        raise CommandError(str(error)) from error
    seconds, there = time.perf_counter() - begun, len(wanted) - len(missing)
    console.print(f"{len(missing)} kernels compiled, {there} were there, in {seconds:.0f} s: {folder}", soft_wrap=True)
    if pack is not None:
        _pack(wanted, pack, console)
    return 0
