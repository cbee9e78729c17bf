"""What a command may write over: nothing but what the same command has written before.

`check` is asked before the work begins, and `write` asks it again: somebody may have put a file there meanwhile. An
empty file may be replaced, too. `twin compile` writes to its cache and to a clone's .wheel, which are its own.
"""

import json
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optimized.commands.errors import CommandError, check_folder
from reference.support import files

_FIRST = 1 << 14  # bytes of a file in which its mark stands


@dataclass(frozen=True)
class FileType:
    """Files that one command writes.

    Attributes:
        what: their name in a sentence.
        accepted: what an option that names one accepts.
        made: whether a file that begins with these bytes is one.
    """

    what: str
    accepted: str
    made: Callable[[bytes], bool]


def page(command: str, title: str) -> FileType:
    """A command's HTML page, known by its title."""
    mark = f"<title>{title}</title>".encode()
    return FileType(f"a page of `{command}`", "the path of an HTML file to write", lambda head: mark in head)


def _is_metrics(head: bytes) -> bool:
    try:
        line = json.loads(head.split(b"\n")[0])
    except ValueError:
        return False
    return isinstance(line, dict) and "step" in line


REPLAY = page("twin replay", "A training step, replayed")
WALKTHROUGH = page("twin walkthrough", "FP8 training, bit by bit")
STEP = FileType("a recorded step", "the path of a recording", lambda head: b'"twin_engine":"recorded step"' in head)
METRICS = FileType("metrics of `twin train`", "the path of metrics", _is_metrics)
PLOT = FileType("a picture of `twin train`", "the path of a picture", lambda head: b"twin train" in head)
# In the folder of a run that goes on a picture is the run's, which an earlier version may have made without the mark.
PICTURE = FileType("a picture", PLOT.accepted, lambda head: head.startswith(b"\x89PNG"))
RESULT = FileType("a result of `twin bench`", "the path of a result", lambda head: head.lstrip().startswith(b"{"))
RECORDING = FileType(
    "a recording of `twin parity --record`",
    "the path of a recording",
    lambda head: head.startswith(b"PK") and b"about.npy" in head,
)


def check(option: str, path: Path, file_type: FileType) -> None:
    """Refuse a path that a file of `file_type` cannot be written to, and one at which there is another file.

    Raises:
        CommandError: one sentence names the option, the path and what is there.
    """
    shown = f"{option} is {str(path)!r}"
    try:
        mode = path.stat().st_mode  # Path.exists() answers False from Python 3.14 on, where this raises
        what = None if stat.S_ISREG(mode) else "a folder" if stat.S_ISDIR(mode) else "not a file"
        if what is None and not _may_replace(path, file_type):
            raise CommandError(
                f"{shown}: there is a file that is not {file_type.what}, and it stays as it is; the path of no "
                f"file, or of {file_type.what}, is accepted."
            )
    except FileNotFoundError:
        what = None
    except (OSError, ValueError) as error:
        what = f"no path here ({getattr(error, 'strerror', None) or error})"
    if what is not None:
        raise CommandError(f"{shown}, {what}; {file_type.accepted} is accepted.")
    check_folder(shown, path.resolve().parent)


def _may_replace(path: Path, file_type: FileType) -> bool:
    with open(path, "rb") as file:
        head = file.read(_FIRST)
    return not head or file_type.made(head)


def write(option: str, path: Path, file_type: FileType, content: bytes | str) -> None:
    """Write a whole file where `check` allows it.

    Raises:
        CommandError: as `check`.
        reference.support.files.NotWritten: the disk is full, ...
    """
    check(option, path, file_type)
    files.write(path, content)
