"""The fused FP8 products at the layer's shapes (docs/results/gemm_epilogue.json), in one interleaved run each.

Against our product alone and cuBLASLt's (`torch._scaled_mm`), both of the same shape and accumulation with bf16 output:
what the epilogue costs; and against the ops that the fused one stands for, one after the other: what it saves. A tile
is named, since an op chooses the other kernels where they have won here.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench.gemm import FFN, HIDDEN, TOKENS, scaled_mm
from optimized.bench.table import Table, origin, percent
from optimized.ops import gemm_fused
from optimized.ops.gemm_tile import Tile, multiprocessors, select_tile
from reference.ops.activation import KINDS

NAME = "gemm_epilogue"
WHAT = "FP8 products fused with activations, dropout, accumulation, against the product alone"
KERNELS = ("gemm_fp8_fused", "gemm_fp8", "gemm", "activation_cast_transpose", "dropout")
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16

twin = torch.ops.twin
Call = Callable[[], object]
Case = tuple[str, str, tuple[int, int, int], dict[str, Call]]


def codes(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random FP8 values."""
    return torch.randn(rows, columns, device="cuda").to(dtype)


def tile(a: torch.Tensor, b: torch.Tensor) -> Tile:
    """The tile that the GEMM alone gets."""
    return select_tile(a.shape[0], b.shape[0], a.shape[1], False, multiprocessors(0))


def products(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor, accumulate: str) -> dict[str, Call]:
    """Our GEMM and cuBLASLt's, with no epilogue."""
    return {
        "plain": functools.partial(twin.gemm_fp8, a, b, s, s, None, BF16, accumulate),
        "cublaslt": functools.partial(scaled_mm, a, b, s, BF16, accumulate),
    }


def activation(kind: str) -> Case:
    """fc1's GEMM and the activation after it; the GEMM has ffn columns."""
    x, w, s = codes(TOKENS, HIDDEN, E4M3), codes(FFN, HIDDEN, E4M3), torch.full((1,), 0.01, device="cuda")
    bias, state = torch.randn(FFN, device="cuda", dtype=BF16), (torch.ones(1, device="cuda"), _history(), 0, E4M3)

    def apart() -> object:
        h = twin.gemm_fp8(x, w, s, s, bias, BF16, "fast")
        return h, twin.activation_cast_transpose(h, kind, *state)

    fused = functools.partial(gemm_fused.gemm_fp8_activation, x, w, s, s, bias, BF16, kind, *state, tile=tile(x, w))
    calls: dict[str, Call] = {"fused": fused, "apart": apart, **products(x, w, s, "fast")}
    return "fc1.fprop", kind, (TOKENS, FFN, HIDDEN), calls


def residual(name: str, k: int, p: float) -> Case:
    """The projection's or fc2's product with bias, dropout and residual."""
    x, w, s = codes(TOKENS, k, E4M3), codes(HIDDEN, k, E4M3), torch.full((1,), 0.01, device="cuda")
    bias, rows = torch.randn(HIDDEN, device="cuda", dtype=BF16), torch.randn(TOKENS, HIDDEN, device="cuda", dtype=BF16)
    rng_state = torch.tensor([1, 2], device="cuda")

    def apart() -> object:
        return twin.bias_dropout_add(twin.gemm_fp8(x, w, s, s, None, BF16, "fast"), bias, rows, p, rng_state)

    rest = (bias, rows, BF16, p, rng_state)
    fused = functools.partial(gemm_fused.gemm_fp8_bias_dropout_add, x, w, s, s, *rest, tile=tile(x, w))
    calls: dict[str, Call] = {"fused": fused, "apart": apart, **products(x, w, s, "fast")}
    return name, f"bias + dropout {p} + residual", (TOKENS, HIDDEN, k), calls


def accumulation(dtype: torch.dtype) -> Case:
    """fc1's gradient of its weight, added to what is there."""
    g, x, s = codes(FFN, TOKENS, E5M2), codes(HIDDEN, TOKENS, E4M3), torch.full((1,), 0.01, device="cuda")
    out = torch.zeros(FFN, HIDDEN, device="cuda", dtype=dtype)

    def apart() -> object:
        return out.copy_(out.float() + twin.gemm_fp8(g, x, s, s, None, torch.float32, "split"))

    fused = functools.partial(twin.gemm_fp8_accumulate, g, x, s, s, out)
    calls: dict[str, Call] = {"fused": fused, "apart": apart, **products(g, x, s, "split")}
    return "fc1.wgrad", f"added to {str(dtype).removeprefix('torch.')}", (FFN, HIDDEN, TOKENS), calls


def _history() -> torch.Tensor:
    return torch.zeros(16, 1, device="cuda")


def cases() -> Iterator[Callable[[], Case]]:
    """Every case, made when its turn comes."""
    yield from (functools.partial(activation, kind) for kind in KINDS)
    yield from (functools.partial(residual, "proj.fprop", HIDDEN, p) for p in (0.0, 0.1))
    yield functools.partial(residual, "fc2.fprop", FFN, 0.1)
    yield from (functools.partial(accumulation, dtype) for dtype in (torch.float32, BF16))


def run(progress: Callable[[float], None] | None = None, repeats: int = 20) -> dict[str, Any]:
    """Measure; `progress` is told the fraction done."""
    rows: list[dict[str, Any]] = []
    todo = list(cases())
    with torch.no_grad():
        for done, make in enumerate(todo):
            name, epilogue, (m, n, k), calls = make()
            samples = measure.interleave(calls, repeats=repeats, warmup=3)
            row: dict[str, Any] = {"name": name, "epilogue": epilogue, "m": m, "n": n, "k": k}
            row["ms"] = {side: measure.summary(values) for side, values in samples.items()}
            for side in ("plain", "cublaslt", "apart"):
                ratios = [theirs / ours for ours, theirs in zip(samples["fused"], samples[side], strict=True)]
                row[f"speed_over_{side}"] = measure.summary(ratios)
            rows.append(row)
            if progress is not None:
                progress((done + 1) / len(todo))
    return {
        "what": "time of the product alone (ours, cuBLASLt's) and of the ops apart, over the fused op's; same run",
        "repeats": repeats,
        "rows": rows,
        "provenance": measure.provenance(KERNELS),
    }


def tables(payload: dict[str, Any]) -> list[Table]:
    """Fused products: against the product alone, ours and cuBLASLt's, and against the ops apart."""
    rows = []
    for row in payload["rows"]:
        speeds = (row[f"speed_over_{side}"]["median"] for side in ("plain", "cublaslt", "apart"))
        name = f"{row['name']} {row['m']}×{row['n']}×{row['k']}, {row['epilogue']}"
        rows.append((name, f"{row['ms']['fused']['median']:.3f}", *map(percent, speeds)))
    columns = (
        "FP8 product and what follows it",
        "ms",
        "of the product alone",
        "of cuBLASLt's alone",
        "of the ops apart",
    )
    note = (
        "Speed of the fused kernel, bf16: 100 % is that of the product alone (fast forward, split backward), and that "
        "of the ops one after the other, interleaved in the same run. Where those win (the backward, a short K), the "
        f"op runs them instead. {origin(payload)}"
    )
    return [Table("Products with what follows them", columns, tuple(rows), note)]
