"""The cases of `twin parity`: each runs one operation on one device and returns its outputs.

Inputs come from Philox, so a case is the same on every machine and a recording has only outputs. A `live` case would
take too long to replay: it runs where there is a GPU to compare with. Here are casts, the scale update and GEMMs;
`cases_ops` and `cases_optimizers` have the other ops, `cases_layers` the layers.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings import cases_layers, cases_ops, cases_optimizers
from optimized.recordings.case import (
    FP8,
    HALVES,
    WIDE,
    Case,
    Outputs,
    codes,
    every_word,
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
from reference.ops.cast_transpose import cast_outputs

twin = torch.ops.twin


def _cast(op: str, make: Callable[[], torch.Tensor], dtype: torch.dtype, scale: float, device: torch.device) -> Outputs:
    names = {"cast": "q scale_inv", "cast_transpose": "q q_t scale_inv"}.get(op, "q q_t scale_inv dbias")
    scales = torch.tensor([1.0, scale, 1.0], device=device)
    history = torch.zeros(4, 3, device=device)
    history[0, 1] = 0.5
    results = getattr(twin, op)(make().to(device), scales, history, 1, dtype)
    return {**named(names, results), "amax_history": history}


def _casts_together(wide: torch.dtype, dtype: torch.dtype, device: torch.device) -> Outputs:
    """Matrices of several shapes in one call; each has a column of its own."""
    xs = [numbers((rows, 80), wide, 21 + rows).to(device) for rows in (1, 7, 130)]
    scales, history = torch.tensor([1.0, 3.0, 37.5], device=device), torch.zeros(4, 3, device=device)
    parts = [list(part) for part in zip(*(cast_outputs(x, x.shape[1], dtype) for x in xs), strict=True)]
    twin.multi_cast_transpose(xs, [scales] * 3, [history] * 3, [0, 1, 2], *parts)
    found = {"amax_history": history}
    for name, part in zip(("q", "q_t", "scale_inv"), parts, strict=True):
        found |= {f"{name}.{i}": x for i, x in enumerate(part)}
    return found


def _side_by_side(wide: torch.dtype, dtype: torch.dtype, groups: int, device: torch.device) -> Outputs:
    """Three parts of 16, 8 and 8 columns in each group."""
    xs = [numbers((130, groups * width), wide, 31 + i).to(device) for i, width in enumerate((16, 8, 8))]
    scales, history = torch.tensor([1.0, 3.0], device=device), torch.zeros(4, 2, device=device)
    results = twin.cat_cast_transpose_dbias(xs, groups, scales, history, 1, dtype)
    return {**named("q q_t scale_inv dbias", results), "amax_history": history}


def casts() -> Iterator[Case]:
    """The casts, and the two reductions that are part of them."""
    for wide, dtype in product(WIDE, FP8):
        label = f"{short(wide)} to {short(dtype)}"
        for scale in (1.0, 37.5):
            run = partial(_cast, "cast", partial(every_word, wide), dtype, scale)
            yield Case("cast", f"{label}, 65,536 words, scale {scale}", run)
        for op, rows in product(("cast_transpose", "cast_transpose_dbias"), (1, 7, 130, 2048)):
            run = partial(_cast, op, partial(numbers, (rows, 80), wide, 21), dtype, 3.0)
            yield Case(op, f"{label}, [{rows}, 80]", run, live=rows > 1000)
        yield Case("multi_cast_transpose", f"{label}, three matrices", partial(_casts_together, wide, dtype))
        for groups in (1, 3):
            title = f"{label}, three parts in {groups} groups"
            yield Case("cat_cast_transpose_dbias", title, partial(_side_by_side, wide, dtype, groups))
    for wide, rows in product(WIDE, (1, 63, 64, 65, 1000)):
        yield Case("dbias", f"{short(wide)} [{rows}, 48]", partial(_dbias, (rows, 48), wide))
        yield Case("amax", f"{short(wide)} [{rows}, 48]", partial(_amax, (rows, 48), wide))

    for wide, dtype in product(WIDE, FP8):
        run = partial(_cast_stats, partial(every_word, wide), dtype)
        title = f"{short(wide)} to {short(dtype)}, 65,536 words"
        yield Case("cast_stats", title, run, live=True)  # not recorded yet


def _cast_stats(make: Callable[[], torch.Tensor], dtype: torch.dtype, device: torch.device) -> Outputs:
    x = make().to(device)
    q, scale_inv = twin.cast(x, torch.tensor([37.5], device=device), None, 0, dtype)
    found = named("counts sums", twin.cast_stats(x, q, scale_inv))
    return found | named("plain_counts plain_sums", twin.cast_stats(x, None, None))


def _dbias(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Outputs:
    return {"dbias": twin.dbias(numbers(shape, dtype, 31).to(device))}


def _amax(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Outputs:
    history = torch.zeros(2, 3, device=device)
    twin.amax(numbers(shape, dtype, 41).to(device), history, 0)
    return {"amax_history": history}


def _scale_update(algorithm: str, margin: int, device: torch.device) -> Outputs:
    """Nine updates of three modules at once, with amaxes of 0, infinity and NaN among them."""
    scales = [torch.ones(n, device=device) for n in (3, 3, 2)]
    histories = [torch.zeros(rows, n, device=device) for rows, n in ((5, 3), (1, 3), (16, 2))]
    amaxes = numbers((9, 8), torch.float32, 51).abs()
    amaxes[3] = 0.0
    amaxes[4, :3] = torch.tensor([float("inf"), float("nan"), 1e-45])
    for step in range(9):
        for history, part in zip(histories, amaxes[step].split([3, 3, 2]), strict=True):
            history[0] = part.to(device)
        twin.scale_update(scales, histories, 448.0, margin, algorithm)
    return {
        **{f"scale{i}": scale for i, scale in enumerate(scales)},
        **{f"history{i}": history for i, history in enumerate(histories)},
    }


def updates() -> Iterator[Case]:
    """The scale update."""
    for algorithm, margin in product(("max", "most_recent"), (0, 2)):
        yield Case("scale_update", f"{algorithm}, margin {margin}", partial(_scale_update, algorithm, margin))


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
    """Every case of the four files, op by op."""
    yield from casts()
    yield from updates()
    yield from products()
    yield from fused()
    yield from cases_ops.cases()
    yield from cases_optimizers.cases()
    yield from cases_layers.cases()
