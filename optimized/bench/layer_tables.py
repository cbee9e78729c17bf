"""The tables of `twin bench layer`: its steps, what was asked of them, and the ops of an FP8 step."""

from typing import Any

from optimized.bench.table import Table, origin, percent


def tables(payload: dict[str, Any]) -> list[Table]:
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
    note += f". {payload.get('remark', '')} {origin(payload)}".replace("  ", " ")
    columns = ("layer, ms", "attention", "in the contract", *names, "GiB")
    found = [Table("One layer, forward and backward", columns, (*rows, parts), note)]
    if "linear" in payload:
        one = payload["linear"]
        linear = tuple(
            (row["step"].replace("te.", ""), "yes" if row["in_contract"] else "no", f"{row['ms']['median']:.3f}")
            for row in one["rows"]
        )
        found.append(Table(one["case"], ("forward and backward", "in the contract", "ms"), linear, origin(payload)))
    return found


def layer_goals(payload: dict[str, Any]) -> list[Table]:
    """What a layer is to reach, and what it does (docs/layer.md)."""
    large, seed, small = payload["cases"]

    def ms(one: dict[str, Any], step: str, attention: str, key: str = "ms") -> float:
        (row,) = (row for row in one["rows"] if (row["step"], row["attention"]) == (step, attention))
        return float(row[key]["median"])

    fp8 = "TransformerLayer, FP8"
    rows = []
    for attention in ("cuDNN", "exact"):
        ours, parts = ms(large, fp8, attention), large["parts_ms"]
        text = f"{ours / parts:.2f} ({ours:.2f} of {parts:.2f} ms)"
        rows.append((f"FP8 with {attention} attention, over cuBLASLt's products + cuDNN's attention", "1.12", text))
    theirs = [row["ms"]["median"] for row in large["rows"] if row["step"] == "Transformer Engine, FP8"]
    for found in theirs:
        ours = ms(large, fp8, "cuDNN")
        rows.append(("of Transformer Engine's time, FP8", "0.83", f"{ours / found:.2f} ({ours:.2f} of {found:.2f} ms)"))
    alone = "{:.2f} would be cuBLASLt's products and cuDNN's attention alone"
    compiled = ms(large, "PyTorch, compiled", "cuDNN")
    faster = f"{compiled / ms(large, fp8, 'cuDNN'):.2f}; {alone.format(compiled / large['parts_ms'])}"
    rows.append(("faster than compiled PyTorch, both with cuDNN's attention", "1.75", faster))
    plain, ways = ms(seed, "PyTorch", "its matmuls"), ("cuDNN", "exact")
    faster = "; ".join(f"{plain / ms(seed, fp8, way):.2f} with {way} attention" for way in ways)
    faster += f"; {alone.format(plain / seed['parts_ms'])}"
    rows.append((f"{seed['case']['name']}: faster than plain PyTorch", "2.1", faster))
    linear = {row["step"]: row["ms"]["median"] for row in payload["linear"]["rows"]}
    gain = min(linear["torch.nn.Linear"], linear["te.Linear"]) / linear["te.Linear, FP8"]
    rows.append((f"{payload['linear']['case']}: FP8 faster than the better of both in 16 bits", "1.5", f"{gain:.2f}"))
    (peak,) = (row["peak_bytes"] for row in large["rows"] if (row["step"], row["attention"]) == (fp8, "cuDNN"))
    rows.append(("peak of torch's allocator, GiB", "2.6", f"{peak / 2**30:.2f}"))
    measured = {(row["step"], key) for row in small["rows"] for key in row}
    for what, step, key, asked in (
        ("eager", fp8, "ms", "0.9"),
        ("eager, autograd on one thread", f"{fp8}, autograd on one thread", "ms", "0.9"),
        ("eager, the process on one core", fp8, "ms_on_one_core", "0.9"),
        ("forward and backward as CUDA graphs", f"{fp8}, CUDA graph", "ms", "0.3"),
        ("the same, the process on one core", f"{fp8}, CUDA graph", "ms_on_one_core", "0.3"),
        ("the whole step as one CUDA graph", f"{fp8}, step as one CUDA graph", "ms", "0.3"),
    ):
        if (step, key) in measured:
            times = "; ".join(f"{ms(small, step, way, key):.2f} with {way} attention" for way in reversed(ways))
            rows.append((f"small layer, FP8, {what}, ms", asked, times))
    columns = (f"{large['case']['name']}, where nothing else is said", "asked", "found")
    return [Table("Against what was asked", columns, tuple(rows), origin(payload))]


def layer_memory(payload: dict[str, Any]) -> list[Table]:
    """What the first case's FP8 step holds between forward and backward (docs/layer.md)."""
    found, rows = [], payload["cases"][0]["rows"]
    theirs = [f"{row['peak_bytes'] / 2**30:.2f} GiB" for row in rows if row["step"] == "Transformer Engine, FP8"]
    peak = theirs[0] if theirs else "3.29 GiB, in a run of its own"
    for row in rows:
        if row.get("memory"):
            cells = [
                (one["what"], one["shape"], one["dtype"], str(one["count"]), f"{one['bytes'] / 2**20:.1f}")
                for one in row["memory"]
                if one["bytes"] >= 2**16
            ]
            total = sum(one["bytes"] for one in row["memory"]) / 2**30
            note = (
                f"Together {total:.2f} GiB; the peak, in backward, is {row['peak_bytes'] / 2**30:.2f} GiB with the "
                f"weights' gradients (Transformer Engine: {peak}). Tensors of less than 64 KiB are left out. "
                f"{origin(payload)}"
            )
            title = f"Between forward and backward, {row['step']}, {row['attention']} attention"
            found.append(Table(title, ("what", "shape", "dtype", "tensors", "MiB"), tuple(cells), note))
    return found


def layer_ops(payload: dict[str, Any]) -> list[Table]:
    """The ops of the first case's FP8 steps, and what of its ceiling each reaches (docs/layer.md)."""
    first, found = payload["cases"][0], []
    for row in first["rows"]:
        ops = [op for op in row.get("ops", ()) if op["ms"] >= 0.02]
        if ops:
            cells = []
            for op in ops:
                amount = f"{op['flop'] / 1e12:.2f} TFLOP" if op["flop"] else f"{op['bytes'] / 1e9:.3f} GB"
                share = "–" if op["of_ceiling"] is None else percent(op["of_ceiling"])
                cells.append((op["op"], op["sizes"], str(op["count"]), f"{op['ms']:.3f}", amount, share))
            columns = ("op", "sizes", "calls", "ms", "work", "of ceiling")
            total = sum(op["ms"] for op in row["ops"])
            note = f"All ops together: {total:.2f} ms of GPU time. {origin(payload)}"
            title = f"{row['step']}, {row['attention']} attention, {first['case']['name']}"
            found.append(Table(title, columns, tuple(cells), note))
    return found
