"""The cases of `twin parity`: each runs one operation on one device and returns its outputs.

Inputs come from Philox, so a case is the same on every machine and a recording has only outputs. A `live` case would
take too long to replay: it runs where there is a GPU to compare with. Here are casts, the scale update and GEMMs;
`cases_ops` and `cases_optimizers` have the other ops, `cases_layers` the layers.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.case import (
    FP8,
    HALVES,
    WIDE,
    Case,
    Outputs,
    codes,
    inverses,
    named,
    numbers,
    random_state,
    short,
    state,
)
from reference import philox
from reference.ops.activation import GATED
from reference.ops.activation import RECORDED as KINDS

twin = torch.ops.twin


def _gemm_fp8(
    shape: tuple[int, int, int], types: tuple[torch.dtype, ...], bias: bool, accumulate: str, device: torch.device
) -> Outputs:
    m, n, k = shape
    a, b = codes((m, k), types[0], 61).to(device), codes((n, k), types[1], 62).to(device)
    scale_invs = inverses(device)
    vector = philox.normal((n,), seed=63).to(device, torch.bfloat16) if bias else None
    return {"out": twin.gemm_fp8(a, b, *scale_invs, vector, types[2], accumulate)}


def _gemm(
    shape: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype], layout: str, device: torch.device
) -> Outputs:
    m, n, k = shape
    a, b = philox.normal((m, k), seed=71), philox.normal((n, k), seed=72)
    a, b = (
        (t.t().contiguous().to(types[0]).to(device).t() if transposed == "T" else t.to(types[0]).to(device))
        for t, transposed in zip((a, b), layout, strict=True)
    )
    return {"out": twin.gemm(a, b, None, types[1])}


def products() -> Iterator[Case]:
    """GEMMs."""
    for a, b, accumulate in product(FP8, FP8, ("fast", "split")):
        for (m, n, k), out, bias in (
            ((40, 48, 272), torch.float32, False),
            ((1, 32, 128), torch.bfloat16, True),
            ((7, 64, 16), torch.float16, False),
            ((520, 272, 1040), torch.bfloat16, True),
        ):
            label = f"{short(a)}·{short(b)} {m}x{n}x{k} to {short(out)}{', bias' * bias}"
            run = partial(_gemm_fp8, (m, n, k), (a, b, out), bias, accumulate)
            yield Case(f"gemm_fp8 ({accumulate})", label, run, live=m > 500)
    for half, layout in product(HALVES, ("NN", "NT", "TN", "TT")):
        for (m, n, k), out in (((33, 47, 70), torch.float32), ((64, 32, 128), half), ((300, 200, 520), half)):
            label = f"{short(half)} {m}x{n}x{k} {layout} to {short(out)}"
            yield Case("gemm", label, partial(_gemm, (m, n, k), (half, out), layout), live=m >= 300)


def _fused(op: str, shape: tuple[int, int, int], kind: str, half: torch.dtype, device: torch.device) -> Outputs:
    """A GEMM fused with the activation `kind`; `shape` is the activation's rows and columns, and K."""
    m, cols, k = shape
    n = cols * (2 if kind in GATED else 1)
    scales, history = state(device)
    scaling, scale_invs = (scales, history, 1), inverses(device)
    vector = philox.normal((n,), seed=83).to(half).to(device)
    if op == "gemm_fp8_activation":
        a, b = codes((m, k), FP8[0], 81).to(device), codes((n, k), FP8[0], 82).to(device)
        results = twin.gemm_fp8_activation(a, b, *scale_invs, vector, half, kind, *scaling, FP8[0])
        return {**named("h q q_t scale_inv", results), "amax_history": history}
    a, b = codes((m, k), FP8[1], 84).to(device), codes((cols, k), FP8[0], 85).to(device)
    x = numbers((m, n), half, 86).to(device)
    results = twin.gemm_fp8_activation_backward(a, b, *scale_invs, x, kind, *scaling, FP8[1])
    return {**named("q q_t scale_inv dbias", results), "amax_history": history}


def _residual(shape: tuple[int, int, int], p: float, half: torch.dtype, device: torch.device) -> Outputs:
    m, n, k = shape
    a, b = codes((m, k), FP8[0], 87).to(device), codes((n, k), FP8[0], 88).to(device)
    scale_invs = inverses(device)
    bias, residual = numbers((1, n), half, 89).to(device)[0], numbers((m, n), half, 90).to(device)
    drawn = random_state(device)
    out = twin.gemm_fp8_bias_dropout_add(a, b, *scale_invs, bias, residual, half, p, drawn)
    return {"out": out, "rng_state": drawn}


def _accumulated(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Outputs:
    m, n, k = shape
    a, b = codes((m, k), FP8[1], 91).to(device), codes((n, k), FP8[0], 92).to(device)
    scale_invs = inverses(device)
    out, wide_out = (numbers(shape[:2], dtype, 93 + i).to(device) for i in range(2))
    twin.gemm_fp8_accumulate(a, b, *scale_invs, out)
    wide = (philox.normal((rows, k), seed=95).to(torch.bfloat16).to(device) for rows in (m, n))
    twin.gemm_accumulate(*wide, wide_out)
    return {"FP8": out, "bf16": wide_out}


def fused() -> Iterator[Case]:
    """GEMMs fused with the next operation."""
    shapes = ((1, 16, 16), (70, 96, 272), (300, 528, 400))
    for half, kind, shape in product(HALVES, KINDS, shapes):
        for op in ("gemm_fp8_activation", "gemm_fp8_activation_backward"):
            label = f"{kind}, {short(half)} {'x'.join(map(str, shape))}"
            yield Case(op, label, partial(_fused, op, shape, kind, half), live=shape[0] > 200)
    for half, p, shape in product(HALVES, (0.0, 0.1), shapes):
        label = f"{short(half)} {'x'.join(map(str, shape))} p={p}"
        yield Case("gemm_fp8_bias_dropout_add", label, partial(_residual, shape, p, half), live=shape[0] > 200)
    for dtype, shape in product(WIDE, shapes):
        label = f"to {short(dtype)}, {'x'.join(map(str, shape))}"
        yield Case("gemm accumulation", label, partial(_accumulated, shape, dtype), live=shape[0] > 200)


def cases() -> Iterator[Case]:
    yield from products()
    yield from fused()
