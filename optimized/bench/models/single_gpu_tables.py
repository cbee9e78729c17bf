"""The tables of `twin bench single_gpu`, and the numbers that its plot shares with them."""

from typing import Any

from optimized.bench import Payload
from optimized.bench.table import Table, table

GIB = 1 << 30
Row = dict[str, Any]


def rows_of(payload: Payload, group: str) -> dict[str, Row]:
    """A group's rows by name; none where it was not measured."""
    return {row["setting"]["name"]: row for one in payload["groups"] if one["group"] == group for row in one["rows"]}


def speed(row: Row) -> float:
    """Samples a second."""
    return float(row["samples_per_second"]["median"])


def gib(row: Row) -> float:
    """The peak."""
    return float(row["memory"]["peak"]) / GIB


def bytes_a_parameter(row: Row) -> dict[str, float]:
    """Bytes a parameter of the weights, the gradients and the optimizer's state."""
    memory = row["memory"]
    return {name: memory[name] / memory["parameters"] for name in ("weights", "gradients", "optimizer")}


def ladder(payload: Payload) -> list[tuple[Row, Row]]:
    """Each row of the first group with the row that it is compared with: the rung before it."""
    rows = payload["groups"][0]["rows"]
    found, rung = [], rows[0]
    for row in rows:
        found.append((row, rung))
        rung = rung if row["setting"]["side"] else row
    return found


def expectations(payload: Payload) -> list[tuple[dict[str, Any], float]]:
    """Each expectation whose rows were measured, and the ratio that was found."""
    found = []
    for one in payload["expected"]:
        rows = rows_of(payload, one["group"])
        if one["name"] in rows and one["base"] in rows:
            row, base = rows[one["name"]], rows[one["base"]]
            quantity = speed if one["quantity"] == "speed" else gib
            found.append((one, quantity(row) / quantity(base)))
    return found


def _spread(row: Row) -> str:
    rate = row["samples_per_second"]
    return f"{rate['median']:.0f} ({rate['p10']:.0f} to {rate['p90']:.0f})"


def _cells(row: Row, base: Row) -> tuple[str, ...]:
    same = row is base
    ratio = "" if same else f"{speed(row) / speed(base):.2f}×"
    more = "" if same else f"{gib(row) / gib(base):.2f}×"
    return (_spread(row), ratio, f"{gib(row):.1f}", more, f"{sum(bytes_a_parameter(row).values()):.1f}")


COLUMNS = ("samples a second", "speed", "peak, GiB", "memory", "bytes a parameter")


def tables(payload: Payload) -> list[Table]:
    """The ladder, what lies beside it, expectations, and products of awkward sizes."""
    sizes = payload["sizes"]
    how = (
        "Whole training steps, median with the 10th and 90th percentile; speed and memory are compared with the rung "
        "before, and the row in brackets is no rung."
    )
    note = (
        f"A masked-language model, {sizes['layers']} layers, hidden {sizes['hidden']}, {sizes['heads']} heads, ffn "
        f"{sizes['ffn']}, sequence {sizes['sequence']}; each rung keeps what the rungs before it added. Bytes a "
        "parameter are those of weights, gradients and the optimizer's state."
    )
    rungs = []
    for row, base in ladder(payload):
        name = row["setting"]["name"]
        rungs.append((f"({name})" if row["setting"]["side"] else name, *_cells(row, base)))
    beside, lacking = [], []
    for group in payload["groups"][1:]:
        first, *others = group["rows"]
        beside.append((f"{group['group']}: {first['setting']['name']}", *_cells(first, first)))
        beside += [(f"… {row['setting']['name']}", *_cells(row, first)) for row in others]
        lacking += [f"{name} ({package} was not installed)" for name, package in group["not_installed"].items()]
    absent = f" Not measured: {', '.join(lacking)}." if lacking else ""
    absent += "".join(f" {one['group']}: {one['measured']}." for one in payload["groups"] if "measured" in one)
    found = [
        table(payload, "One GPU, one technique after the other", ("", *COLUMNS), rungs, how, note),
        table(
            payload,
            "Beside the ladder",
            ("", *COLUMNS),
            beside,
            "Each group is measured by itself and compared with its first row.",
            f"The first row of a group is named after the rung that it repeats.{absent}",
        ),
        _expected(payload),
    ]
    return [*found, _products(payload)] if "gemms" in payload else found


def _expected(payload: Payload) -> Table:
    rows = []
    for one, ratio in expectations(payload):
        inside = one["low"] <= ratio <= one["high"]
        rows.append(
            (
                f"{one['name']}, {one['quantity']}",
                f"{one['base']} ({one['group']})",
                f"{one['low']:.2f}× to {one['high']:.2f}×",
                f"{ratio:.2f}×",
                "yes" if inside else "no",
                one["why"],
            )
        )
    hits = sum(row[4] == "yes" for row in rows)
    how = f"Written down before anything was measured; {hits} of {len(rows)} came true."
    columns = ("", "compared with", "expected", "found", "as expected", "why")
    return table(payload, "Expected and found", columns, rows, how)


def _products(payload: Payload) -> Table:
    rows = [
        (f"{row['m']}×{row['n']}×{row['k']}", f"{1000 * row['ms']['median']:.0f}", f"{row['tflops']:.0f}")
        for row in payload["gemms"]
        if row["what"] != "batch" or row["m"] // 512 in (7, 8, 9, 15, 16, 17)
    ]
    how = (
        "Products x·wᵀ in bf16, as PyTorch calls them; sizes that are no multiples of 8 cost, and so do waves of tiles."
    )
    return table(payload, "Products of awkward sizes", ("M×N×K", "µs", "TFLOP/s"), rows, how)
