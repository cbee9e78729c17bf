"""What `convert` has done to each module, as a table to read."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


class Entry(NamedTuple):
    """What became of one module.

    Attributes:
        was: the name of its class.
        now: the name of the layer in its place; None where it stays.
        why: why it stays, or what is to be known of the new layer.
    """

    was: str
    now: str | None
    why: str


class Conversion:
    """What `convert` has done; `str()` is a table in which modules that differ in a number share a row.

    Attributes:
        entries: name → entry, of every module with parameters of its own.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    @property
    def converted(self) -> dict[str, str]:
        """Name → the layer in its place, of the modules that were replaced."""
        return {name: entry.now for name, entry in self.entries.items() if entry.now is not None}

    @property
    def skipped(self) -> dict[str, str]:
        """Name → why, of the modules that stay."""
        return {name: entry.why for name, entry in self.entries.items() if entry.now is None}

    def __str__(self) -> str:
        patterns = {name: (_NUMBER.sub("*", name), entry) for name, entry in self.entries.items()}
        counts = Counter(patterns.values())
        rows = [("module", "count", "was", "is now", "why")]
        for name, (pattern, entry) in patterns.items():
            count = counts.pop((pattern, entry), 0)  # each kind once, where it comes first
            if count:
                now = "as it was" if entry.now is None else entry.now
                rows.append(((name if count == 1 else pattern) or "(model)", str(count), entry.was, now, entry.why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return f"Conversion({len(self.converted)} converted, {len(self.skipped)} skipped)"
