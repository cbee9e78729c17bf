"""Which FP8 GEMMs of a fixed list equal cuBLASLt's in every word (docs/results/gemm_equality.json).

Every shape is computed with fast and with split accumulation and fp32 output, and compared with `torch._scaled_mm` in
every word. Where words differ, two questions are answered. Are ours right? Sampled rows and columns are compared with
the CPU definition, at full K. Why do theirs differ? cuBLASLt may split K over several blocks and add the partial sums:
`split_k` reproduces this with our own products of pieces of K.
"""

from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized.bench import Payload, Progress, each, result, silent
from optimized.bench.kernels.gemm import differing, scaled_mm, shapes
from optimized.bench.table import Table, table

NAME = "gemm_equality"
WHAT = "which FP8 GEMMs equal cuBLASLt in every word"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Beside the layer's twelve: squares, tall, wide, odd multiples of 16, ragged rows, few outputs with a long K.
SHAPES = {
    "square 1024": (1024, 1024, 1024),
    "square 4096": (4096, 4096, 4096),
    "square 8192": (8192, 8192, 8192),
    "small layer qkv": (256, 3072, 1024),
    "small layer fc2": (256, 1024, 4096),
    "one token": (1, 4096, 4096),
    "seven tokens": (7, 4096, 4096),
    "ragged": (129, 272, 144),
    "ragged rows": (1000, 2064, 2048),
    "odd multiples of 16": (777, 1040, 1040),
    "K of 16": (512, 512, 16),
    "tall": (32768, 256, 1024),
    "wide": (64, 32768, 1024),
    "long K": (2048, 2048, 32768),
    "longest K": (512, 512, 65536),
    "one tile, long K": (128, 128, 16384),
    "few outputs, long K": (16, 16, 16384),
}
SAMPLED_ROWS, SAMPLED_COLUMNS = 8, 16

twin = torch.ops.twin


def problems() -> dict[str, tuple[int, int, int]]:
    """The list: name to M, N, K."""
    return {**shapes(), **SHAPES}


def operands(name: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random FP8 operands; the left one is E5M2 for dgrad and wgrad, and for every second of `SHAPES`."""
    fprop = name.endswith("fprop") or (name in SHAPES and list(SHAPES).index(name) % 2 == 0)
    a = torch.randn(m, k, device="cuda").to(E4M3 if fprop else E5M2)
    return a, torch.randn(n, k, device="cuda").to(E4M3)


def split_k(a: torch.Tensor, b: torch.Tensor, accumulate: str, theirs: torch.Tensor) -> str | None:
    """How cuBLASLt splits K, if our products of equal pieces of K, added in order, give its words."""
    one = torch.ones(1, device="cuda")
    blocks = -(-a.shape[1] // 128)
    for pieces in range(2, 65):
        step = 128 * -(-blocks // pieces)
        total = None
        for start in range(0, a.shape[1], step):
            part = [x[:, start : start + step].contiguous() for x in (a, b)]
            product = twin.gemm_fp8(*part, one, one, None, torch.float32, accumulate)
            total = product if total is None else total + product
        if total is not None and differing(total, theirs) == 0:
            return f"cuBLASLt splits K into {pieces} pieces of {step} and adds them in fp32, in order"
    return None


def definition_agrees(a: torch.Tensor, b: torch.Tensor, accumulate: str, ours: torch.Tensor) -> int:
    """How many sampled words differ from the CPU definition, at full K."""
    rows = torch.randperm(a.shape[0], device="cuda")[:SAMPLED_ROWS]
    columns = torch.randperm(b.shape[0], device="cuda")[:SAMPLED_COLUMNS]
    sampled = [x.view(torch.uint8)[i].cpu().view(x.dtype) for x, i in ((a, rows), (b, columns))]
    one = torch.ones(1)
    expected = twin.gemm_fp8(*sampled, one, one, None, torch.float32, accumulate)
    return differing(ours[rows][:, columns].cpu(), expected)


def compare(name: str, m: int, n: int, k: int, accumulate: str) -> dict[str, Any]:
    """One row of the result."""
    a, b = operands(name, m, n, k)
    one = torch.ones(1, device="cuda")
    ours = twin.gemm_fp8(a, b, one, one, None, torch.float32, accumulate)
    theirs = scaled_mm(a, b, one, torch.float32, accumulate)
    words = differing(ours, theirs)
    formats = f"{'e4m3' if a.dtype == E4M3 else 'e5m2'}.e4m3"
    row: dict[str, Any] = {"name": name, "m": m, "n": n, "k": k, "formats": formats, "accumulate": accumulate}
    row |= {"words": ours.numel(), "differing_words": words}
    if m * n <= 1 << 20 or words:
        sampled = min(m, SAMPLED_ROWS) * min(n, SAMPLED_COLUMNS)
        found = definition_agrees(a, b, accumulate, ours)
        row["sampled_against_the_cpu"] = {"words": sampled, "differing_words": found}
    if words:
        why = split_k(a, b, accumulate, theirs)
        row["why"] = why or "unknown: no in-order split of K reproduces cuBLASLt's words"
    return row


@torch.no_grad()
def run(progress: Progress = silent) -> Payload:
    torch.manual_seed(0)
    cases = [(name, *shape, accumulate) for name, shape in problems().items() for accumulate in ("fast", "split")]
    rows = [compare(*case) for case in each(cases, progress)]
    return result(
        "fp32 words of twin::gemm_fp8 compared with torch._scaled_mm's (cuBLASLt), random data",
        ("gemm_fp8", "gemm_fp8_split_k"),
        problems=len(rows),
        problems_with_every_word_equal=sum(row["differing_words"] == 0 for row in rows),
        words=sum(row["words"] for row in rows),
        differing_words=sum(row["differing_words"] for row in rows),
        rows=rows,
    )


def tables(payload: Payload) -> list[Table]:
    """How many GEMMs equal cuBLASLt's in every word, and those that do not, with the reason."""
    different = [row for row in payload["rows"] if row["differing_words"]]
    words = sum(row["words"] for row in payload["rows"] if not row["differing_words"])
    rows = [(f"{payload['problems_with_every_word_equal']} of {payload['problems']} GEMMs", f"{words:,}", "0", "")]
    for row in different:
        shape = f"{row['m']}×{row['n']}×{row['k']}, {row['accumulate']} accumulation"
        rows.append((shape, f"{row['words']:,}", f"{row['differing_words']:,}", row["why"]))
    columns = ("FP8 GEMM M×N×K", "words", "different from cuBLASLt", "why")
    how = "FP8 GEMMs with fp32 output, every word compared with that of `torch._scaled_mm`."
    return [table(payload, "Equality with cuBLASLt", columns, rows, how)]
