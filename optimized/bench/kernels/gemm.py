"""The twelve GEMMs of a GPT layer against cuBLASLt in the same run (docs/results/gemm.json).

FP8 GEMMs have bf16 output. Fast accumulation is compared with `torch._scaled_mm(use_fast_accum=True)`, split
accumulation with `False`, and each with the fastest algorithm that cuBLASLt's heuristic offers (called directly by
bench/cublaslt.py). bf16 GEMMs are compared with `torch.mm`. *Interleaved* launches share one clock, so they compare
cycles; *sustained* blocks of one kernel run at the power cap, so they compare energy, too. Both sides are called as a
user would, through their op, and allocate their output.
"""

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench import Payload, Progress, each, result, silent
from optimized.bench.kernels import cublaslt
from optimized.bench.table import Table, percent, table
from optimized.compare import INTEGERS
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES, multiprocessors, select_tile

NAME = "gemm"
WHAT = "a GPT layer's GEMMs, against cuBLASLt"
KERNELS = ("gemm", "gemm_fp8")
TOKENS, HIDDEN, FFN = 8192, 4096, 16384  # sequence 2048, batch 4
# In and out features of the layer's linear maps.
LINEARS = {"qkv": (HIDDEN, 3 * HIDDEN), "proj": (HIDDEN, HIDDEN), "fc1": (HIDDEN, FFN), "fc2": (FFN, HIDDEN)}
SECONDS = 0.15  # that a sustained block takes

twin = torch.ops.twin
Calls = dict[str, Callable[[], torch.Tensor]]


def shapes(tokens: int = TOKENS, linears: Mapping[str, tuple[int, int]] = LINEARS) -> dict[str, tuple[int, int, int]]:
    """M, N, K of the twelve GEMMs: forward, gradient of the input, gradient of the weight."""
    found = {}
    for name, (inner, outer) in linears.items():
        found[f"{name}.fprop"] = (tokens, outer, inner)
        found[f"{name}.dgrad"] = (tokens, inner, outer)
        found[f"{name}.wgrad"] = (outer, inner, tokens)
    return found


def fp8_operands(name: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random operands in the formats of the HYBRID recipe: gradients are E5M2, everything else E4M3."""
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn if name.endswith("fprop") else torch.float8_e5m2)
    return a, torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)


def wide_operands(name: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bf16 operands in the layouts of a Linear: dgrad reads the weight, wgrad both, as transposed views."""

    def matrix(rows: int, transposed: bool) -> torch.Tensor:
        shape = (k, rows) if transposed else (rows, k)
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return values.t() if transposed else values

    return matrix(m, name.endswith("wgrad")), matrix(n, not name.endswith("fprop"))


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype, accumulate: str
) -> torch.Tensor:
    """cuBLASLt's FP8 product, with the first algorithm of its heuristic."""
    return torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=scale, out_dtype=out_dtype, use_fast_accum=accumulate == "fast"
    )


def fp8_calls(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, accumulate: str) -> Calls:
    """Our FP8 GEMM and cuBLASLt's, bf16 output."""
    return {
        "ours": functools.partial(twin.gemm_fp8, a, b, scale, scale, None, torch.bfloat16, accumulate),
        "theirs": functools.partial(scaled_mm, a, b, scale, torch.bfloat16, accumulate),
    }


def differing(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """How many words of two results differ, in 16 or 32 bits."""
    words = INTEGERS[ours.element_size()]
    return int((ours.view(words) != theirs.view(words)).sum())


def calls(kind: str, name: str, m: int, n: int, k: int) -> Calls:
    """Ours, theirs and, in FP8, cuBLASLt's algorithms by number. `kind` is "fast", "split" or "bf16"."""
    if kind == "bf16":
        a, b = wide_operands(name, m, n, k)
        ours = functools.partial(twin.gemm, a, b, None, torch.bfloat16)
        return {"ours": ours, "theirs": functools.partial(torch.mm, a, b.t())}
    a, b = fp8_operands(name, m, n, k)
    scale = torch.ones(1, device="cuda")
    offered = cublaslt.algorithms(cublaslt.Product(a, b, scale, scale, torch.bfloat16, kind))
    return fp8_calls(a, b, scale, kind) | {f"algorithm {i}": call for i, call in enumerate(offered)}


def sustained(variants: Mapping[str, Callable[[], object]], estimate: Mapping[str, float]) -> dict[str, float]:
    """The mean time of a call (ms) in a block of one variant: the median of three blocks, the variants taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3):
        for name, call in variants.items():
            count = max(10, int(SECONDS * 1e3 / estimate[name]))
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for i in range(count + 5):
                if i == 5:  # during the first calls the clock settles and the queue fills
                    start.record()
                call()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) / count)
    return {name: statistics.median(times) for name, times in samples.items()}


def fastest(samples: Mapping[str, list[float]]) -> list[float]:
    """The samples of the fastest variant, chosen for the even rounds by the odd ones, and the other way round.

    If the same samples chose and were compared, the least of eight noisy medians would be lower than any true median.
    """
    rounds = len(next(iter(samples.values())))
    chosen = [min(samples, key=lambda name: statistics.median(samples[name][1 - half :: 2])) for half in (0, 1)]
    return [samples[chosen[i % 2]][i] for i in range(rounds)]


def measure_one(kind: str, name: str, m: int, n: int, k: int, repeats: int, blocks: bool) -> dict[str, Any]:
    """One row of the result."""
    variants = calls(kind, name, m, n, k)
    different = differing(variants["ours"](), variants["theirs"]())
    samples = measure.interleave(variants, repeats=repeats, warmup=3)
    offered = [side for side in samples if side.startswith("algorithm")]
    best = min(offered, key=lambda side: statistics.median(samples[side]), default=None)
    if best is not None:
        variants["best"], samples["best"] = variants[best], fastest({side: samples[side] for side in offered})
    for side in offered:
        del variants[side], samples[side]
    times = {side: measure.spread(values) for side, values in samples.items()}

    def speed_over(side: str) -> dict[str, float]:
        return measure.spread([other / ours for ours, other in zip(samples["ours"], samples[side], strict=True)])

    tiles, k_bytes = (TILES, 2 * k) if kind == "bf16" else (FP8_TILES, k)
    row: dict[str, Any] = {"kind": kind, "name": name, "m": m, "n": n, "k": k}
    row["tile"] = str(select_tile(m, n, k_bytes, kind == "split", multiprocessors(0), tiles))
    row |= {"differing_words": different, "ms": times}
    row["tflops"] = {side: 2e-9 * m * n * k / value["median"] for side, value in times.items()}
    row["speed_over_theirs"] = speed_over("theirs")
    if best is not None:
        row["speed_over_best"] = speed_over("best")
        row["best"] = f"{best} of {len(offered)}"
    if blocks:
        row["sustained_ms"] = sustained(variants, {side: value["median"] for side, value in times.items()})
        for side in (side for side in ("theirs", "best") if side in variants):
            row[f"sustained_speed_over_{side}"] = row["sustained_ms"][side] / row["sustained_ms"]["ours"]
    return row


def geometric_means(rows: list[dict[str, Any]], side: str = "theirs") -> dict[str, float]:
    """By kind, the geometric mean over the shapes of our speed over theirs, or over their best; interleaved."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if f"speed_over_{side}" in row:
            ratios.setdefault(row["kind"], []).append(row[f"speed_over_{side}"]["median"])
    return {kind: statistics.geometric_mean(found) for kind, found in sorted(ratios.items())}


@torch.no_grad()
def run(
    progress: Progress = silent,
    repeats: int = 60,
    kinds: tuple[str, ...] = ("fast", "split", "bf16"),
    blocks: bool = True,
) -> Payload:
    """Measure; `blocks` adds the sustained times."""
    problems = [(kind, name, *shape) for kind in kinds for name, shape in shapes().items()]
    rows = [measure_one(*problem, repeats=repeats, blocks=blocks) for problem in each(problems, progress)]
    means = {f"geometric_mean_speed_over_{side}": geometric_means(rows, side) for side in ("theirs", "best")}
    what = "time of cuBLASLt (torch._scaled_mm, torch.mm) over ours, same run, random data, bf16 output"
    return result(what, KERNELS, repeats=repeats, sustained_block_seconds=SECONDS, **means, rows=rows)


KINDS = {"fast": "FP8, fast accumulation", "split": "FP8, split accumulation", "bf16": "bf16"}


def tables(payload: Payload) -> list[Table]:
    """FP8 and bf16 GEMMs against cuBLASLt: one row per shape, one column per kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in payload["rows"]))
    best = payload.get("geometric_mean_speed_over_best", {})
    by_shape: dict[str, dict[str, dict[str, Any]]] = {}
    for row in payload["rows"]:
        by_shape.setdefault(f"{row['name']} {row['m']}×{row['n']}×{row['k']}", {})[row["kind"]] = row
    columns, last, rows = ["GEMM M×N×K"], ["geometric mean"], [[shape] for shape in by_shape]
    for kind in kinds:
        sides = ["theirs", *(["best"] if kind in best else [])]
        columns += [f"{KINDS.get(kind, kind)}, TFLOP/s", "of cuBLASLt", "of its best"][: 1 + len(sides)]
        last += ["", *(percent(payload[f"geometric_mean_speed_over_{side}"][kind]) for side in sides)]
        for cells, found in zip(rows, by_shape.values(), strict=True):
            row = found.get(kind)
            cells.append("–" if row is None else f"{row['tflops']['ours']:.0f}")
            cells += ["–" if row is None else percent(row[f"speed_over_{side}"]["median"]) for side in sides]
    how = (
        "100 % is the speed of cuBLASLt as torch calls it (`torch._scaled_mm`, `torch.mm`: the first algorithm of its "
        "heuristic), launches interleaved in the same run."
    )
    if best:
        how += " Its best is the fastest of the eight algorithms that the heuristic offers, called directly."
    return [table(payload, "GEMMs of a GPT layer", columns, [*rows, last], how, _sustained(payload, kinds))]


def _sustained(payload: Payload, kinds: list[str]) -> str:
    """A sentence with the geometric means of the sustained blocks; empty if they were not measured."""
    found = []
    for kind in kinds:
        ratios = [row.get("sustained_speed_over_theirs") for row in payload["rows"] if row["kind"] == kind]
        if None not in ratios:
            found.append(f"{KINDS.get(kind, kind)}: {percent(statistics.geometric_mean(ratios))}")
    return f"In sustained blocks, at the power cap, of cuBLASLt (geometric means): {'; '.join(found)}." if found else ""


def summary(payload: Payload) -> tuple[str, str, str, str]:
    """README's row: the geometric mean over the shapes."""
    theirs, best = (payload[f"geometric_mean_speed_over_{side}"]["fast"] for side in ("theirs", "best"))
    what = "12 FP8 GEMMs of the GPT layer, geometric mean"
    mean = statistics.geometric_mean(row["tflops"]["ours"] for row in payload["rows"] if row["kind"] == "fast")
    return what, f"{mean:.0f} TFLOP/s", "cuBLASLt as torch calls it; its best algorithm", f"{theirs:.2f}×; {best:.2f}×"
