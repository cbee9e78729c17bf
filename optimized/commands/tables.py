"""The tables of measured results, built from docs/results/*.json and from nowhere else.

`python -m optimized.commands.tables` puts them into README.md and the pages of docs/ between two marks;
tests/test_readme.py fails where a page and the results disagree.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from optimized import measure
from optimized.commands.layer_tables import layer, layer_goals, layer_memory, layer_ops, layer_sweep
from optimized.commands.table import Table, origin, percent
from reference import files

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
OF_ITS_BEST = " Its best is the fastest of the eight algorithms that the heuristic offers, called directly."


def gemm(payload: dict[str, Any]) -> list[Table]:
    """FP8 and bf16 products against cuBLASLt: one row per shape, one column per kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in payload["rows"]))
    names = {"fast": "FP8 fast", "split": "FP8 split", "bf16": "bf16"}
    best = payload.get("geometric_mean_speed_over_best", {})
    by_shape: dict[str, dict[str, dict[str, Any]]] = {}
    for row in payload["rows"]:
        by_shape.setdefault(f"{row['name']} {row['m']}×{row['n']}×{row['k']}", {})[row["kind"]] = row
    rows = []
    for shape, found in by_shape.items():
        cells = [shape]
        for kind in kinds:
            row = found.get(kind)
            cells.append("–" if row is None else f"{row['tflops']['ours']:.0f}")
            cells.append("–" if row is None else percent(row["speed_over_theirs"]["median"]))
            if kind in best:
                cells.append("–" if row is None else percent(row["speed_over_best"]["median"]))
        rows.append(tuple(cells))
    means = payload["geometric_mean_speed_over_theirs"]
    columns, last = ["product M×N×K"], ["geometric mean"]
    for kind in kinds:
        columns += [f"{names.get(kind, kind)} TFLOP/s", "of cuBLASLt", *(["of its best"] if kind in best else [])]
        last += ["", percent(means[kind]), *([percent(best[kind])] if kind in best else [])]
    rows.append(tuple(last))
    note = (
        "100 % is the speed of cuBLASLt as torch calls it (`torch._scaled_mm`, `torch.mm`: the first algorithm of its "
        f"heuristic), launches interleaved in the same run.{OF_ITS_BEST if best else ''}"
        f"{_sustained(payload, kinds, names)} {origin(payload)}"
    )
    return [Table("Matrix products", tuple(columns), tuple(rows), note)]


def gemm_epilogue(payload: dict[str, Any]) -> list[Table]:
    """Fused products: against the product alone, ours and cuBLASLt's, and against the ops apart."""
    rows = []
    for row in payload["rows"]:
        speeds = (row[f"speed_over_{side}"]["median"] for side in ("plain", "cublaslt", "apart"))
        name = f"{row['name']} {row['m']}×{row['n']}×{row['k']}, {row['epilogue']}"
        rows.append((name, f"{row['ms']['fused']['median']:.3f}", *map(percent, speeds)))
    columns = (
        "FP8 product and what follows it",
        "ms",
        "of the product alone",
        "of cuBLASLt's alone",
        "of the ops apart",
    )
    note = (
        "Speed of the fused kernel, bf16: 100 % is that of the product alone (fast forward, split backward), and that "
        "of the ops one after the other, interleaved in the same run. Where those win (the backward, a short K), the "
        f"op runs them instead. {origin(payload)}"
    )
    return [Table("Products with what follows them", columns, tuple(rows), note)]


def _sustained(payload: dict[str, Any], kinds: list[str], names: dict[str, str]) -> str:
    """The geometric means of the sustained blocks, in a sentence; nothing where they were not measured."""
    found = []
    for kind in kinds:
        ratios = [row.get("sustained_speed_over_theirs") for row in payload["rows"] if row["kind"] == kind]
        if None not in ratios:
            found.append(f"{names.get(kind, kind)} {percent(statistics.geometric_mean(ratios))}")
    return f" In sustained blocks, at the power cap (geometric means): {', '.join(found)}." if found else ""


def gemm_equality(payload: dict[str, Any]) -> list[Table]:
    """How many products equal cuBLASLt's in every word, and those that do not, with the reason."""
    equal, total = payload["problems_with_every_word_equal"], payload["problems"]
    rows = [(f"{equal} of {total} products", f"{sum(r['words'] for r in payload['rows'] if _equal(r)):,}", "0", "")]
    for row in payload["rows"]:
        if not _equal(row):
            shape = f"{row['m']}×{row['n']}×{row['k']}, {row['accumulate']}"
            rows.append((shape, f"{row['words']:,}", f"{row['differing_words']:,}", row["why"]))
    note = "FP8 products with fp32 output, compared with `torch._scaled_mm`'s in every word. " + origin(payload)
    columns = ("FP8 product M×N×K", "words", "different from cuBLASLt", "why")
    return [Table("Equality with cuBLASLt", columns, tuple(rows), note)]


def _equal(row: dict[str, Any]) -> bool:
    return bool(row["differing_words"] == 0)


def _shares(rows: Sequence[dict[str, Any]]) -> str:
    """Of a copy: the median over shapes (the smallest; the smallest against a copy of as many bytes)."""
    shares = [row["of_copy"] for row in rows]
    least = [min(row[key] for row in rows) for key in ("of_copy", "of_copy_of_as_many_bytes") if key in rows[0]]
    return f"{percent(statistics.median(shares))} ({'; '.join(map(percent, least))})"


def _of_copy(payload: dict[str, Any], title: str, group: str, label: Callable[[str], str]) -> Table:
    """One row per op, one column per value of `group`."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in payload["rows"]:
        found.setdefault(row["op"], {}).setdefault(row[group], []).append(row)
    groups = list(dict.fromkeys(row[group] for row in payload["rows"]))
    rows = [(op.replace("_", " "), *(_shares(values[g]) for g in groups)) for op, values in found.items()]
    note = (
        "The bytes that must move over the time, as a share of what `Tensor.copy_` of 512 MiB reaches in the same run: "
        f"median over shapes (smallest; smallest against a copy of as many bytes). {origin(payload)}"
    )
    return Table(title, ("kernel", *(label(g) for g in groups)), tuple(rows), note)


def cast_transpose(payload: dict[str, Any]) -> list[Table]:
    """Casts and reductions against the device copy, every input type in its column."""
    tables = [_of_copy(payload, "Casts and reductions", "dtype", lambda dtype: f"{dtype} input, of copy")]
    layers = []
    for one in payload.get("weights_of_a_layer", ()):
        ways = (one["cast_transpose"], one["multi"])
        speeds = (f"{1e3 * way['ms']['median']:.1f} ({percent(way['of_copy'])})" for way in ways)
        layers.append((str(one["hidden"]), one["dtype"], *speeds))
    if layers:
        heads = ("hidden", "weights", "one by one, µs (of copy)", "`multi_cast_transpose`, µs (of copy)")
        moved = "In brackets the bytes that must move over the time, as a share of `Tensor.copy_` in the same run. "
        title = "The four weights of a layer, to FP8 with their transposes"
        tables.append(Table(title, heads, tuple(layers), moved + origin(payload)))
    return tables


def norm(payload: dict[str, Any]) -> list[Table]:
    """Norms against the device copy."""
    names = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    return [_of_copy(payload, "Norms, bf16, share of a copy", "kind", lambda kind: names[kind])]


def activation(payload: dict[str, Any]) -> list[Table]:
    """Activations against the device copy, every kind in its column."""
    return [_of_copy(payload, "Activations, share of a copy", "kind", str)]


def attention(payload: dict[str, Any]) -> list[Table]:
    """Attention against cuDNN's, and the ops around it against the device copy."""
    rows = []
    for name, times in payload["ms"]["attention"].items():
        cells = [name.replace(" none", "").replace(" dropout=0.0", "")]
        for way in ("forward", "backward"):
            ours, theirs = times[way]["median"], times[f"cuDNN {way}"]["median"]
            cells += [f"{ours:.2f}", percent(theirs / ours)]
        rows.append(tuple(cells))
    columns = ("attention, bf16", "forward ms", "of cuDNN", "backward ms", "of cuDNN")
    note = (
        "100 % is the speed of cuDNN's attention as torch calls it, interleaved in the same run. cuDNN's bits are its "
        f"own; these are reproducible on a CPU. {origin(payload)}"
    )
    around = payload["ms"]["elementwise"]
    others = tuple(
        (name.replace("_", " "), f"{value['TB/s']:.2f}", percent(value["TB/s"] / around["copy"]["TB/s"]))
        for name, value in around.items()
    )
    return [
        Table("Attention", columns, tuple(rows), note),
        Table("Around attention, bf16", ("kernel", "TB/s", "of copy"), others, origin(payload)),
    ]


def gemm_sweep(payload: dict[str, Any]) -> list[Table]:
    """What the selector chooses on problems of many sizes, against the best tile and against cuBLASLt."""
    from optimized.bench.gemm_sweep import choice

    kinds = list(dict.fromkeys(row["kind"] for row in payload["rows"]))
    rows = []
    for kind in kinds:
        chosen = [choice(row, payload["processors"]) for row in payload["rows"] if row["kind"] == kind]
        slowdown = [one["over_best"] for one in chosen]
        speed = [one["speed_over_theirs"] for one in chosen]
        rows.append(
            (
                kind,
                str(len(chosen)),
                f"{statistics.geometric_mean(slowdown):.3f} ({max(slowdown):.2f})",
                f"{percent(statistics.geometric_mean(speed))} ({percent(min(speed))})",
            )
        )
    columns = ("products of many sizes", "problems", "time over the best tile's", "of cuBLASLt")
    note = f"Geometric mean (worst), L2 flushed. {origin(payload)}"
    return [Table("The choice of tiles", columns, tuple(rows), note)]


def gemm_shapes(payload: dict[str, Any]) -> list[Table]:
    """A list of random shapes against cuBLASLt: one row per accumulation."""
    rows = []
    for kind, found in payload["summary"].items():
        shape = "×".join(map(str, found["worst_shape"]))
        below = f"{found['below_0.75']} of {found['problems']}"
        rows.append((f"FP8 {kind}", percent(found["geometric_mean"]), f"{percent(found['worst'])} ({shape})", below))
    columns = ("random shapes", "of cuBLASLt, geometric mean", "worst (M×N×K)", "below 75 %")
    note = (
        "A list of shapes fixed before it was measured, M from 1 to 32768, N and K from 16 to 32768; fast accumulation "
        f"where there are as many 128×128 tiles as multiprocessors. L2 flushed. {origin(payload)}"
    )
    return [Table("Products of random shapes", columns, tuple(rows), note)]


def ladder(payload: dict[str, Any]) -> list[Table]:
    """The ladder's kernels: what was expected of each, and what came."""
    shapes = list(dict.fromkeys(row["shape"] for row in payload["rows"]))
    found = {(row["kernel"], row["shape"]): row for row in payload["rows"]}
    rows = []
    for kernel in dict.fromkeys(row["kernel"] for row in payload["rows"]):
        rung = payload["rungs"].get(kernel)
        low, high = rung["expected_tflops"] if rung else ("", "")
        cells = [kernel, rung["idea"] if rung else "", f"{low} to {high}" if rung else ""]
        for shape in shapes:
            row = found[kernel, shape]
            cells += [f"{row['tflops']:.0f}", percent(row["of_cublaslt"])]
        rows.append(tuple(cells))
    columns = ["kernel", "idea", f"expected, {shapes[0]}"]
    for shape in shapes:
        columns += [f"came, {shape}", "of cuBLASLt"]
    note = (
        "TFLOP/s, medians of interleaved launches, E4M3, fast accumulation, bf16 output; 100 % is `torch._scaled_mm`. "
        f"Every kernel gave cuBLASLt's words. {origin(payload)}"
    )
    return [Table("The ladder", tuple(columns), tuple(rows), note)]


def adam(payload: dict[str, Any]) -> list[Table]:
    """One optimizer step, as a share of the copy."""
    rows = [
        (row["optimizer"], str(row["bytes_a_number"]), f"{row['ms']['median']:.2f}", percent(row["of_copy"]))
        for row in payload["rows"]
    ]
    note = f"{payload['numbers'] / 1e6:.0f} million numbers. {origin(payload)}"
    columns = ("one step over a layer's weights", "bytes a number", "ms", "of copy")
    return [Table("Optimizers", columns, tuple(rows), note)]


def gpu_suite(payload: dict[str, Any]) -> list[Table]:
    """How the GPU suite went."""
    row = (f"`{payload['command']}`", str(payload["passed"]), str(payload["failed"]))
    title = "The GPU suite: every op and layer against the CPU, in every bit"
    return [Table(title, ("on an H200", "passed", "failed"), (row,), origin(payload))]


BUILDERS: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "gpu_suite": gpu_suite,
    "gemm": gemm,
    "gemm_epilogue": gemm_epilogue,
    "gemm_equality": gemm_equality,
    "gemm_sweep": gemm_sweep,
    "gemm_shapes": gemm_shapes,
    "ladder": ladder,
    "cast_transpose": cast_transpose,
    "norm": norm,
    "activation": activation,
    "attention": attention,
    "adam": adam,
    "layer": layer,
    "layer_sweep": layer_sweep,
}
DETAILS = {  # more tables of a result, for pages of docs
    "layer_goals": ("layer", layer_goals),
    "layer_memory": ("layer", layer_memory),
    "layer_ops": ("layer", layer_ops),
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
    README.parent / "docs" / "ladder.md": ("ladder",),
    README.parent / "docs" / "layer.md": ("layer_goals", "layer_sweep", "layer_ops", "layer_memory"),
}

if __name__ == "__main__":
    for path, names in PAGES.items():
        files.write(path, updated(path.read_text("utf-8"), names))
