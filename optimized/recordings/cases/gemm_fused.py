"""Cases of FP8 GEMMs fused with the next operation."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.ops.gemms import gemm_fused
from optimized.ops.gemms.gemm_tile import TILES, Tile
from optimized.recordings.calls import BF16, E4M3, E5M2, FP16, FP32, Call, Calls, Inputs, ahead
from optimized.recordings.case import (
    FP8,
    HALVES,
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
from optimized.recordings.cases.gemm_fp8 import operands
from reference.numbers import philox
from reference.ops.activations.activation import GATED, RECORDED

twin = torch.ops.twin
Shape = tuple[int, int, int]


def _fused(op: str, shape: Shape, kind: str, half: torch.dtype, device: torch.device) -> Outputs:
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


def _residual(shape: Shape, p: float, half: torch.dtype, device: torch.device) -> Outputs:
    m, n, k = shape
    a, b = codes((m, k), FP8[0], 87).to(device), codes((n, k), FP8[0], 88).to(device)
    scale_invs = inverses(device)
    bias, residual = numbers((1, n), half, 89).to(device)[0], numbers((m, n), half, 90).to(device)
    drawn = random_state(device)
    out = twin.gemm_fp8_bias_dropout_add(a, b, *scale_invs, bias, residual, half, p, drawn)
    return {"out": out, "rng_state": drawn}


def cases() -> Iterator[Case]:
    shapes = ((1, 16, 16), (70, 96, 272), (300, 528, 400))
    for half, kind, shape in product(HALVES, RECORDED, shapes):
        for op in ("gemm_fp8_activation", "gemm_fp8_activation_backward"):
            label = f"{kind}, {short(half)} {'x'.join(map(str, shape))}"
            yield Case(op, label, partial(_fused, op, shape, kind, half), live=shape[0] > 200)
    for half, p, shape in product(HALVES, (0.0, 0.1), shapes):
        label = f"{short(half)} {'x'.join(map(str, shape))} p={p}"
        yield Case("gemm_fp8_bias_dropout_add", label, partial(_residual, shape, p, half), live=shape[0] > 200)


def _forward(
    c: Inputs,
    shape: Shape,
    kind: str,
    half: torch.dtype = BF16,
    q: torch.dtype = E4M3,
    tile: Tile | None = None,
    bias: torch.dtype | None = None,
) -> Call:
    m, cols, k = shape
    n = cols * (2 if kind in GATED else 1)
    args = (*operands(c, m, n, k), c.x(n, dtype=bias or half), half, kind, *c.state(), 1, q)
    chosen = None if tile is None else partial(gemm_fused.gemm_fp8_activation, tile=tile)
    return Call(twin.gemm_fp8_activation, args, chosen)


def _backward(
    c: Inputs, shape: Shape, kind: str, half: torch.dtype = BF16, q: torch.dtype = E5M2, start: int = 0
) -> Call:
    m, cols, k = shape
    x = c.x(m, cols * (2 if kind in GATED else 1), dtype=half, start=start)
    args = (*operands(c, m, cols, k, E5M2), x, kind, *c.state(), 1, q)
    return Call(twin.gemm_fp8_activation_backward, args)


def _add(
    c: Inputs,
    shape: Shape,
    p: float,
    half: torch.dtype = BF16,
    parts: str = "br",
    tile: Tile | None = None,
    start: int = 0,
) -> Call:
    m, n, k = shape
    bias, added = c.x(n, dtype=half, start=start), c.x(m, n, dtype=half, start=start)
    rest = (bias if "b" in parts else None, added if "r" in parts else None, half, p, c.random_state() if p else None)
    chosen = None if tile is None else partial(gemm_fused.gemm_fp8_bias_dropout_add, tile=tile)
    return Call(twin.gemm_fp8_bias_dropout_add, (*operands(c, m, n, k), *rest), chosen)


def calls(c: Inputs) -> Calls:
    for half, kind in (*((BF16, kind) for kind in (*RECORDED, "glu")), (FP16, "gelu"), (FP16, "swiglu")):
        yield _forward(c, (70, 96, 272), kind, half)
        yield _backward(c, (70, 96, 272), kind, half)
    # Every tile, in each direction ragged; runs of eight and of four columns.
    for tile, cols in product(TILES, (272, 288)):
        for kind in ("gelu", "swiglu"):
            yield _forward(c, (330, cols, 592), kind, tile=tile)
        for p in (0.0, 0.1):
            yield _add(c, (330, cols, 592), p, tile=tile)
    for k in (128, 1024, 2048, 4096):
        yield _forward(c, (70, 512, k), "gelu", BF16, E5M2, bias=FP32)
        yield _add(c, (70, 512, k), 0.1, FP16)
    for shape in ((0, 16, 16), (8, 16, 0), (1, 16, 16)):
        yield _forward(c, shape, "geglu")
        yield _backward(c, shape, "geglu")
        for p in (0.0, 0.1):
            yield _add(c, shape, p)
    yield _backward(c, (70, 64, 272), "swiglu", start=1)
    for parts in ("b", "r", ""):
        yield _add(c, (70, 64, 2048), 0.1, parts=parts, start=1)
    yield _forward(c, (8, 16, 16), "gelu", FP32)
    yield _backward(c, (8, 16, 16), "gelu", FP32)
    # Weights that are loaded early, and narrow tiles: less than a ring of k-blocks, more, and several tiles of a block.
    for m, n, k in ((1, 144, 144), (5, 544, 3600), (3, 9024, 144)):
        for tile in (*TILES, gemm_fused.FEW_COLUMNS):
            if tile.cluster == 1:
                added = _add(c, (m, n, k), 0.0, tile=tile)
                yield added._replace(chosen=ahead(added.chosen or added.op))
            if tile in TILES and tile.cluster == 1:
                gated = _forward(c, (m, n, k), "swiglu", tile=tile)
                yield gated._replace(chosen=ahead(gated.chosen or gated.op))
    for cols in (272, 288):
        yield _add(c, (330, cols, 592), 0.0, tile=gemm_fused.FEW_COLUMNS)


def large(c: Inputs) -> Calls:
    for tile in TILES:  # several tiles a block: what one is given is written over for the next
        for kind in ("gelu", "swiglu"):
            yield _forward(c, (4000, 2064, 4096), kind, tile=tile)
        for p in (0.0, 0.1):
            yield _add(c, (4000, 4112, 4096), p, tile=tile)
    for shape in ((2048, 256, 2032), (2048, 256, 2048), (2047, 256, 2032)):
        yield _forward(c, shape, "geglu")
        yield _backward(c, shape, "geglu")
        for p in (0.0, 0.1):
            yield _add(c, shape, p)
    yield _add(c, (1 << 19, 1 << 16, 4096), 0.1)
    yield _add(c, (1 << 19, (1 << 16) - 16, 4096), 0.1)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for k, kind in product((0, 32), ("gelu", "swiglu")):
        yield _forward(c, (rows, cols, k), kind)
        yield _backward(c, (rows, cols, k), kind)
        yield _add(c, (rows, cols, k), 0.5)
