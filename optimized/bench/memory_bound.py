"""Ops bound by memory, compared with a device copy in the same run.

Their bandwidth is the bytes that must move (each input is read once, each output written once) over the time. It is
compared with two copies: `Tensor.copy_` of 512 MiB, the ceiling, and a copy of as many bytes as the op moves, which
starts and ends a kernel as the op does. A sample is a few calls over inputs that together exceed L2; they are replayed
as a CUDA graph, so that the sample does not contain the host's time.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optimized import measure
from optimized.bench import Payload, result
from optimized.bench.table import Table, percent, table

FOOTPRINT = 256 << 20  # bytes of distinct inputs: several times L2
COPY_BYTES = 1 << 29
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_WHAT = "bytes that must move over time, against Tensor.copy_ of 512 MiB and of as many bytes"


def in_turn(inputs: Sequence[torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """The input of call i: after the last of `inputs` the first comes again."""
    return lambda i: inputs[i % len(inputs)]


def large_copy() -> Callable[[], object]:
    """The ceiling: `Tensor.copy_` of `COPY_BYTES`, which reads and writes each byte once."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


class Copies:
    """Times samples of `calls` calls each, and the copies that they are compared with."""

    def __init__(self, calls: int, repeats: int) -> None:
        self.calls, self.repeats = calls, repeats
        self._flush = measure.Flush()
        self._large_copy = large_copy()

    def result(self, rows: Sequence[dict[str, Any]], kernels: Sequence[str], **more: Any) -> Payload:
        """What a benchmark of `rows` returns."""
        return result(_WHAT, kernels, calls_per_sample=self.calls, repeats=self.repeats, rows=rows, **more)

    def rows(
        self, case: Mapping[str, Any], ops: Mapping[str, Callable[[int], object]], moved: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """A row of the result for each op of a case."""
        return [{"op": op, **case, **found} for op, found in self.beside(ops, moved).items()]

    def inputs(self, size: int, least: int = 1) -> int:
        """How many inputs of `size` bytes the calls of a sample must take in turn to exceed L2."""
        return max(least, min(self.calls, -(-FOOTPRINT // size)))

    def beside(self, ops: Mapping[str, Callable[[int], object]], moved: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Time ops and return results by name; an op is called with the call's number and has `moved` so many bytes."""
        timed: dict[str, Callable[[], object]] = {op: measure.graph(call, self.calls) for op, call in ops.items()}
        for size in sorted({moved[op] for op in ops}):
            timed[f"copy {size}"] = measure.copy_of(size, self.calls)
        timed["large copy"] = self._large_copy
        samples = measure.interleave(timed, repeats=self.repeats, warmup=2, flush=self._flush)
        times = {name: measure.summary(values) for name, values in samples.items()}
        ceiling = 2 * COPY_BYTES / times["large copy"]["median"]
        found = {}
        for op in ops:
            ms = {key: value / self.calls for key, value in times[op].items()}
            rate = moved[op] / ms["median"]
            found[op] = {
                "ms": ms,
                "terabytes_per_second": rate / 1e9,
                "copy_terabytes_per_second": ceiling / 1e9,
                "of_copy": rate / ceiling,
                "of_copy_of_as_many_bytes": times[f"copy {moved[op]}"]["median"] / times[op]["median"],
            }
        return found


def _shares(rows: Sequence[dict[str, Any]]) -> str:
    """Shares of a copy: the median over shapes, the smallest, and the smallest against a copy of as many bytes."""
    shares = [row["of_copy"] for row in rows]
    least = [min(row[key] for row in rows) for key in ("of_copy", "of_copy_of_as_many_bytes") if key in rows[0]]
    return f"{percent(statistics.median(shares))} ({'; '.join(map(percent, least))})"


def of_copy(payload: Payload, title: str, group: str, label: Callable[[str], str]) -> Table:
    """One row per op, one column per value of `group`."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in payload["rows"]:
        found.setdefault(row["op"], {}).setdefault(row[group], []).append(row)
    groups = list(dict.fromkeys(row[group] for row in payload["rows"]))
    rows = [(op.replace("_", " "), *(_shares(values[g]) for g in groups)) for op, values in found.items()]
    how = (
        "Bandwidth as a share of what `Tensor.copy_` of 512 MiB reaches in the same run: the median over shapes, and "
        "in brackets the smallest share, and the smallest against a copy of as many bytes."
    )
    return table(payload, title, ("kernel", *map(label, groups)), rows, how)
