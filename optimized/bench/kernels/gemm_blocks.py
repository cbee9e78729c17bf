"""The twelve GEMMs of a GPT layer with scales of blocks of 128 (docs/results/gemm_blocks.json).

E4M3, bf16 output, scales that are powers of two. Forward and the input's gradient multiply blocks of a row with square
blocks, the weight's gradient blocks of rows on both sides. Ours is compared with cuBLASLt's (`torch._scaled_mm`), word
by word, with our GEMM of one scale and split accumulation, which says what the scales cost, and with DeepGEMM's where
`deep_gemm` can be imported, word by word, too. DeepGEMM's weight gradient is fp32 and adds to what its output holds, so
its words are compared with ours in fp32.
"""

import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench import Payload, Progress, each, result, silent
from optimized.bench.kernels.gemm import differing, shapes
from optimized.bench.table import Table, percent, table
from reference.ops.casts.cast_blocks import blocks_of

NAME = "gemm_blocks"
WHAT = "GEMMs with scales of blocks, against cuBLASLt"
KERNELS = ("gemm_fp8_blocks", "gemm_fp8", "cast_blocks")
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16

twin = torch.ops.twin
Operand = tuple[torch.Tensor, torch.Tensor]
Calls = dict[str, Callable[[], torch.Tensor]]


def operand(rows: int, k: int, square: bool) -> Operand:
    """Random codes `[rows, k]`, and the scales of their blocks."""
    values = torch.randn(rows, k, device="cuda", dtype=BF16)
    return twin.cast_blocks(values, E4M3, square, "power_of_two", 0.0)


def scaled_mm(a: Operand, b: Operand, squares: tuple[bool, bool], out_dtype: torch.dtype) -> torch.Tensor:
    """cuBLASLt's product; its layouts of scales are views of ours. `squares`: whether a's and b's blocks are square."""
    pairs = zip((a, b), squares, strict=True)
    of_a, of_b = (
        scales[:, : blocks_of(codes.shape[1])] if square else scales[:, : len(codes)].t()
        for (codes, scales), square in pairs
    )
    return torch._scaled_mm(a[0], b[0].t(), scale_a=of_a, scale_b=of_b.t(), out_dtype=out_dtype)


def deep_gemm_call(a: Operand, b: Operand, square: bool) -> Callable[[], torch.Tensor]:
    """DeepGEMM's product of the same operands, its scales laid out beforehand."""
    import deep_gemm  # type: ignore[import-not-found]  # no package of ours: who wants the column installs it

    (m, k), n = a[0].shape, b[0].shape[0]
    scales = a[1][:, :m].t().contiguous(), (b[1][:, : blocks_of(k)] if square else b[1][:, :n].t()).contiguous()
    laid = deep_gemm.get_mn_major_tma_aligned_tensor(scales[0])
    other = scales[1] if square else deep_gemm.get_mn_major_tma_aligned_tensor(scales[1])
    out = torch.zeros(m, n, device="cuda", dtype=BF16 if square else torch.float32)
    more = {"disable_ue8m0_cast": True} | ({} if square else {"c": out, "recipe": (1, 1, 128)})

    def call() -> torch.Tensor:
        deep_gemm.fp8_gemm_nt((a[0], laid), (b[0], other), out, **more)
        return out

    return call


def calls(name: str, m: int, n: int, k: int) -> Calls:
    """Ours, cuBLASLt's, ours with one scale, and DeepGEMM's."""
    square = not name.endswith("wgrad")
    a, b, one = operand(m, k, False), operand(n, k, square), torch.ones(1, device="cuda")
    found: Calls = {
        "ours": lambda: twin.gemm_fp8_blocks(a[0], b[0], a[1], b[1], False, square, None, BF16),
        "theirs": lambda: scaled_mm(a, b, (False, square), BF16),
        "one_scale": lambda: twin.gemm_fp8(a[0], b[0], one, one, None, BF16, "split"),
    }
    if importlib.util.find_spec("deep_gemm") is not None:
        found["deep_gemm"] = deep_gemm_call(a, b, square)
    return found


def differing_from_deep_gemm(m: int, n: int, k: int, square: bool) -> int:
    """How many words of a product are not DeepGEMM's, of other numbers than those that are timed."""
    a, b = operand(m, k, False), operand(n, k, square)
    theirs = deep_gemm_call(a, b, square)()
    return differing(twin.gemm_fp8_blocks(a[0], b[0], a[1], b[1], False, square, None, theirs.dtype), theirs)


def measure_one(name: str, m: int, n: int, k: int, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    variants = calls(name, m, n, k)
    row: dict[str, Any] = {"name": name, "m": m, "n": n, "k": k}
    row["differing_words"] = differing(variants["ours"](), variants["theirs"]())
    if "deep_gemm" in variants:
        row["differing_from_deep_gemm"] = differing_from_deep_gemm(m, n, k, not name.endswith("wgrad"))
    samples = measure.interleave(variants, repeats=repeats, warmup=3)
    row["ms"] = {side: measure.spread(values) for side, values in samples.items()}
    row["tflops"] = {side: 2e-9 * m * n * k / value["median"] for side, value in row["ms"].items()}
    for side in (side for side in samples if side != "ours"):
        ratios = [other / ours for ours, other in zip(samples["ours"], samples[side], strict=True)]
        row[f"speed_over_{side}"] = measure.spread(ratios)
    return row


def geometric_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of our speed over each side, for the products with square blocks and for those without."""
    found: dict[str, dict[str, float]] = {}
    for square, kind in ((True, "square"), (False, "rows")):
        of_kind = [row for row in rows if row["name"].endswith("wgrad") != square]
        for key in (key for key in of_kind[0] if key.startswith("speed_over_")):
            mean = statistics.geometric_mean(row[key]["median"] for row in of_kind)
            found.setdefault(key, {})[kind] = mean
    return found


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 40) -> Payload:
    rows = [measure_one(name, *shape, repeats=repeats) for name, shape in each(list(shapes().items()), progress)]
    what = "time of cuBLASLt's, of ours with one scale, and of DeepGEMM's over ours, same run, random data, bf16 output"
    return result(what, KERNELS, repeats=repeats, geometric_means=geometric_means(rows), rows=rows)


SIDES = {"theirs": "of cuBLASLt", "deep_gemm": "of DeepGEMM", "one_scale": "of ours with one scale"}


def tables(payload: Payload) -> list[Table]:
    """One row per shape: our speed, and its share of the others'."""
    rows, means = payload["rows"], payload["geometric_means"]
    sides = [side for side in SIDES if f"speed_over_{side}" in means]
    cells = [
        (
            f"{row['name']} {row['m']}×{row['n']}×{row['k']}",
            f"{row['tflops']['ours']:.0f}",
            *(percent(row[f"speed_over_{side}"]["median"]) for side in sides),
            str(row["differing_words"]),
            *([str(row["differing_from_deep_gemm"])] if "differing_from_deep_gemm" in rows[0] else []),
        )
        for row in rows
    ]
    others = ["words that differ from cuBLASLt's"]
    others += ["from DeepGEMM's"] if "differing_from_deep_gemm" in rows[0] else []
    for kind, label in (("square", "row by square: geometric mean"), ("rows", "row by row: geometric mean")):
        cells.append((label, "", *(percent(means[f"speed_over_{side}"][kind]) for side in sides), *[""] * len(others)))
    columns = ("GEMM M×N×K", "TFLOP/s", *(SIDES[side] for side in sides), *others)
    how = (
        "E4M3 with scales of blocks of 128, powers of two; 100 % is the other's speed, launches interleaved in one run."
    )
    if "deep_gemm" in sides:
        how += " DeepGEMM's weight gradient is fp32 and adds to its output."
    return [table(payload, "GEMMs of a GPT layer with scales of blocks", columns, cells, how)]
