"""The file of a trail: lines of JSON, which are only ever added.

    {"twin_engine": "trail", "version": 1, "rank": 0, "ranks": 1, "tensors": [[name, dtype, shape], ...]}
    {"step": 1, "digests": "...", "crc32": ...}      of these tensors, in their order: 24 bytes each, in base64
    ...

A head comes first, and again where the tensors are others than before. A process that dies may leave a part of a line
at the end, which a reader leaves out and says so.
"""

import base64
import json
import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reference.support import files

FORMAT, VERSION = "trail", 1
BYTES = 24  # of a digest


class Named(NamedTuple):
    """A tensor of a trail: its kind and name, torch's dtype without "torch.", its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def words(self) -> int:
        """32-bit words of its bytes."""
        return -(-math.prod(self.shape) * getattr(torch, self.dtype).itemsize // 4)


@dataclass
class Trail:
    """A trail that was read.

    Attributes:
        path: its file.
        rank, ranks: which process of how many made it.
        steps: for each step, in order: the tensors and their digests. A step that was made again counts as made last.
        torn: bytes of a line that was not finished.
    """

    path: Path
    rank: int = 0
    ranks: int = 1
    steps: dict[int, tuple[tuple[Named, ...], np.ndarray]] = field(default_factory=dict)
    torn: int = 0

    @property
    def notice(self) -> str | None:
        """What was left out, in words."""
        if not self.torn:
            return None
        return f"{self.path}: the last line is not whole ({self.torn} bytes) and was left out: its process was stopped."


def head(tensors: tuple[Named, ...], rank: int, ranks: int) -> str:
    """The line that says what follows."""
    about = {"twin_engine": FORMAT, "version": VERSION, "rank": rank, "ranks": ranks}
    return json.dumps({**about, "tensors": tensors}, separators=(",", ":")) + "\n"


def line(step: int, digests: np.ndarray) -> str:
    """The line of a step; digests: int64 `[tensors, 3]`."""
    data = digests.astype("<i8").tobytes()
    text = base64.b64encode(data).decode()
    return json.dumps({"step": step, "digests": text, "crc32": zlib.crc32(data)}, separators=(",", ":")) + "\n"


def is_trail(beginning: bytes) -> bool:
    """Whether a file that begins so is a trail, or may become one."""
    mark = f'{{"twin_engine":"{FORMAT}"'.encode()
    return beginning[: len(mark)] == mark[: len(beginning)] != b""


def read(path: Path) -> Trail:
    """The trail in a file.

    Raises:
        FileNotFoundError: there is no such file.
        reference.support.files.Damaged: it is no trail, of another version, or damaged. One sentence says where.
    """
    *whole, half = files.read(path).split(b"\n")
    found = Trail(path, torn=len(half))
    tensors: tuple[Named, ...] | None = None
    for number, text in enumerate(whole, 1):
        try:
            entry = json.loads(text)
            if "twin_engine" in entry:
                tensors = _head(path, entry, found)
            elif tensors is None:
                raise ValueError("a head comes first")
            else:
                step, digests = _line(entry, len(tensors))
                found.steps.pop(step, None)
                found.steps[step] = (tensors, digests)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, files.Damaged):
                raise
            if number == 1:
                raise files.Damaged(f"{path} is no trail; te.trail writes those.") from error
            raise files.Damaged(f"{path} is damaged, at line {number} ({str(error)[:80]}).") from error
    if tensors is None and not is_trail(half):
        raise files.Damaged(f"{path} is no trail; te.trail writes those.")
    found.steps = dict(sorted(found.steps.items()))
    return found


def _head(path: Path, entry: Any, found: Trail) -> tuple[Named, ...]:
    if entry["twin_engine"] != FORMAT or entry["version"] != VERSION:
        raise files.Damaged(
            f"{path} is a {entry['twin_engine']} of version {entry['version']!r}; a {FORMAT} of version {VERSION} is "
            f"accepted."
        )
    found.rank, found.ranks = int(entry["rank"]), int(entry["ranks"])
    named = tuple(Named(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in entry["tensors"])
    for one in named:
        one.words  # noqa: B018 (refuses an unknown dtype)
    return named


def _line(entry: Any, count: int) -> tuple[int, np.ndarray]:
    data = base64.b64decode(entry["digests"], validate=True)
    if zlib.crc32(data) != entry["crc32"]:
        raise ValueError("its digests are not those that were written")
    if len(data) != count * BYTES or type(entry["step"]) is not int:
        raise ValueError(f"{count} digests and a step are accepted")
    return entry["step"], np.frombuffer(data, "<i8").reshape(count, 3)
