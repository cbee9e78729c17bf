"""Every tile on problems of many sizes, with cuBLASLt beside it (docs/results/gemm_sweep.json).

The costs in optimized/ops/gemm_tile.py are fitted to this; `choice` says how far the chosen tile is from the best one.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench import gemm_shapes
from optimized.bench.gemm import KERNELS, scaled_mm, shapes
from optimized.ops.gemm import gemm_tiled
from optimized.ops.gemm_fp8 import chains, gemm_fp8_tiled
from optimized.ops.gemm_fp8_split_k import gemm_fp8_split_k, partition
from optimized.ops.gemm_tile import FP8_TILES, TILES, Tile, multiprocessors, select_tile

NAME = "gemm_sweep"
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)
WEIGHTS = ((1024, 1024), (3072, 768), (768, 3072), (4096, 4096), (4096, 16384), (16384, 4096))
KINDS = ("fast", "split", "bf16")
RANDOM = (5, 320)  # seed and length of the random list
TALL = (9, 160, ((256, 1 << 15), (16, 1536), (2048, 1 << 15)))  # of many rows, few columns and a long K


def cases() -> list[tuple[str, int, int, int]]:
    """Kind, M, N, K: small to large token counts through six weights, the layer's twelve shapes, and random lists.

    They are drawn as gemm_shapes draws the one that it measures, from other seeds.
    """
    small = [(m, n, k) for n, k in WEIGHTS for m in TOKENS]
    named = [(kind, *shape) for shape in small + sorted(set(shapes().values())) for kind in KINDS]
    drawn = gemm_shapes.problems(*RANDOM) + gemm_shapes.problems(*TALL)
    return named + [(kind, m, n, k) for m, n, k in drawn for kind in gemm_shapes.kinds(m, n)]


def few(tile: Tile, m: int, n: int) -> bool:
    """Whether a tile is worth its time in the sweep: narrow ones are slow on large outputs."""
    return tile.block_n >= 64 or tile.count(m, n) <= 4 * multiprocessors(0)


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
    rest = (a, b, one, one, None, out.dtype)
    found: dict[str, Callable[[], torch.Tensor]] = {"theirs": functools.partial(scaled_mm, a, b, one, out.dtype, kind)}
    for tile in FP8_TILES:
        if few(tile, m, n):
            found[str(tile)] = functools.partial(gemm_fp8_tiled, *rest, chains(kind, k), tile, out)
    if kind == "split" and partition(m, n, k, multiprocessors(0))[1] > 1:
        found[gemm_shapes.SPLIT_K] = functools.partial(gemm_fp8_split_k, *rest)
    return found


def run(progress: Callable[[float], None] | None = None, repeats: int = 9) -> dict[str, Any]:
    """Measure; `progress` is told the fraction done."""
    flush = measure.Flush(1 << 27)
    rows: list[dict[str, Any]] = []
    listed = cases()
    with torch.no_grad():
        for done, (kind, m, n, k) in enumerate(listed):
            samples = measure.interleave(variants(kind, m, n, k), repeats=repeats, warmup=1, flush=flush, ahead=True)
            ms = {name: measure.summary(times)["median"] for name, times in samples.items()}
            rows.append({"kind": kind, "m": m, "n": n, "k": k, "ms": ms})
            if progress is not None:
                progress((done + 1) / len(listed))
    return {
        "what": "ms of cuBLASLt and of each tile, L2 flushed, bf16 output",
        "repeats": repeats,
        "processors": multiprocessors(0),
        "rows": rows,
        "provenance": measure.provenance(KERNELS),
    }


def choice(row: Mapping[str, Any], processors: int) -> dict[str, Any]:
    """What `select_tile` chooses of the tiles in a row of the result, against the best one and against cuBLASLt."""
    measured = tuple(tile for tile in FP8_TILES if str(tile) in row["ms"])
    if row["kind"] == "bf16":
        tile = str(select_tile(row["m"], row["n"], 2 * row["k"], False, processors))
    else:
        tile = gemm_shapes.chosen(row["kind"], row["m"], row["n"], row["k"], processors, measured)
    best = min(ms for name, ms in row["ms"].items() if name != "theirs")
    return {
        "tile": tile,
        "over_best": row["ms"][tile] / best,
        "speed_over_theirs": row["ms"]["theirs"] / row["ms"][tile],
    }
