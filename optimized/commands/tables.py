"""The tables of measured results, built from docs/results/*.json and from nowhere else.

`python -m optimized.commands.tables` puts them into README.md and the pages of docs/ between two marks;
tests/test_readme.py fails where a page and the results disagree. A benchmark's own tables are in its module.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from optimized import measure
from optimized.bench import (
    activation,
    adam,
    attention,
    cast,
    gemm,
    gemm_epilogue,
    gemm_equality,
    gemm_shapes,
    ladder,
    layer,
    layer_sweep,
    layer_tables,
    norm,
)
from optimized.bench.table import Table, origin
from reference import files

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
# Each has NAME, WHAT (what it measures), run(progress) and tables(its result).
BENCHMARKS: tuple[Any, ...] = (
    gemm,
    gemm_epilogue,
    gemm_equality,
    gemm_shapes,
    ladder,
    cast,
    norm,
    activation,
    attention,
    adam,
    layer,
    layer_sweep,
)


def gpu_suite(payload: dict[str, Any]) -> list[Table]:
    """How the GPU suite went."""
    row = (f"`{payload['command']}`", str(payload["passed"]), str(payload["failed"]))
    title = "The GPU suite: every op and layer against the CPU, in every bit"
    return [Table(title, ("on an H200", "passed", "failed"), (row,), origin(payload))]


def mutation(payload: dict[str, Any]) -> list[Table]:
    """How many mutants the fast tests kill."""
    counts = payload["mutants"]
    row = (
        f"`{payload['command']}`",
        str(counts["drawn"]),
        str(counts["killed"]),
        str(counts["drawn"] - counts["killed"]),
    )
    note = f"Of {counts['known']} that {payload['tool']} knows; each survivor is judged in docs/results/mutation.json."
    return [Table("Mutants of the Python source", ("command", "drawn", "killed", "survived"), (row,), note)]


BUILDERS: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "gpu_suite": gpu_suite,
    "mutation": mutation,
    **{module.NAME: module.tables for module in BENCHMARKS},
}
DETAILS = {  # more tables of a result, for pages of docs
    "layer_goals": ("layer", layer_tables.layer_goals),
    "layer_memory": ("layer", layer_tables.layer_memory),
    "layer_ops": ("layer", layer_tables.layer_ops),
}
IN_README = (
    "gpu_suite",
    "layer",
    "gemm",
    "gemm_epilogue",
    "gemm_shapes",
    "gemm_equality",
    "cast_transpose",
    "norm",
    "activation",
    "attention",
    "adam",
)


def load(name: str) -> dict[str, Any] | None:
    """The recorded result, or None."""
    return measure.read_result(name) if (measure.RESULTS / f"{name}.json").is_file() else None


def recorded(name: str) -> list[Table]:
    """The tables of a recorded result; none where nothing is recorded.

    Raises:
        files.Damaged: the file does not hold what its tables show.
    """
    result, build = DETAILS[name] if name in DETAILS else (name, BUILDERS[name])
    payload = load(result)
    try:
        return [] if payload is None else build(payload)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise files.Damaged(
            f"{measure.RESULTS / result}.json is damaged: its table cannot be made ({error!r}); "
            f"`git checkout -- docs/results` brings it back."
        ) from error


def markdown(names: Iterable[str] = IN_README) -> str:
    """Every recorded table, as README shows them."""
    found = [table.markdown() for name in names for table in recorded(name)]
    return "\n\n".join(found) if found else "Nothing has been recorded yet."


def updated(page: str, names: Iterable[str] = IN_README) -> str:
    """A page's text with the tables between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{markdown(names)}\n{END}{after}"


PAGES = {
    README: IN_README,
    README.parent / "CONTRIBUTING.md": ("mutation",),
    README.parent / "docs" / "ladder.md": ("ladder",),
    README.parent / "docs" / "layer.md": ("layer_goals", "layer_sweep", "layer_ops", "layer_memory"),
}

if __name__ == "__main__":
    for path, names in PAGES.items():
        files.write(path, updated(path.read_text("utf-8"), names))
