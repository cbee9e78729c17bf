"""The FP8 GEMM on random shapes, for which nobody tuned it, against cuBLASLt (docs/results/gemm_shapes.json).

The list of `problems` was written down before it was measured. M is from 1 to 32768, N and K are from 16 to 32768. Each
is spread evenly over the octaves, and half of the time it is a power of two, so that ragged and tiny problems weigh as
much as large ones. Split accumulation is measured on all of them, fast accumulation on those that have at least as many
128 x 128 tiles as an H200 has multiprocessors: with fewer, its one chain over K leaves some of them idle.
"""

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench import Payload, Progress, each, plots, result, silent
from optimized.bench.kernels.gemm import differing, fp8_calls
from optimized.bench.table import Table, percent, table
from optimized.ops.gemms.gemm_fp8 import chains
from optimized.ops.gemms.gemm_fp8_split_k import is_faster
from optimized.ops.gemms.gemm_tile import FP8_TILES, Tile, multiprocessors, select_tile

NAME = "gemm_shapes"
WHAT = "FP8 GEMMs of random shapes, against cuBLASLt"
COUNT, SEED = 320, 4
MULTIPLY_ADDS = 1 << 40  # at most, about 1.5 ms: fc1 of the layer has half as many
BYTES = 1 << 30  # of operands and output, at most
PROCESSORS = 132
SPLIT_K = "64x64, spread over K"

Bounds = tuple[int, int]
BOUNDS: tuple[Bounds, Bounds, Bounds] = ((1, 1 << 15), (16, 1 << 15), (16, 1 << 15))  # of M, N, K


def problems(
    seed: int = SEED, count: int = COUNT, bounds: tuple[Bounds, Bounds, Bounds] = BOUNDS
) -> list[tuple[int, int, int]]:
    """M, N and K of the whole list, which is always the same. Tiles were fitted to lists of other seeds."""
    draw = random.Random(seed)

    def extent(low: int, high: int, multiple: int) -> int:
        octave = draw.uniform(math.log2(low), math.log2(high))
        size = 2 ** round(octave) if draw.random() < 0.5 else round(2**octave)
        return max(low, size // multiple * multiple)

    found: list[tuple[int, int, int]] = []
    while len(found) < count:
        m, n, k = extent(*bounds[0], 1), extent(*bounds[1], 16), extent(*bounds[2], 16)
        if m * n * k <= MULTIPLY_ADDS and (m + n) * k + 2 * m * n <= BYTES and (m, n, k) not in found:
            found.append((m, n, k))
    return found


def kinds(m: int, n: int) -> tuple[str, ...]:
    """The accumulations that a problem is measured with."""
    return ("fast", "split") if -(-m // 128) * -(-n // 128) >= PROCESSORS else ("split",)


def chosen(kind: str, m: int, n: int, k: int, processors: int, tiles: tuple[Tile, ...] = FP8_TILES) -> str:
    """What the op runs if it has these tiles."""
    kind = chains(kind, k)
    if kind == "split" and is_faster(m, n, k, processors):
        return SPLIT_K
    return str(select_tile(m, n, k, kind == "split", processors, tiles))


def measure_one(kind: str, m: int, n: int, k: int, repeats: int, flush: Callable[[], object]) -> dict[str, Any]:
    """One row of the result."""
    a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    calls = fp8_calls(a, b, torch.ones(1, device="cuda"), kind)
    different = differing(calls["ours"](), calls["theirs"]())
    samples = measure.interleave(calls, repeats=repeats, warmup=2, flush=flush, ahead=True)
    ms = {side: statistics.median(times) for side, times in samples.items()}
    row = {"kind": kind, "m": m, "n": n, "k": k, "tile": chosen(kind, m, n, k, multiprocessors(0))}
    return {**row, "differing_words": different, "ms": ms, "speed_over_theirs": ms["theirs"] / ms["ours"]}


def summaries(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind: the number of problems, and the geometric mean and the worst of our speed over theirs."""
    found = {}
    for kind in sorted({row["kind"] for row in rows}):
        mine = [row for row in rows if row["kind"] == kind]
        ratios = [row["speed_over_theirs"] for row in mine]
        worst = min(mine, key=lambda row: row["speed_over_theirs"])
        found[kind] = {
            "problems": len(mine),
            "geometric_mean": statistics.geometric_mean(ratios),
            "worst": min(ratios),
            "worst_shape": [worst["m"], worst["n"], worst["k"]],
            "below_0.75": sum(ratio < 0.75 for ratio in ratios),
        }
    return found


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 9) -> Payload:
    torch.manual_seed(0)
    flush = measure.Flush(1 << 27)
    cases = [(kind, m, n, k) for m, n, k in problems() for kind in kinds(m, n)]
    rows = [measure_one(*case, repeats=repeats, flush=flush) for case in each(cases, progress)]
    what = "time of torch._scaled_mm over ours on a fixed random list of shapes, E4M3, bf16 output, L2 flushed"
    return result(what, ("gemm_fp8", "gemm_fp8_split_k"), repeats=repeats, summary=summaries(rows), rows=rows)


# Colour and label of a problem by its number of tiles, from the least up to the most.
FULLNESS = (
    (plots.ORANGE, "1 to 15", 1, 16),
    (plots.BLUE, f"16 to {PROCESSORS - 1}", 16, PROCESSORS),
    (plots.GREEN, f"{PROCESSORS} or more: one for each multiprocessor", PROCESSORS, 1 << 62),
)


def plot(payload: Payload) -> None:
    """Our speed over cuBLASLt's by the size of the problem, one panel per accumulation."""
    with plots.drawing(NAME, 1, 2, (10, 4.2), sharey=True) as (figure, panels):
        for axes, kind in zip(panels, ("fast", "split"), strict=True):
            rows = [row for row in payload["rows"] if row["kind"] == kind]
            sizes = [2 * row["m"] * row["n"] * row["k"] for row in rows]
            ratios = [row["speed_over_theirs"] for row in rows]
            tiles = [-(-row["m"] // 128) * -(-row["n"] // 128) for row in rows]
            for colour, label, least, most in FULLNESS:
                some = [i for i, count in enumerate(tiles) if least <= count < most]
                places, speeds = [sizes[i] for i in some], [ratios[i] for i in some]
                axes.scatter(places, speeds, color=colour, s=14, alpha=0.8, label=label)
            axes.set(xscale="log", yscale="log", xlabel="operations of the GEMM")
            axes.axhline(1, color=plots.INK, lw=0.8)
            axes.axhline(0.75, color=plots.RED, lw=0.8, ls="--")
            found = payload["summary"][kind]
            title = "{}: {problems} problems, geometric mean {geometric_mean:.3f}, worst {worst:.2f}"
            axes.set_title(title.format(kind, **found))
        panels[0].set_ylabel("our speed over cuBLASLt's")
        ticks = [0.5, 0.75, 1, 1.5, 2, 3]
        panels[0].set_yticks(ticks, [str(tick) for tick in ticks])
        panels[0].minorticks_off()
        legend = panels[1].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=3, title="output tiles of 128×128")


def tables(payload: Payload) -> list[Table]:
    """A list of random shapes against cuBLASLt: one row per accumulation."""
    rows = []
    for kind, found in payload["summary"].items():
        shape = "×".join(map(str, found["worst_shape"]))
        below = f"{found['below_0.75']} of {found['problems']}"
        worst = f"{percent(found['worst'])} ({shape})"
        rows.append((f"FP8, {kind} accumulation", percent(found["geometric_mean"]), worst, below))
    columns = ("random shapes", "of cuBLASLt, geometric mean", "worst (M×N×K)", "below 75 %")
    how = (
        "100 % is the speed of `torch._scaled_mm` on a list of shapes that was fixed before it was measured, M from 1 "
        "to 32768, N and K from 16 to 32768."
    )
    note = "L2 flushed; fast accumulation where there are as many 128×128 tiles as multiprocessors."
    return [table(payload, "GEMMs of random shapes", columns, rows, how, note)]


if __name__ == "__main__":
    plot(measure.read_result(NAME))
