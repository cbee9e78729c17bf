"""Speed against the experts' libraries, and the list of products that equal cuBLASLt's in every word.

On a machine with a Hopper GPU the benchmarks run: ours and theirs in one run, interleaved. Elsewhere the results
recorded on an H200 are shown (docs/results), and where the kernels have changed since, that is said.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from optimized import measure
from optimized.bench import cast, gemm, gemm_equality
from optimized.commands import CommandError, tables
from optimized.commands.sides import hopper

SUMMARY = "speed against cuBLASLt and the device copy; without a Hopper GPU, the recorded results"
BENCHMARKS = {module.NAME: module for module in (gemm, gemm_equality, cast)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `twin bench`."""
    parser.add_argument("--only", choices=sorted(BENCHMARKS), help="one benchmark")
    parser.add_argument("--recorded", action="store_true", help="show the recorded results even on a Hopper machine")
    parser.add_argument("--table", action="store_true", help="print the recorded results as README's Markdown tables")
    parser.add_argument("--write", action="store_true", help="after measuring, replace the files in docs/results")


def _show(console: Console, found: list[tables.Table]) -> None:
    for one in found:
        table = Table(title=one.title, title_justify="left", caption=escape(one.note), caption_justify="left")
        for column in one.columns:
            table.add_column(column, justify="left" if column == one.columns[0] else "right")
        for row in one.rows:
            table.add_row(*row)
        console.print(table)


def _measure(names: list[str], console: Console, write: bool) -> list[tables.Table]:
    found: list[tables.Table] = []
    with Progress(console=console) as progress:
        for name in names:
            task = progress.add_task(f"measuring {name}", total=1.0)
            payload = BENCHMARKS[name].run(lambda done, task=task: progress.update(task, completed=done))  # type: ignore[misc]
            found += tables.BUILDERS[name](payload)
            if write:
                console.print(f"written: {measure.write_result(name, payload)}")
    return found


def run(args: argparse.Namespace, console: Console) -> int:
    """Run `twin bench`."""
    names = [args.only] if args.only else list(BENCHMARKS)
    live = hopper() is not None and not args.recorded and not args.table
    if args.write and not live:
        raise CommandError("--write stores what was measured, and nothing is measured here: it needs a Hopper GPU.")
    if args.table:
        print(tables.markdown(names))
        return 0
    if live:
        _show(console, _measure(names, console, args.write))
        return 0
    console.print("Recorded on an H200, not measured now (no Hopper GPU here, or --recorded).")
    missing = [name for name in names if tables.load(name) is None]
    for name in missing:
        console.print(f"{Path('docs/results') / name}.json is not there: this result has not been recorded.")
    _show(console, [table for name in names for table in tables.recorded(name)])
    return 0
