"""Every tile on problems of many sizes, with cuBLASLt beside it (docs/results/gemm_sweep.json).

The costs in optimized/ops/gemm_tile.py are fitted to this; `run` says how far the chosen tile is from the best one.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench.gemm import KERNELS, scaled_mm, shapes
from optimized.ops.gemm import gemm_tiled
from optimized.ops.gemm_fp8 import gemm_fp8_tiled
from optimized.ops.gemm_tile import TILES, multiprocessors, select_tile

NAME = "gemm_sweep"
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)
WEIGHTS = ((1024, 1024), (3072, 768), (768, 3072), (4096, 4096), (4096, 16384), (16384, 4096))
KINDS = ("fast", "split", "bf16")


def problems() -> list[tuple[int, int, int]]:
    """M, N, K: small to large token counts through six weights, and the layer's twelve shapes."""
    small = [(m, n, k) for n, k in WEIGHTS for m in TOKENS]
    return small + sorted(set(shapes().values()))


def variants(kind: str, m: int, n: int, k: int) -> dict[str, Callable[[], torch.Tensor]]:
    """cuBLASLt and each tile, by name."""
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    if kind == "bf16":
        a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        return {
            "theirs": functools.partial(torch.mm, a, b.t()),
            **{str(t): functools.partial(gemm_tiled, a, b, None, out.dtype, t, out) for t in TILES},
        }
    a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    one = torch.ones(1, device="cuda")
    return {
        "theirs": functools.partial(scaled_mm, a, b, one, out.dtype, kind),
        **{str(t): functools.partial(gemm_fp8_tiled, a, b, one, one, None, out.dtype, kind, t, out) for t in TILES},
    }


def run(progress: Callable[[float], None] | None = None, repeats: int = 9) -> dict[str, Any]:
    """Measure; `progress` is told the fraction done."""
    flush = measure.Flush(1 << 27)
    cases = [(kind, *shape) for shape in problems() for kind in KINDS]
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for done, (kind, m, n, k) in enumerate(cases):
            samples = measure.interleave(variants(kind, m, n, k), repeats=repeats, warmup=2, flush=flush)
            ms = {name: measure.summary(times)["median"] for name, times in samples.items()}
            tile = str(select_tile(m, n, k * (2 if kind == "bf16" else 1), kind == "split", multiprocessors(0)))
            best = min(ms[str(t)] for t in TILES)
            rows.append(
                {
                    "kind": kind,
                    "m": m,
                    "n": n,
                    "k": k,
                    "ms": ms,
                    "selected": tile,
                    "selected_over_best": ms[tile] / best,
                    "speed_over_theirs": ms["theirs"] / ms[tile],
                }
            )
            if progress is not None:
                progress((done + 1) / len(cases))
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    return {
        "what": "ms of cuBLASLt and of each tile, L2 flushed, bf16 output; the chosen tile against the best",
        "repeats": repeats,
        "geometric_mean_selected_over_best": statistics.geometric_mean(row["selected_over_best"] for row in rows),
        "worst_selected_over_best": max(row["selected_over_best"] for row in rows),
        "geometric_mean_speed_over_theirs": {
            kind: statistics.geometric_mean(row["speed_over_theirs"] for row in found)
            for kind, found in by_kind.items()
        },
        "worst_speed_over_theirs": {
            kind: min(row["speed_over_theirs"] for row in found) for kind, found in by_kind.items()
        },
        "rows": rows,
        "provenance": measure.provenance(KERNELS),
    }
