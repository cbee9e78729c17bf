"""Where two runs part: the first step, op and word that differ, and what feeds it.

    twin diff a.trail b.trail                  trails of two runs (te.trail): the first step and tensor
    twin diff run.rank*.trail                  the ranks of one run: which of them differs from the others
    twin diff a.safetensors b.safetensors      recordings of one step of each (te.record): the first op and word

The exit code is 0 if everything is the same, 1 if something differs, and 2 if the files cannot be compared. A page
shows how to use the three one after the other (docs/two_runs.md).
"""

import argparse
from pathlib import Path

from rich.console import Console

from optimized.commands import CommandError
from reference.inspect.diff import diff

SUMMARY = "where two runs part: the first step, op and word that differ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="two recordings, or two or more trails")


def run(args: argparse.Namespace, console: Console) -> int:
    try:
        found = diff(*args.files)
    except (FileNotFoundError, ValueError) as error:
        raise CommandError(f"twin {error}" if str(error).startswith("diff: ") else str(error)) from error
    for line in found.lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if found.equal else 1
