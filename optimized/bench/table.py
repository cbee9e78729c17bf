"""Tables of measured results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from optimized import measure

WORDS = (
    "",
    "attention",
    "caveat",
    "compared with",
    "dtype",
    "faster",
    "idea",
    "named most often at",
    "part",
    "shape",
    "why",
)  # columns without numbers


@dataclass(frozen=True)
class Table:
    """A table of strings; `how` is one sentence that says how to read it, `note` says where its numbers come from."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    how: str
    note: str

    def __post_init__(self) -> None:
        for text in (self.title, self.how, self.note, *self.columns, *(cell for row in self.rows for cell in row)):
            if not isinstance(text, str):
                raise TypeError(f"{self.title!r}: {text!r} is in a table; strings are accepted.")

    def markdown(self) -> str:
        """The table as GitHub's Markdown."""
        lines = [f"**{self.title}.** {self.how}", "", "| " + " | ".join(self.columns) + " |"]
        # Numbers are aligned to the right, words to the left.
        sides = [" --- |" if column in WORDS else " ---: |" for column in self.columns[1:]]
        lines.append("| --- |" + "".join(sides))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.note])


def table(
    payload: dict[str, Any], title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], how: str, note: str = ""
) -> Table:
    """A table of a result; its note ends with the result's origin."""
    return Table(title, tuple(columns), tuple(map(tuple, rows)), how, f"{note} {origin(payload)}".strip())


def about(payload: dict[str, Any]) -> str:
    """GPU, versions and date of a result."""
    found = payload["provenance"]
    gpu, smi = found.get("gpu") or {}, found.get("nvidia_smi") or {}
    driver = f", driver {smi['driver_version']}" if "driver_version" in smi else ""
    versions = f"CUDA {found['cuda']}, torch {found['torch']}, CuPy {found['cupy']}"
    if found.get("transformer_engine"):
        versions += f", Transformer Engine {found['transformer_engine']}"
    return f"{gpu.get('name', 'no GPU')}{driver}, {versions}, {found['date'][:10]}."


def origin(payload: dict[str, Any]) -> str:
    """What a result is `about`, with a warning if kernels have changed since."""
    changed = measure.outdated(payload)
    warning = f" **Measured before the last change of {', '.join(changed)}.**" if changed else ""
    return about(payload) + warning


def percent(value: float) -> str:
    """A share in whole percent."""
    return f"{100 * value:.0f} %"
