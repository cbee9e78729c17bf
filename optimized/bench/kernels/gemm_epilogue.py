"""FP8 GEMMs with fused epilogues at the layer's shapes (docs/results/gemm_epilogue.json).

Each fused GEMM runs interleaved with our GEMM alone, with cuBLASLt's (`torch._scaled_mm`), and with the separate ops in
whose place it stands. The first two have the same shape and accumulation and bf16 output, and show what the epilogue
costs; the last show what it saves. The call names a tile, because without one an op runs separate ops where they won
here.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench import Payload, Progress, each, result, silent
from optimized.bench.kernels.gemm import FFN, HIDDEN, TOKENS, fp8_calls
from optimized.bench.table import Table, percent, table
from optimized.ops.gemms import gemm_fused
from optimized.ops.gemms.gemm_tile import Tile, multiprocessors, select_tile
from reference.ops.activations.activation import RECORDED as KINDS

NAME = "gemm_epilogue"
WHAT = "FP8 GEMMs with epilogues, against cuBLASLt"
KERNELS = ("gemm_fp8_fused", "gemm_fp8", "gemm", "activation_cast_transpose", "dropout")
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16

twin = torch.ops.twin
Call = Callable[[], object]
Case = tuple[str, str, tuple[int, int, int], dict[str, Call]]


def codes(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random FP8 values."""
    return torch.randn(rows, columns, device="cuda").to(dtype)


def wide(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random 16-bit values."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def beside(
    a: torch.Tensor, b: torch.Tensor, s: torch.Tensor, accumulate: str, fused: Call, apart: Call
) -> dict[str, Call]:
    """The calls of a case: the fused op, the separate ops, our GEMM alone, and cuBLASLt's."""
    ours, theirs = fp8_calls(a, b, s, accumulate).values()
    return {"fused": fused, "apart": apart, "plain": ours, "cublaslt": theirs}


def tile(a: torch.Tensor, b: torch.Tensor) -> Tile:
    """The tile that the GEMM alone gets."""
    return select_tile(a.shape[0], b.shape[0], a.shape[1], False, multiprocessors(0))


def activation(kind: str) -> Case:
    """fc1's forward GEMM, with ffn columns, then the activation."""
    x, w, s = codes(TOKENS, HIDDEN, E4M3), codes(FFN, HIDDEN, E4M3), torch.full((1,), 0.01, device="cuda")
    bias, state = wide(FFN), (torch.ones(1, device="cuda"), torch.zeros(16, 1, device="cuda"), 0, E4M3)

    def apart() -> object:
        h = twin.gemm_fp8(x, w, s, s, bias, BF16, "fast")
        return h, twin.activation_cast_transpose(h, kind, *state)

    fused = functools.partial(gemm_fused.gemm_fp8_activation, x, w, s, s, bias, BF16, kind, *state, tile=tile(x, w))
    return "fc1.fprop", kind, (TOKENS, FFN, HIDDEN), beside(x, w, s, "fast", fused, apart)


def residual(name: str, k: int, p: float) -> Case:
    """The forward GEMM of the projection or of fc2, then bias, dropout and residual."""
    x, w, s = codes(TOKENS, k, E4M3), codes(HIDDEN, k, E4M3), torch.full((1,), 0.01, device="cuda")
    bias, rows, rng_state = wide(HIDDEN), wide(TOKENS, HIDDEN), torch.tensor([1, 2], device="cuda")

    def apart() -> object:
        return twin.bias_dropout_add(twin.gemm_fp8(x, w, s, s, None, BF16, "fast"), bias, rows, p, rng_state)

    rest = (bias, rows, BF16, p, rng_state)
    fused = functools.partial(gemm_fused.gemm_fp8_bias_dropout_add, x, w, s, s, *rest, tile=tile(x, w))
    return name, f"bias + dropout {p} + residual", (TOKENS, HIDDEN, k), beside(x, w, s, "fast", fused, apart)


def accumulation(dtype: torch.dtype) -> Case:
    """The gradient of fc1's weight, added to what is there."""
    g, x, s = codes(FFN, TOKENS, E5M2), codes(HIDDEN, TOKENS, E4M3), torch.full((1,), 0.01, device="cuda")
    out = torch.zeros(FFN, HIDDEN, device="cuda", dtype=dtype)

    def apart() -> object:
        return out.copy_(out.float() + twin.gemm_fp8(g, x, s, s, None, torch.float32, "split"))

    fused = functools.partial(twin.gemm_fp8_accumulate, g, x, s, s, out)
    what = f"added to {str(dtype).removeprefix('torch.')}"
    return "fc1.wgrad", what, (FFN, HIDDEN, TOKENS), beside(g, x, s, "split", fused, apart)


def cases() -> list[Callable[[], Case]]:
    """Every case, made when its turn comes."""
    return [
        *(functools.partial(activation, kind) for kind in KINDS),
        *(functools.partial(residual, "proj.fprop", HIDDEN, p) for p in (0.0, 0.1)),
        functools.partial(residual, "fc2.fprop", FFN, 0.1),
        *(functools.partial(accumulation, dtype) for dtype in (torch.float32, BF16)),
    ]


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 20) -> Payload:
    rows: list[dict[str, Any]] = []
    for make in each(cases(), progress):
        name, epilogue, (m, n, k), calls = make()
        samples = measure.interleave(calls, repeats=repeats, warmup=3)
        row: dict[str, Any] = {"name": name, "epilogue": epilogue, "m": m, "n": n, "k": k}
        row["ms"] = {side: measure.summary(values) for side, values in samples.items()}
        for side in ("plain", "cublaslt", "apart"):
            ratios = [theirs / ours for ours, theirs in zip(samples["fused"], samples[side], strict=True)]
            row[f"speed_over_{side}"] = measure.summary(ratios)
        rows.append(row)
    what = "time of the GEMM alone (ours, cuBLASLt's) and of the separate ops, over the fused op's; same run"
    return result(what, KERNELS, repeats=repeats, rows=rows)


def tables(payload: Payload) -> list[Table]:
    """Fused GEMMs: against the GEMM alone, ours and cuBLASLt's, and against the separate ops."""
    rows = []
    for row in payload["rows"]:
        speeds = (row[f"speed_over_{side}"]["median"] for side in ("plain", "cublaslt", "apart"))
        name = f"{row['name']} {row['m']}×{row['n']}×{row['k']}, {row['epilogue']}"
        rows.append((name, f"{row['ms']['fused']['median']:.3f}", *map(percent, speeds)))
    columns = ("FP8 GEMM M×N×K, epilogue", "ms", "of our GEMM alone", "of cuBLASLt's GEMM alone", "of separate ops")
    how = (
        "The fused kernel's speed as a share of that of our GEMM without the epilogue, of cuBLASLt's without it, and "
        "of GEMM and epilogue as separate ops, which the library runs where they win."
    )
    return [table(payload, "FP8 GEMMs with fused epilogues, bf16 output", columns, rows, how)]
