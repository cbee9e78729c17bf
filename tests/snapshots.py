"""Texts that tests compare with what tests/golden/<folder>/<name>.txt holds, and the command that records them.

    PYTHONPATH=.:tests python tests/snapshots.py [name ...]        # after a change that was meant; read the diff

A text is sections of lines. Of a long section the first lines stand in the file, and of the others, group by group,
digests: a test that fails shows the lines of the first group that differs.
"""

import difflib
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reference import files

GOLDEN = Path(__file__).parent / "golden"
WIDTH = 240  # characters of a line
GROUPS = 256  # digests of a section, at most
PER_LINE = 16  # digests
Sections = Mapping[str, tuple[Sequence[str], int]]  # lines, and how many of them stand in the file


def digest(lines: Sequence[str]) -> str:
    """Six letters."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:6]


def repeats(lines: Sequence[str]) -> list[str]:
    """The same line many times is one line."""
    counted = ((line, len(list(same))) for line, same in itertools.groupby(lines))
    return [f"{count} x {line}" if count > 1 else line for line, count in counted]


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[:WIDTH]}… {digest([line])}"


def _groups(lines: Sequence[str], shown: int) -> Iterator[Sequence[str]]:
    size = max(1, math.ceil((len(lines) - shown) / GROUPS))
    for start in range(shown, len(lines), size):
        yield lines[start : start + size]


def text(sections: Sections) -> str:
    """What is recorded."""
    found: list[str] = []
    for title, (lines, shown) in sections.items():
        found += [f"== {title}: {len(lines)} lines", *map(_cut, lines[:shown])]
        digests = [digest(group) for group in _groups(lines, shown)]
        found += [f".. {' '.join(digests[i : i + PER_LINE])}" for i in range(0, len(digests), PER_LINE)]
    return "\n".join(found) + "\n"


def difference(sections: Sections, recorded: str) -> str | None:
    """The first lines that are not what is recorded; None where everything is."""
    if text(sections) == recorded:
        return None
    old = {part.split("\n")[0].rsplit(":", 1)[0]: part.splitlines() for part in recorded.split("== ")[1:]}
    for title, (lines, shown) in sections.items():
        if title not in old:
            return f"{title!r} is not recorded."
        heads = [line for line in old[title][1:] if not line.startswith(".. ")]
        known = [one for line in old[title][1:] if line.startswith(".. ") for one in line.split()[1:]]
        changed = list(difflib.unified_diff(heads, [*map(_cut, lines[:shown])], "recorded", "now", lineterm="", n=1))
        if changed:
            return "\n".join([f"{title}:", *changed[:24]])
        for i, group in enumerate(_groups(lines, shown)):
            if i >= len(known) or digest(group) != known[i]:
                where = (
                    f"{title}, lines {shown + i * len(group)} on, of which the digest is no longer the recorded one:"
                )
                return "\n".join([where, *map(_cut, group[:24])])
        if old[title][0] != f"{title}: {len(lines)} lines":
            return f"recorded: {old[title][0]}; now: {len(lines)} lines"
    return f"no longer there: {sorted(old.keys() - sections.keys())}"


def check(folder: str, name: str, sections: Sections) -> None:
    """Fail with `difference`."""
    path = GOLDEN / folder / f"{name}.txt"
    recorded = path.read_text("utf-8") if path.is_file() else ""
    found = difference(sections, recorded)
    assert found is None, f"{path.relative_to(GOLDEN.parent.parent)} says otherwise.\n{found}"


def plain(value: Any) -> Any:
    """A payload for `json`: floats to nine digits, which another libm gives too."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if isinstance(value, (str, int, type(None))) else str(value)


def payload_lines(payload: Any, depth: int = 2, indent: str = "") -> list[str]:
    """JSON with one line per entry of what lies `depth` deep."""
    payload = plain(payload) if not indent else payload
    if depth == 0 or not isinstance(payload, (dict, list)) or not payload:
        return [indent + json.dumps(payload, ensure_ascii=False)]
    entries = payload.items() if isinstance(payload, dict) else enumerate(payload)
    found = []
    for key, value in entries:
        below = payload_lines(value, depth - 1, indent + " ")
        found += [f"{indent}{key}: {below[0].strip()}"] if len(below) == 1 else [f"{indent}{key}:", *below]
    return found


def main() -> None:
    """Record."""
    import test_benchmarks_dry
    import test_commands_text

    for module in (test_benchmarks_dry, test_commands_text):
        runs: Mapping[str, Callable[[], Sections]] = module.RUNS
        for name, run in runs.items():
            if not sys.argv[1:] or name in sys.argv[1:]:
                path = GOLDEN / module.FOLDER / f"{name}.txt"
                path.parent.mkdir(exist_ok=True)
                files.write(path, text(run()))
                print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
