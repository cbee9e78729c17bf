"""Speed against the experts' libraries, and the list of products that equal cuBLASLt's in every word.

On a machine with a Hopper GPU the benchmarks run: ours and theirs in one run, interleaved. Elsewhere the results
recorded on an H200 are shown (docs/results), and where the kernels have changed since, that is said. `--list` says
what there is.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from optimized import measure
from optimized.commands import CommandError, check_folder, tables
from optimized.device import hopper

SUMMARY = "speed against cuBLASLt and the device copy; without a Hopper GPU, the recorded results"
BENCHMARKS = {module.NAME: module for module in tables.BENCHMARKS}
# Measured by programs of their own, which take minutes and compare words too; here they are only shown.
APART = {
    "gpu_suite": "PYTHONPATH=. python tests/gpu_suite.py",
    "mutation": "PYTHONPATH=. python tests/mutation.py --count 300 --seed 1",
}
WHAT = {
    **{name: module.WHAT for name, module in BENCHMARKS.items()},
    "gpu_suite": "every op and layer against the CPU, in every bit: how many tests passed",
    "mutation": "changes of the Python source that the fast tests see",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `twin bench`."""
    parser.add_argument("name", nargs="?", choices=sorted({*BENCHMARKS, *APART}), help="one benchmark; default: all")
    parser.add_argument("--list", action="store_true", help="name the benchmarks, what each measures, and its results")
    parser.add_argument("--recorded", action="store_true", help="show the recorded results even on a Hopper machine")
    parser.add_argument("--table", action="store_true", help="print the recorded results as README's Markdown tables")
    parser.add_argument("--write", action="store_true", help="after measuring, replace the files in docs/results")


def _list(console: Console) -> None:
    """One line per benchmark: what it measures, and when that was recorded."""
    table = Table(box=None, pad_edge=False)
    for column in ("benchmark", "what", "recorded"):
        table.add_column(column, no_wrap=column != "what")
    for name in (*BENCHMARKS, *APART):
        payload = tables.load(name)
        recorded = "not yet" if payload is None else payload["provenance"]["date"][:10]
        if payload is not None and measure.outdated(payload):
            recorded += ", before the last change"
        table.add_row(name, escape(WHAT[name]), escape(recorded))
    console.print(table)


def _show(console: Console, found: list[tables.Table]) -> None:
    for one in found:
        title, note = escape(one.title), escape(one.note)
        table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
        for column in one.columns:
            table.add_column(escape(column), justify="left" if column == one.columns[0] else "right")
        for row in one.rows:
            table.add_row(*map(escape, row))
        console.print(table)


def _measure(names: list[str], console: Console, write: bool) -> list[tables.Table]:
    found: list[tables.Table] = []
    with Progress(console=console) as progress:
        for name in names:
            task = progress.add_task(f"measuring {name}", total=1.0)
            payload = BENCHMARKS[name].run(lambda done, task=task: progress.update(task, completed=done))
            found += tables.BUILDERS[name](payload)
            if write:
                console.print(f"written: {measure.write_result(name, payload)}")
    return found


def run(args: argparse.Namespace, console: Console) -> int:
    """Run `twin bench`."""
    if args.list:
        _list(console)
        return 0
    names = [args.name] if args.name else [*BENCHMARKS, *APART]
    live = hopper() is not None and not args.recorded and not args.table
    if args.write and not live:
        raise CommandError("--write stores what was measured, and nothing is measured here: it needs a Hopper GPU.")
    if args.write:
        check_folder("--write", measure.RESULTS)
    if args.table:
        print(tables.markdown(names))
        return 0
    if live:
        for name in (name for name in names if name in APART):
            console.print(f"{name} is measured apart, by `{APART[name]}`; `twin bench --recorded` shows its results.")
        _show(console, _measure([name for name in names if name in BENCHMARKS], console, args.write))
        return 0
    console.print("Recorded on an H200, not measured now (no Hopper GPU here, or --recorded).")
    missing = [name for name in names if tables.load(name) is None]
    for name in missing:
        console.print(f"{Path('docs/results') / name}.json is not there: this result has not been recorded.")
    _show(console, [table for name in names for table in tables.recorded(name)])
    return 0
