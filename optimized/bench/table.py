"""A table of measured results: strings, a title, and a note on where its numbers come from."""

from dataclasses import dataclass
from typing import Any

from optimized import measure


@dataclass(frozen=True)
class Table:
    """A table of strings, with a note on where its numbers come from."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str

    def __post_init__(self) -> None:
        for text in (self.title, self.note, *self.columns, *(cell for row in self.rows for cell in row)):
            if not isinstance(text, str):
                raise TypeError(f"{self.title!r}: {text!r} is in a table; strings are accepted.")

    def markdown(self) -> str:
        """The table as GitHub's Markdown."""
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.columns) + " |"]
        # Numbers to the right, and words to the left: the first column, and those that hold reasons or ideas.
        sides = [" --- |" if column in ("", "why", "idea") else " ---: |" for column in self.columns[1:]]
        lines.append("| --- |" + "".join(sides))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.note])


def origin(payload: dict[str, Any]) -> str:
    """GPU, versions, date; and a warning where kernels have changed since."""
    found = payload["provenance"]
    gpu, smi = found.get("gpu") or {}, found.get("nvidia_smi") or {}
    driver = f", driver {smi['driver_version']}" if "driver_version" in smi else ""
    versions = f"CUDA {found['cuda']}, torch {found['torch']}, CuPy {found['cupy']}"
    if found.get("transformer_engine"):
        versions += f", Transformer Engine {found['transformer_engine']}"
    text = f"{gpu.get('name', 'no GPU')}{driver}, {versions}, {found['date'][:10]}."
    changed = measure.outdated(payload)
    if changed:
        text += f" **Measured before the last change of {', '.join(changed)}.**"
    return text


def percent(value: float) -> str:
    """A share as whole percents."""
    return f"{100 * value:.0f} %"
