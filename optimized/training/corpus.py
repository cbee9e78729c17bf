"""Text to train on, as bytes: files of yours, or, without a download, the sources of Python's standard library.

Files are in the order of their paths. Folders that differ between builds of one Python version (site-packages, tests)
are left out, so that a version gives the same text on every machine. `Corpus.digest` identifies the text.
"""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from reference.numbers import philox
from reference.support import files

SKIPPED = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3",
    "pydoc_data", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """`data` uint8 [bytes] and the number of files that it came from."""

    data: np.ndarray
    files: int

    @property
    def digest(self) -> str:
        """The first 12 hex digits of the SHA-256 of the text."""
        return hashlib.sha256(self.data.tobytes()).hexdigest()[:12]

    def split(self, held_out: float = 0.05) -> tuple["Corpus", "Corpus"]:
        """The text to train on, and the last part of the bytes, which is held out."""
        cut = len(self.data) - int(len(self.data) * held_out)
        return Corpus(self.data[:cut], self.files), Corpus(self.data[cut:], self.files)

    def batch(self, seed: int, step: int, rows: int, sequence: int) -> torch.Tensor:
        """`rows` windows at places drawn by seed and step, and the byte after each: uint8 [sequence + 1, rows]."""
        words = philox.element_words(seed, step * rows, rows)[0]
        places = (words % (len(self.data) - sequence)).astype(np.int64)
        return torch.from_numpy(self.data[np.arange(sequence + 1)[:, None] + places])


def sources() -> list[Path]:
    """The standard library's Python files, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (
        path
        for path in root.rglob("*.py")
        if not SKIPPED & set(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def joined(paths: Sequence[Path]) -> Corpus:
    """The bytes of files, one after the other."""
    return Corpus(np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8), len(paths))


def read(limit: int | None = None) -> Corpus:
    """Read the sources, at most `limit` files."""
    return joined(sources()[:limit])


def read_files(paths: Sequence[Path], without: Path | None = None) -> Corpus:
    """Read files, and of folders every file inside whose name has no leading dot, in the order of their paths.

    Of folders, what is in the folder `without` is left out: a run's own files are no text.

    Raises:
        FileNotFoundError: there is no such file or folder; the text names it.
        reference.support.files.Damaged: one cannot be read.
    """
    found: list[Path] = []
    for path in paths:
        if not os.path.lexists(path):
            raise FileNotFoundError(f"the text {str(path)!r} is not there; a file, or a folder of files, is accepted.")
        if path.is_dir():
            inside = {one.relative_to(path): one for one in path.rglob("*") if one.is_file()}
            shown = [
                one
                for one, whole in inside.items()
                if not any(part.startswith(".") for part in one.parts)
                and not (without is not None and whole.resolve().is_relative_to(without.resolve()))
            ]
            found += [inside[one] for one in sorted(shown, key=lambda one: one.as_posix())]
        else:
            found.append(path)
    return Corpus(np.frombuffer(b"".join(files.read(one) for one in found), np.uint8), len(found))
