"""The tables of measured results, built from docs/results/*.json and from nowhere else.

`python -m optimized.commands.tables` puts them into README.md and the pages of docs/ between two marks;
tests/test_readme.py fails where a page and the results disagree.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimized import measure

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


@dataclass(frozen=True)
class Table:
    """A table of strings, with a note on where its numbers come from."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str

    def markdown(self) -> str:
        """The table as GitHub's Markdown."""
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.columns) + " |"]
        # Numbers to the right, and words to the left: the first column, and those that hold reasons or ideas.
        sides = [" --- |" if column in ("", "why", "idea") else " ---: |" for column in self.columns[1:]]
        lines.append("| --- |" + "".join(sides))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.note])


def _note(payload: dict[str, Any]) -> str:
    """GPU, versions, date; and a warning where kernels have changed since."""
    origin = payload["provenance"]
    gpu, smi = origin.get("gpu") or {}, origin.get("nvidia_smi") or {}
    driver = f", driver {smi['driver_version']}" if "driver_version" in smi else ""
    versions = f"CUDA {origin['cuda']}, torch {origin['torch']}, CuPy {origin['cupy']}"
    text = f"{gpu.get('name', 'no GPU')}{driver}, {versions}, {origin['date'][:10]}."
    changed = measure.outdated(payload)
    if changed:
        text += f" **Measured before the last change of {', '.join(changed)}.**"
    return text


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


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
            cells.append("–" if row is None else _percent(row["speed_over_theirs"]["median"]))
            if kind in best:
                cells.append("–" if row is None else _percent(row["speed_over_best"]["median"]))
        rows.append(tuple(cells))
    means = payload["geometric_mean_speed_over_theirs"]
    columns, last = ["product M×N×K"], ["geometric mean"]
    for kind in kinds:
        columns += [f"{names.get(kind, kind)} TFLOP/s", "of cuBLASLt", *(["of its best"] if kind in best else [])]
        last += ["", _percent(means[kind]), *([_percent(best[kind])] if kind in best else [])]
    rows.append(tuple(last))
    note = (
        "100 % is the speed of cuBLASLt as torch calls it (`torch._scaled_mm`, `torch.mm`: the first algorithm of its "
        f"heuristic), launches interleaved in the same run.{OF_ITS_BEST if best else ''}"
        f"{_sustained(payload, kinds, names)} {_note(payload)}"
    )
    return [Table("Matrix products", tuple(columns), tuple(rows), note)]


def gemm_epilogue(payload: dict[str, Any]) -> list[Table]:
    """Fused products: against the product alone, ours and cuBLASLt's, and against the ops apart."""
    rows = []
    for row in payload["rows"]:
        speeds = (row[f"speed_over_{side}"]["median"] for side in ("plain", "cublaslt", "apart"))
        name = f"{row['name']} {row['m']}×{row['n']}×{row['k']}, {row['epilogue']}"
        rows.append((name, f"{row['ms']['fused']['median']:.3f}", *map(_percent, speeds)))
    columns = (
        "FP8 product and what follows it",
        "ms",
        "of the product alone",
        "of cuBLASLt's alone",
        "of the ops apart",
    )
    note = (
        "Speed of the fused kernel, bf16: 100 % is that of the product alone (fast forward, split backward), and that "
        "of the ops one after the other, interleaved in the same run. Where those win clearly (a gated backward, "
        f"dropout), the op runs them instead. {_note(payload)}"
    )
    return [Table("Products with what follows them", columns, tuple(rows), note)]


def _sustained(payload: dict[str, Any], kinds: list[str], names: dict[str, str]) -> str:
    """The geometric means of the sustained blocks, in a sentence; nothing where they were not measured."""
    found = []
    for kind in kinds:
        ratios = [row.get("sustained_speed_over_theirs") for row in payload["rows"] if row["kind"] == kind]
        if None not in ratios:
            found.append(f"{names.get(kind, kind)} {_percent(statistics.geometric_mean(ratios))}")
    return f" In sustained blocks, at the power cap (geometric means): {', '.join(found)}." if found else ""


def gemm_equality(payload: dict[str, Any]) -> list[Table]:
    """How many products equal cuBLASLt's in every word, and those that do not, with the reason."""
    equal, total = payload["problems_with_every_word_equal"], payload["problems"]
    rows = [(f"{equal} of {total} products", f"{sum(r['words'] for r in payload['rows'] if _equal(r)):,}", "0", "")]
    for row in payload["rows"]:
        if not _equal(row):
            shape = f"{row['m']}×{row['n']}×{row['k']}, {row['accumulate']}"
            rows.append((shape, f"{row['words']:,}", f"{row['differing_words']:,}", row["why"]))
    note = "FP8 products with fp32 output, compared with `torch._scaled_mm`'s in every word. " + _note(payload)
    columns = ("FP8 product M×N×K", "words", "different from cuBLASLt", "why")
    return [Table("Equality with cuBLASLt", columns, tuple(rows), note)]


def _equal(row: dict[str, Any]) -> bool:
    return bool(row["differing_words"] == 0)


def cast_transpose(payload: dict[str, Any]) -> list[Table]:
    """Memory-bound kernels against the device copy: one row per op and input type, over all shapes."""
    by_op: dict[str, dict[str, list[float]]] = {}
    for row in payload["rows"]:
        by_op.setdefault(row["op"], {}).setdefault(row["dtype"], []).append(row["of_copy"])
    types = list(dict.fromkeys(row["dtype"] for row in payload["rows"]))
    rows = []
    for op, found in by_op.items():
        cells = [f"{_percent(statistics.median(found[t]))} ({_percent(min(found[t]))})" for t in types]
        rows.append((op, *cells))
    columns = ("kernel", *(f"{t} input, of copy" for t in types))
    note = (
        "Median over shapes (smallest): the bytes that must move over the time, as a share of what `Tensor.copy_` "
        "reaches in the same run. " + _note(payload)
    )
    tables = [Table("Casts and reductions", columns, tuple(rows), note)]
    layers = []
    for layer in payload.get("weights_of_a_layer", ()):
        ways = (layer["cast_transpose"], layer["multi"])
        speeds = (f"{1e3 * way['ms']['median']:.1f} ({_percent(way['of_copy'])})" for way in ways)
        layers.append((str(layer["hidden"]), layer["dtype"], *speeds))
    if layers:
        heads = ("hidden", "weights", "one by one, µs (of copy)", "`multi_cast_transpose`, µs (of copy)")
        moved = "In brackets the bytes that must move over the time, as a share of `Tensor.copy_` in the same run. "
        title = "The four weights of a layer, to FP8 with their transposes"
        tables.append(Table(title, heads, tuple(layers), moved + _note(payload)))
    return tables


def _of_copy(payload: dict[str, Any], title: str, group: str, label: Callable[[str], str]) -> list[Table]:
    """One row per op, one column per value of `group`: median and smallest share of a copy over all shapes."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in payload["rows"]:
        found.setdefault(row["op"], {}).setdefault(row[group], []).append(row["of_copy"])
    groups = list(dict.fromkeys(row[group] for row in payload["rows"]))
    rows = []
    for op, values in found.items():
        cells = (f"{_percent(statistics.median(values[g]))} ({_percent(min(values[g]))})" for g in groups)
        rows.append((op.replace("_", " "), *cells))
    note = f"Median over shapes (smallest), as a share of `Tensor.copy_` in the same run. {_note(payload)}"
    return [Table(title, ("kernel", *(label(g) for g in groups)), tuple(rows), note)]


def norm(payload: dict[str, Any]) -> list[Table]:
    """Norms against the device copy."""
    names = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    return _of_copy(payload, "Norms, bf16, share of a copy", "kind", lambda kind: names[kind])


def activation(payload: dict[str, Any]) -> list[Table]:
    """Activations against the device copy, every kind in its column."""
    return _of_copy(payload, "Activations, share of a copy", "kind", str)


def attention(payload: dict[str, Any]) -> list[Table]:
    """Attention against cuDNN's, and the ops around it against the device copy."""
    rows = []
    for name, times in payload["ms"]["attention"].items():
        cells = [name.replace(" none", "").replace(" dropout=0.0", "")]
        for way in ("forward", "backward"):
            ours, theirs = times[way]["median"], times[f"cuDNN {way}"]["median"]
            cells += [f"{ours:.2f}", _percent(theirs / ours)]
        rows.append(tuple(cells))
    columns = ("attention, bf16", "forward ms", "of cuDNN", "backward ms", "of cuDNN")
    note = (
        "100 % is the speed of cuDNN's attention as torch calls it, interleaved in the same run. cuDNN's bits are its "
        f"own; these are reproducible on a CPU. {_note(payload)}"
    )
    around = payload["ms"]["elementwise"]
    others = tuple(
        (name.replace("_", " "), f"{value['TB/s']:.2f}", _percent(value["TB/s"] / around["copy"]["TB/s"]))
        for name, value in around.items()
    )
    return [
        Table("Attention", columns, tuple(rows), note),
        Table("Around attention, bf16", ("kernel", "TB/s", "of copy"), others, _note(payload)),
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
                f"{_percent(statistics.geometric_mean(speed))} ({_percent(min(speed))})",
            )
        )
    columns = ("products of many sizes", "problems", "time over the best tile's", "of cuBLASLt")
    note = f"Geometric mean (worst), L2 flushed. {_note(payload)}"
    return [Table("The choice of tiles", columns, tuple(rows), note)]


def gemm_shapes(payload: dict[str, Any]) -> list[Table]:
    """A list of random shapes against cuBLASLt: one row per accumulation."""
    rows = []
    for kind, found in payload["summary"].items():
        shape = "×".join(map(str, found["worst_shape"]))
        below = f"{found['below_0.75']} of {found['problems']}"
        rows.append((f"FP8 {kind}", _percent(found["geometric_mean"]), f"{_percent(found['worst'])} ({shape})", below))
    columns = ("random shapes", "of cuBLASLt, geometric mean", "worst (M×N×K)", "below 75 %")
    note = (
        "A list of shapes fixed before it was measured, M from 1 to 32768, N and K from 16 to 32768; fast accumulation "
        f"where there are as many 128×128 tiles as multiprocessors. L2 flushed. {_note(payload)}"
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
            cells += [f"{row['tflops']:.0f}", _percent(row["of_cublaslt"])]
        rows.append(tuple(cells))
    columns = ["kernel", "idea", f"expected, {shapes[0]}"]
    for shape in shapes:
        columns += [f"came, {shape}", "of cuBLASLt"]
    note = (
        "TFLOP/s, medians of interleaved launches, E4M3, fast accumulation, bf16 output; 100 % is `torch._scaled_mm`. "
        f"Every kernel gave cuBLASLt's words. {_note(payload)}"
    )
    return [Table("The ladder", tuple(columns), tuple(rows), note)]


def elementary(payload: dict[str, Any]) -> list[Table]:
    """The functions in use: their price and their error."""
    rows = []
    cycles, times = payload["scheduler_cycles_per_warp"], payload["stream"]["times"]
    for name in ("exp", "rsqrt", "gelu", "dgelu", "silu", "dsilu"):
        stream = times.get(f"{name} bf16", {}).get("over_base")
        rows.append(
            (
                name,
                f"{cycles[name]:.1f}" if name in cycles else "–",
                "–" if stream is None else f"{stream:.2f}",
            )
        )
    columns = ("function", "cycles a warp", "stream over identity")
    return [Table("Elementary functions", columns, tuple(rows), f"docs/elementary.md has the rest. {_note(payload)}")]


def gpu_suite(payload: dict[str, Any]) -> list[Table]:
    """How the GPU suite went."""
    row = (f"`{payload['command']}`", str(payload["passed"]), str(payload["failed"]))
    title = "The GPU suite: every op and layer against the CPU, in every bit"
    return [Table(title, ("on an H200", "passed", "failed"), (row,), _note(payload))]


def layer(payload: dict[str, Any]) -> list[Table]:
    """The quickstart's steps, one column per case; then what the FP8 step consists of."""
    cases = payload["cases"]
    by_step: dict[tuple[str, str], list[dict[str, Any] | None]] = {}
    for place, found in enumerate(cases):
        for row in found["rows"]:
            by_step.setdefault((row["step"], row["attention"]), [None] * len(cases))[place] = row
    rows = []
    for (step, attention), found in by_step.items():
        inside = {row["in_contract"] for row in found if row is not None}
        cells = [
            step.replace("te.", ""),
            attention,
            "partly" if len(inside) > 1 else "yes" if inside == {True} else "no",
        ]
        for row in found:
            cells.append("–" if row is None else f"{row['ms']['median']:.2f}")
        peak = None if found[0] is None else found[0]["peak_bytes"]
        rows.append((*cells, "–" if peak is None else f"{peak / 2**30:.2f}"))
    parts = ("cuBLASLt's 12 FP8 products + cuDNN's attention", "", "", *(f"{one['parts_ms']:.2f}" for one in cases), "")
    names = [one["case"]["name"] for one in cases]
    note = (
        "Milliseconds of one layer, forward and backward, medians of blocks of steps in turn in one run, launches "
        "included; gradients None at each step, weights cast at each step unless cached. Hidden 4096, ffn 16384, 32 "
        "heads, sequence 2048; small: ffn 4096, 16 heads. GiB: most that torch's allocator held in the step of the "
        "first column, weights and gradients included. Rows that name neither PyTorch nor Transformer Engine are this "
        "package's"
    )
    if "cupy_pool_bytes" in payload:
        note += f"; CuPy's pool held {payload['cupy_pool_bytes']} bytes"
    note += f". {payload.get('remark', '')} {_note(payload)}".replace("  ", " ")
    columns = ("layer, ms", "attention", "in the contract", *names, "GiB")
    found = [Table("One layer, forward and backward", columns, (*rows, parts), note)]
    if "linear" in payload:
        one = payload["linear"]
        linear = tuple(
            (row["step"].replace("te.", ""), "yes" if row["in_contract"] else "no", f"{row['ms']['median']:.3f}")
            for row in one["rows"]
        )
        found.append(Table(one["case"], ("forward and backward", "in the contract", "ms"), linear, _note(payload)))
    return found


def layer_goals(payload: dict[str, Any]) -> list[Table]:
    """What a layer is to reach, and what it does (docs/layer.md)."""
    large, seed, small = payload["cases"]

    def ms(one: dict[str, Any], step: str, attention: str) -> float:
        (row,) = (row for row in one["rows"] if (row["step"], row["attention"]) == (step, attention))
        return float(row["ms"]["median"])

    fp8, graph = "TransformerLayer, FP8", "TransformerLayer, FP8, CUDA graph"
    rows = []
    for attention in ("cuDNN", "exact"):
        ours, parts = ms(large, fp8, attention), large["parts_ms"]
        text = f"{ours / parts:.2f} ({ours:.2f} of {parts:.2f} ms)"
        rows.append((f"FP8 with {attention} attention, over cuBLASLt's products + cuDNN's attention", "1.12", text))
    compiled = ms(large, "PyTorch, compiled", "cuDNN") / ms(large, fp8, "cuDNN")
    rows.append(("faster than compiled PyTorch, both with cuDNN's attention", "1.75", f"{compiled:.2f}"))
    plain, ways = ms(seed, "PyTorch", "its matmuls"), ("cuDNN", "exact")
    faster = "; ".join(f"{plain / ms(seed, fp8, way):.2f} with {way} attention" for way in ways)
    rows.append((f"{seed['case']['name']}: faster than plain PyTorch", "2.1", faster))
    linear = {row["step"]: row["ms"]["median"] for row in payload["linear"]["rows"]}
    gain = min(linear["torch.nn.Linear"], linear["te.Linear"]) / linear["te.Linear, FP8"]
    rows.append((f"{payload['linear']['case']}: FP8 faster than the better of both in 16 bits", "1.5", f"{gain:.2f}"))
    (peak,) = (row["peak_bytes"] for row in large["rows"] if (row["step"], row["attention"]) == (fp8, "cuDNN"))
    rows.append(("peak of torch's allocator, GiB", "2.6", f"{peak / 2**30:.2f}"))
    rows.append(("small layer, FP8, eager, ms", "0.9", f"{ms(small, fp8, 'cuDNN'):.2f}"))
    rows.append(("small layer, FP8, CUDA graph, ms", "0.3", f"{ms(small, graph, 'cuDNN'):.2f}"))
    columns = (f"{large['case']['name']}, where nothing else is said", "asked", "found")
    return [Table("Against what was asked", columns, tuple(rows), _note(payload))]


def layer_ops(payload: dict[str, Any]) -> list[Table]:
    """The ops of the first case's FP8 steps, and what of its ceiling each reaches (docs/layer.md)."""
    first, found = payload["cases"][0], []
    for row in first["rows"]:
        ops = [op for op in row.get("ops", ()) if op["ms"] >= 0.02]
        if ops:
            cells = []
            for op in ops:
                amount = f"{op['flop'] / 1e12:.2f} TFLOP" if op["flop"] else f"{op['bytes'] / 1e9:.3f} GB"
                share = "–" if op["of_ceiling"] is None else _percent(op["of_ceiling"])
                cells.append((op["op"], op["sizes"], str(op["count"]), f"{op['ms']:.3f}", amount, share))
            columns = ("op", "sizes", "calls", "ms", "work", "of ceiling")
            total = sum(op["ms"] for op in row["ops"])
            note = f"All ops together: {total:.2f} ms of GPU time. {_note(payload)}"
            title = f"{row['step']}, {row['attention']} attention, {first['case']['name']}"
            found.append(Table(title, columns, tuple(cells), note))
    return found


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
    "elementary": elementary,
    "layer": layer,
}
DETAILS = {  # more tables of a result, for pages of docs
    "layer_goals": ("layer", layer_goals),
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
)


def load(name: str) -> dict[str, Any] | None:
    """The recorded result, or None."""
    path = measure.RESULTS / f"{name}.json"
    if not path.is_file():
        return None
    payload: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return payload


def recorded(name: str) -> list[Table]:
    """The tables of a recorded result; none where nothing is recorded."""
    result, build = DETAILS[name] if name in DETAILS else (name, BUILDERS[name])
    payload = load(result)
    return [] if payload is None else build(payload)


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
    README.parent / "docs" / "layer.md": ("layer_goals", "layer_ops"),
}

if __name__ == "__main__":
    for path, names in PAGES.items():
        path.write_text(updated(path.read_text("utf-8"), names), "utf-8")
