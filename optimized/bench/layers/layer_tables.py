"""The tables of `twin bench layer`: the steps of each layer, the parts of an FP8 step, and the memory that it holds."""

from collections.abc import Iterable
from typing import Any

from optimized.bench import Payload
from optimized.bench.table import Table, percent, table

FP8 = "TransformerLayer, FP8"
THEIRS = ("Transformer Engine, FP8", "its own")
PARTS = "cuBLASLt's 12 FP8 GEMMs + cuDNN's attention"


def tables(payload: Payload) -> list[Table]:
    """The tables of GPT layers, Llama-like layers and one linear map, as far as they were measured."""
    found = []
    for model, llama in (("GPT", False), ("Llama-like", True)):
        cases = [one for one in payload["cases"] if one["case"].get("llama", False) == llama]
        if cases:
            found.append(_steps(payload, f"One {model} layer, forward and backward", cases))
    if "linear" in payload:
        one = payload["linear"]
        rows = [(name(row), _inside([row]), f"{row['ms']['median']:.3f}") for row in one["rows"]]
        how = "Milliseconds of forward and backward of one linear map, where the casts to FP8 weigh most."
        found.append(table(payload, one["case"], ("layer", "every bit defined", "ms"), rows, how))
    return found


def name(row: dict[str, Any]) -> str:
    """The name of a row."""
    return str(row["step"].replace("te.", "").replace("step as one", "whole step in a"))


def _sizes(one: dict[str, Any]) -> str:
    case = one["case"]
    keys = f" ({case['kv_heads']} of keys)" if case.get("kv_heads") else ""
    return (
        f"{case['name']}: hidden {case['hidden']}, ffn {case['ffn']}, {case['heads']} heads{keys}, "
        f"sequence {case['sequence']}, batch {case['batch']}"
    )


def _inside(rows: Iterable[dict[str, Any]]) -> str:
    inside = {row["in_contract"] for row in rows}
    return "without dropout" if len(inside) > 1 else "yes" if inside == {True} else "no"


def _steps(payload: Payload, title: str, cases: list[dict[str, Any]]) -> Table:
    """A row for each way to compute the layer, then the rotary kernels and the parts; a column for each case."""
    by_step: dict[tuple[str, str], list[dict[str, Any] | None]] = {}
    for place, one in enumerate(cases):
        for row in one["rows"]:
            by_step.setdefault((row["step"], row["attention"]), [None] * len(cases))[place] = row
    on_one_core = "ms_on_one_core" in cases[-1]["rows"][0]
    rows = []
    for (_, attention), found in by_step.items():
        (some, *_) = present = [row for row in found if row is not None]
        cells = [name(some), attention, _inside(present)]
        cells += ["–" if row is None else f"{row['ms']['median']:.2f}" for row in found]
        if on_one_core:
            cells.append("–" if found[-1] is None else f"{found[-1]['ms_on_one_core']['median']:.2f}")
        peak = None if found[0] is None else found[0]["peak_bytes"]
        rows.append([*cells, "–" if peak is None else f"{peak / 2**30:.2f}"])
    last = [""] * (on_one_core + 1)
    for attention in ("exact", "cuDNN"):
        turns = [_rotary(one, attention) for one in cases]
        if any(turns):
            cells = [f"{ms:.2f}" if ms else "–" for ms in turns]
            rows.append([f"of it the rotary kernels, {FP8}", attention, "", *cells, *last])
    rows.append([PARTS, "", "", *(f"{one['parts_ms']:.2f}" for one in cases), *last])
    cores = ["the same, process on one core"] if on_one_core else []
    columns = ("layer", "attention", "every bit defined", *(one["case"]["name"] for one in cases), *cores, "GiB")
    how = (
        "Milliseconds of one training step without the optimizer. Rows that name neither PyTorch nor Transformer "
        "Engine show this library, with exact attention or with that of cuDNN, which no CPU reproduces."
    )
    pool = f" (CuPy's pool held {payload['cupy_pool_bytes']} bytes)" if "cupy_pool_bytes" in payload else ""
    note = (
        "Median step time. Implementations take turns within one run; launch overhead is included; gradients are reset "
        "to None before each step; weights are cast in each step unless cached. GiB: peak of torch's "
        f"allocator{pool} in the first case, weights and gradients included. {'; '.join(map(_sizes, cases))}."
    )
    return table(payload, title, columns, rows, how, note)


def _rotary(case: dict[str, Any], attention: str) -> float:
    """Milliseconds of the rotary kernels of an FP8 step; 0 where there are none."""
    ops = [op for row in case["rows"] if row["attention"] == attention for op in row.get("ops", ())]
    return float(sum(op["ms"] for op in ops if op["op"] == "rotary"))


def layer_memory(payload: Payload) -> list[Table]:
    """What the first case's FP8 step holds between forward and backward."""
    found, rows = [], payload["cases"][0]["rows"]
    theirs = [f"{row['peak_bytes'] / 2**30:.2f} GiB" for row in rows if row["step"] == "Transformer Engine, FP8"]
    for row in rows:
        if row.get("memory"):
            cells = [
                (one["what"], one["shape"], one["dtype"], str(one["count"]), f"{one['bytes'] / 2**20:.1f}")
                for one in row["memory"]
                if one["bytes"] >= 2**16
            ]
            total = sum(one["bytes"] for one in row["memory"]) / 2**30
            how = (
                f"Every tensor of at least 64 KiB that is held, together {total:.2f} GiB; the peak, in backward, is "
                f"{row['peak_bytes'] / 2**30:.2f} GiB with the weights' gradients."
            )
            note = f"Transformer Engine's peak: {theirs[0]}." if theirs else ""
            title = f"Held between forward and backward: {name(row)}, {row['attention']} attention"
            columns = ("what", "shape", "dtype", "tensors", "MiB")
            found.append(table(payload, title, columns, cells, how, note))
    return found


def layer_ops(payload: Payload) -> list[Table]:
    """The ops of the first case's FP8 steps, and the share of its ceiling that each reaches."""
    first, found = payload["cases"][0], []
    how = (
        "Milliseconds of GPU time of each op; its ceiling is the same GEMM by cuBLASLt, cuDNN's attention, or a copy "
        "of 512 MiB."
    )
    for row in first["rows"]:
        cells = []
        for op in row.get("ops", ()):
            if op["ms"] >= 0.02:
                amount = f"{op['flop'] / 1e12:.2f} TFLOP" if op["flop"] else f"{op['bytes'] / 1e9:.3f} GB"
                share = "–" if op["of_ceiling"] is None else percent(op["of_ceiling"])
                cells.append((op["op"], op["sizes"], str(op["count"]), f"{op['ms']:.3f}", amount, share))
        if cells:
            note = f"All ops together: {sum(op['ms'] for op in row['ops']):.2f} ms."
            title = f"Where the time goes: {name(row)}, {row['attention']} attention, {first['case']['name']}"
            columns = ("op", "sizes", "calls", "ms", "work", "of its ceiling")
            found.append(table(payload, title, columns, cells, how, note))
    return found


def summary(payload: Payload) -> list[tuple[str, str, str, str]]:
    """README's rows: the layer, our time, what it is compared with, and how many times faster ours is."""
    cases, rows = payload["cases"], []
    llama = [one for one in cases if one["case"].get("rotary")]
    for case in dict.fromkeys((0, *(cases.index(one) for one in llama[:1]), len(cases) - 1)):
        times = {(row["step"], row["attention"]): row["ms"]["median"] for row in cases[case]["rows"]}
        others = {"PyTorch in 16 bits": min(ms for (step, _), ms in times.items() if step.startswith("PyTorch"))}
        if THEIRS in times:
            others["Transformer Engine in FP8"] = times[THEIRS]
        sizes = cases[case]["case"]
        model = "Llama-like" if sizes.get("llama") else "GPT"
        ours, others["here in 16 bits"] = times[FP8, "exact"], times["TransformerLayer", "exact"]
        rows.append(
            (
                f"{model} layer, hidden {sizes['hidden']}, {sizes['sequence'] * sizes['batch']} tokens",
                f"{ours:.2f} ms",
                "; ".join(f"{name}: {ms:.2f} ms" for name, ms in others.items()),
                "; ".join(f"{ms / ours:.2f}×" for ms in others.values()),
            )
        )
    return rows


def fastest(payload: Payload) -> str:
    """README's sentence about PyTorch's time: compiled, as its picture has it, or not, whichever is less."""
    rows = payload["cases"][0]["rows"]
    compiled = min((row["ms"]["median"] for row in rows if row["step"] == "PyTorch, compiled"), default=None)
    if compiled is None:
        return "The table has its fastest time."
    return f"The table has its fastest time, compiled or not; compiled, the first layer takes {compiled:.2f} ms."


def launches(payload: Payload) -> str:
    """README's sentence about small layers: what the host's launches cost there."""
    small = min(payload["cases"], key=lambda one: (one["case"]["hidden"], one["case"].get("llama", False)))
    times = {row["step"]: row["ms"]["median"] for row in small["rows"] if row["attention"] == "exact"}
    sizes = small["case"]
    return (
        f"In a small layer the host's launches take longer than the GPU's work: in a GPT layer of hidden size "
        f"{sizes['hidden']} with {sizes['sequence'] * sizes['batch']} tokens an FP8 step takes {times[FP8]:.2f} ms, "
        f"and as one CUDA graph {times[f'{FP8}, whole step in a CUDA graph']:.2f} ms."
    )
