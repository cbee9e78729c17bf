"""Speed against cuBLASLt, cuDNN, PyTorch and Transformer Engine, and which GEMMs equal cuBLASLt's in every word.

Without arguments it lists the benchmarks. On a machine with a Hopper GPU it runs a benchmark: this library and others
take turns in one run. Elsewhere it shows the results that were recorded on an H200 (docs/results), and says if kernels
have changed since.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from optimized import measure
from optimized.bench.table import WORDS
from optimized.commands import CommandError, check_folder, outputs, tables
from optimized.cuda.device import hopper

SUMMARY = "speed against NVIDIA's libraries and PyTorch; without a Hopper GPU, the recorded results"
BENCHMARKS = {module.NAME: module for module in tables.BENCHMARKS}
# These are measured by programs of their own; here their results are only shown.
APART = {
    "data_parallel": "python -m optimized.bench.models.data_parallel",
    "tensor_parallel": "python -m optimized.bench.models.tensor_parallel",
    "parity": "twin parity --replay --write",
    "gpu_suite": "PYTHONPATH=. python tests/tools/gpu_suite.py",
    "mutation": "PYTHONPATH=. python tests/tools/mutation.py --count 300 --seed 1",
    "house": "PYTHONPATH=. python tests/tools/count_house.py",
    "drill": "twin drill --flips 1000 --write",
    "transformer_engine": "PYTHONPATH=. python tests/golden/record_transformer_engine.py --compare",
}
WHAT = {
    **{name: module.WHAT for name, module in BENCHMARKS.items()},
    "data_parallel": "steps of data parallel training on two GPUs",
    "tensor_parallel": "a layer that two GPUs share",
    "parity": "words of an H200 that a CPU computes again",
    "gpu_suite": "tests on a GPU, most against the CPU's bits",
    "mutation": "changes of the source that the tests notice",
    "house": "what a change costs in this tree",
    "drill": "bits flipped in a step that are found",
    "transformer_engine": "words of Transformer Engine, equal or not",
}
ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", choices=[*WHAT, ALL], help="one benchmark, or all; default: list them")
    parser.add_argument("--recorded", action="store_true", help="show the recorded results even on a Hopper machine")
    parser.add_argument("--table", action="store_true", help="print the recorded results as Markdown tables")
    parser.add_argument("--write", action="store_true", help="after measuring, replace the files in docs/results")


def _list() -> None:
    """Print a line of at most 80 columns for each benchmark: its name, what it measures, when it was recorded."""
    stale = False
    for name, what in WHAT.items():
        payload = tables.load(name)
        date = "not measured" if payload is None else payload["provenance"]["date"][:10]
        old = payload is not None and bool(measure.outdated(payload))
        stale |= old
        print(f"{name:19}{what:48}{date}{'*' * old}")
    if stale:
        print("* measured before the last change of its kernels")


def _longest_word(column: Sequence[str]) -> int:
    """Characters of what is not broken: words, and cells of up to 10 characters."""
    return max(len(word) for cell in column for word in ([cell] if len(cell) <= 10 else cell.split()))


def _fitting(columns: list[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
    """Columns side by side, as many as fit without a word being cut; the first stands at the left of each part."""
    first, *rest = columns
    part = [first]
    for column in rest:
        if len(part) > 1 and 1 + sum(_longest_word(one) + 3 for one in [*part, column]) > width:
            yield part
            part = [first]
        part.append(column)
    yield part


def _shown(columns: list[Sequence[str]], width: int) -> Table:
    """A table of columns at least as wide as their longest word; what room is left goes to numbers first."""
    widths = [_longest_word(column) for column in columns]
    room = width - 1 - 3 * len(columns) - sum(widths)
    for i in reversed(range(len(columns))):
        more = max(0, min(room, max(map(len, columns[i][1:]), default=0) - widths[i]))
        widths[i], room = widths[i] + more, room - more
    table = Table()
    for column, characters in zip(columns, widths, strict=True):
        left = column is columns[0] or column[0] in WORDS
        table.add_column(escape(column[0]), justify="left" if left else "right", width=characters, overflow="fold")
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(escape, row))
    return table


def _show(console: Console, found: list[tables.Table]) -> None:
    """Print tables; the reasons in a column "why" are numbered, and stand below."""
    for one in found:
        console.print(f"[bold]{escape(one.title)}.[/] {escape(one.how)}", highlight=False)
        columns: list[Sequence[str]] = [list(column) for column in zip(one.columns, *one.rows, strict=True)]
        whys: list[str] = []
        if one.columns[-1] == "why":
            whys = list(dict.fromkeys(why for why in columns[-1][1:] if why))
            columns[-1] = ["why", *(f"({whys.index(why) + 1})" if why else "" for why in columns[-1][1:])]
        for part in _fitting(columns, console.width):
            console.print(_shown(part, console.width))
        for number, why in enumerate(whys, 1):
            console.print(f"({number}) {escape(why)}", highlight=False)
        console.print(escape(one.note.replace("**", "")) + "\n", highlight=False)


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
    if not (args.name or args.recorded or args.table or args.write):
        _list()
        return 0
    names = [*BENCHMARKS, *APART] if args.name in (None, ALL) else [args.name]
    live = hopper() is not None and not args.recorded and not args.table
    if args.write and not live:
        raise CommandError("--write stores what was measured, and nothing is measured here: it needs a Hopper GPU.")
    if args.write:
        measure.repository("--write")
        check_folder("--write", measure.RESULTS)
        for name in (name for name in names if name in BENCHMARKS):
            outputs.check("--write", measure.RESULTS / f"{name}.json", outputs.RESULT)
    if args.table:
        print(tables.markdown(names))
        return 0
    if live:
        for name in (name for name in names if name in APART):
            console.print(f"{name} is measured by `{APART[name]}`; `twin bench {name} --recorded` shows it.")
        _show(console, _measure([name for name in names if name in BENCHMARKS], console, args.write))
        return 0
    where = "" if args.name in ("parity", "mutation", "house", "drill") else " on an H200"
    console.print(f"Recorded{where}, not measured now (no Hopper GPU here, or --recorded).")
    for name in (name for name in names if tables.load(name) is None):
        console.print(f"{Path('docs/results') / name}.json is not there: this result has not been recorded.")
    _show(console, [table for name in names for table in tables.recorded(name)])
    return 0
