"""What a benchmark was asked to measure, in its result: the sizes, formats and names, and none of what was measured."""

import json
from typing import Any

from optimized import measure

Row = dict[str, Any]
MEASURED = frozenset(
    [
        "best",
        "differing_from_deep_gemm",
        "differing_words",
        "measured",
        "peak_bytes",
        "seconds",
        "tile",
        "tokens_per_second",
        "why",
    ]
)
"""Words, integers and truths of a row that a run finds out."""


def identity(row: Row) -> str:
    """Of a row, what was asked: its words and integers, and those of what it has inside."""

    def asked(value: Any, key: str) -> bool:
        return key not in MEASURED and not isinstance(value, (list, dict, float))

    found = {key: value for key, value in row.items() if asked(value, key)}
    for key in ("case", "setting"):
        if isinstance(row.get(key), dict):
            found |= {f"{key}.{name}": value for name, value in row[key].items()}
    for key in ("low", "high"):  # of an expectation, which stands before anything is measured
        found |= {key: row[key]} if key in row else {}
    return json.dumps(found, sort_keys=True)


def rows(payload: Row) -> dict[str, list[str]]:
    """The identities of the rows of each list; of what is kept by names, the names."""
    found: dict[str, list[str]] = {}
    for place, value in (*payload.items(), *((f"ms.{key}", one) for key, one in payload.get("ms", {}).items())):
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            found[place] = list(map(identity, value))
        elif isinstance(value, dict) and value and all(isinstance(one, dict) for one in value.values()):
            found[place] = list(value)
    return found


def is_what_was_recorded(name: str, payload: Row) -> None:
    """A run's rows are those of the committed result, in their order; a run of fewer, or of more, has those of both.

    A row that has changed its sizes or its name would be shown with times that were measured for another.
    """
    now, then = rows(payload), rows(measure.read_result(name))
    for place in now.keys() & then.keys():
        here, there = set(now[place]), set(then[place])
        assert here <= there or there <= here, (name, place, sorted(here - there)[:2], sorted(there - here)[:2])
        both = here & there
        assert [one for one in now[place] if one in both] == [one for one in then[place] if one in both], (name, place)
