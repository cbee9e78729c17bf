"""Real text without a download: the sources of Python's standard library, as bytes.

The files are in the order of their paths. Folders that differ between builds of one Python version (site-packages,
tests) are left out, so that a version gives the same text on every machine. `Corpus.digest` identifies the text.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from reference import philox

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

    def batch(self, seed: int, step: int, rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows` windows at places drawn by seed and step: bytes int64 [rows, context], next byte int64 [rows]."""
        words = philox.element_words(seed, step * rows, rows)[0]
        places = context + (words % (len(self.data) - context)).astype(np.int64)
        windows = self.data[places[:, None] + np.arange(-context, 0)]
        return torch.from_numpy(windows.astype(np.int64)), torch.from_numpy(self.data[places].astype(np.int64))


def sources() -> list[Path]:
    """The standard library's Python files, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (
        path
        for path in root.rglob("*.py")
        if not SKIPPED & set(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read(limit: int | None = None) -> Corpus:
    """Read the sources, at most `limit` files."""
    paths = sources()[:limit]
    return Corpus(np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8), len(paths))
