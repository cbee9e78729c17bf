"""A request that a command cannot meet."""

import tempfile
from pathlib import Path


class CommandError(Exception):
    """A request that cannot be met; its text is the sentence that the user reads."""


def check_folder(option: str, folder: Path) -> None:
    """Refuse, before the work begins, a folder that `option` cannot write to."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CommandError(f"{option}: {folder} is not a folder that can be written to ({error.strerror}).") from error
