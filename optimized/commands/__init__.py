"""The command `twin`: one file per subcommand, each with `SUMMARY`, `add_arguments(parser)` and `run(args, console)`.

Exit codes: 0 success; 1 something that must be equal differs; 2 the request cannot be met, and one sentence on stderr
says why; 130 the command was interrupted (`twin compile`, `twin train`).
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

from optimized.commands.errors import CommandError, check_folder
from reference.support import files
from reference.version import __version__

__all__ = ["CommandError", "check_folder", "main", "parser", "positive"]
SUBCOMMANDS = ("walkthrough", "train", "parity", "replay", "diff", "drill", "bench", "compile", "info")


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises its refusals as `CommandError`."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog}: {message}. `{self.prog} --help` lists what is accepted.")


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of `twin` with the subcommands that `argv` may mean: the one that it names, or all.

    The others are not imported: matplotlib, for one, takes as long as the rest.
    """
    first = argv[0] if argv else ""
    names = [first] if first in SUBCOMMANDS else [] if first == "--version" else SUBCOMMANDS
    top = _Parser(prog="twin", description="FP8 training with two engines that compute the same bits.")
    top.add_argument("--version", action="version", version=f"twin {__version__}")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name in names:
        module = importlib.import_module(f"{__name__}.{name}")
        sub = subparsers.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run `twin` with `argv` (default: the process's arguments) and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parser(argv).parse_args(argv)
        return int(args.run(args, Console()))
    except (CommandError, files.NotWritten, files.Damaged) as error:
        print(error, file=sys.stderr)
        return 2
