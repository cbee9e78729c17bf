"""Cases of GEMMs that go on from accumulators, and of what follows them."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.ops.gemms.gemm_fp8_blocks import costs
from optimized.ops.gemms.gemm_part import SQUARES, gemm_fp8_blocks_part_tiled, gemm_fp8_part_tiled, gemm_part_tiled
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES
from optimized.recordings.calls import BF16, E4M3, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, HALVES, WIDE, Case, Outputs, codes, inverses, short
from optimized.recordings.cases.gemm import with_tile
from optimized.recordings.cases.gemm_fp8_blocks import operands
from reference.numbers import philox

twin = torch.ops.twin


def _in_parts(
    shape: tuple[int, int, int], types: tuple[torch.dtype, ...], accumulate: str, at: int, device: torch.device
) -> Outputs:
    m, n, k = shape
    a, b = codes((m, k), types[0], 61).to(device), codes((n, k), types[1], 62).to(device)
    first = twin.gemm_fp8_part(a[:, :at].contiguous(), b[:, :at].contiguous(), None, accumulate)
    return {
        "first": first,
        "both": twin.gemm_fp8_part(a[:, at:].contiguous(), b[:, at:].contiguous(), first, accumulate),
    }


def _in_blocks(shape: tuple[int, int, int], square: bool, at: int, device: torch.device) -> Outputs:
    m, n, k = shape
    x, w = philox.normal((m, k), seed=63).to(device), philox.normal((n, k), seed=64).to(device)
    found: torch.Tensor | None = None
    for part in (slice(0, at), slice(at, k)):
        a, a_scales = twin.cast_blocks(x[:, part].contiguous(), E4M3, False, "fp32", 0.0)
        b, b_scales = twin.cast_blocks(w[:, part].contiguous(), E4M3, square, "fp32", 0.0)
        found = twin.gemm_fp8_blocks_part(a, b, a_scales, b_scales, False, square, found)
    return {"sums": found, "end": twin.end_gemm(found, None, None, None, BF16)}  # type: ignore[dict-item]


def _halves(shape: tuple[int, int, int], dtype: torch.dtype, at: int, device: torch.device) -> Outputs:
    m, n, k = shape
    a, b = (philox.normal((rows, k), seed=65 + rows).to(dtype).to(device) for rows in (m, n))
    bias = philox.normal((n,), seed=66).to(dtype).to(device)
    first = twin.gemm_part(a[:, :at], b[:, :at], None)
    both = twin.gemm_part(a[:, at:], b[:, at:], first)
    return {"first": first, "both": both, "end": twin.end_gemm(both, *inverses(device), bias, dtype)}


def cases() -> Iterator[Case]:
    for a, b, accumulate in product(FP8, FP8, ("fast", "split")):
        for (m, n, k), at in (((40, 48, 272), 128), ((7, 64, 1040), 256), ((520, 272, 1040), 640)):
            label = f"{short(a)}·{short(b)} {m}x{n}x{k} at {at}"
            run = partial(_in_parts, (m, n, k), (a, b), accumulate, at)
            yield Case(f"gemm_fp8_part ({accumulate})", label, run, live=True)
    for shape, at in (((40, 48, 272), 128), ((260, 272, 656), 384)):
        size = f"{'x'.join(map(str, shape))} at {at}"
        for square in (False, True):
            run = partial(_in_blocks, shape, square, at)
            yield Case("gemm_fp8_blocks_part", f"{'squares' if square else 'rows'} {size}", run, live=True)
        for dtype in HALVES:
            yield Case("gemm_part", f"{short(dtype)} {size}", partial(_halves, shape, dtype, at), live=True)


def calls(c: Inputs) -> Calls:
    # More than one tile and ragged in each direction; then wide and narrow tiles in one.
    for tile, accumulate, (m, n, k) in product(FP8_TILES, ("fast", "split"), ((264, 528, 272), (140, 736, 144))):
        given = (c.codes(m, k, dtype=E4M3), c.codes(n, k, dtype=E4M3), c.x(m, n, dtype=FP32), accumulate)
        yield Call(twin.gemm_fp8_part, given, with_tile(gemm_fp8_part_tiled, tile))
    from_zero = (c.codes(300, 64, dtype=E4M3), c.codes(1808, 64, dtype=E4M3), None, "fast")
    yield Call(twin.gemm_fp8_part, from_zero, with_tile(gemm_fp8_part_tiled, TILES[0], 26))
    for a, b, accumulate, start in product(FP8, FP8, ("fast", "split"), (0, 1, None)):
        accumulator = None if start is None else c.x(40, 48, dtype=FP32, start=start)
        yield Call(twin.gemm_fp8_part, (c.codes(40, 272, dtype=a), c.codes(48, 272, dtype=b), accumulator, accumulate))
    for m, n, k in ((0, 16, 32), (3, 0, 16), (5, 16, 0)):
        yield Call(twin.gemm_fp8_part, (c.codes(m, k), c.codes(n, k), c.x(m, n, dtype=FP32), "split"))
    for squares in SQUARES:
        for tile, _ in costs(squares):
            in_blocks = (*operands(c, 200, 272, 272, squares), c.x(200, 272, dtype=FP32))
            yield Call(twin.gemm_fp8_blocks_part, in_blocks, with_tile(gemm_fp8_blocks_part_tiled, tile))
        for a, b, start in product(FP8, FP8, (0, 1, None)):
            accumulator = None if start is None else c.x(40, 48, dtype=FP32, start=start)
            yield Call(twin.gemm_fp8_blocks_part, (*operands(c, 40, 48, 272, squares, a, b), accumulator))
    flags = (False, True)
    for tile, first, second in product(TILES, flags, flags):
        halves = [c.x(136, rows).t() if t else c.x(rows, 136) for rows, t in ((264, first), (520, second))]
        yield Call(twin.gemm_part, (*halves, c.x(264, 520, dtype=FP32)), with_tile(gemm_part_tiled, tile))
    for dtype, (m, n, k), start in product(HALVES, ((33, 47, 70), (0, 16, 16), (5, 16, 0)), (0, 1, None)):
        accumulator = None if start is None else c.x(m, n, dtype=FP32, start=start)
        yield Call(twin.gemm_part, (c.x(m, k, dtype=dtype), c.x(n, k, dtype=dtype), accumulator))
    for out, bias, (m, n), start in product(WIDE, (None, *WIDE), ((5, 48), (7, 33), (0, 16)), (0, 1)):
        vector = None if bias is None else c.x(n, dtype=bias)
        yield Call(twin.end_gemm, (c.x(m, n, dtype=FP32, start=start), c.one(), c.one(), vector, out))
        yield Call(twin.end_gemm, (c.x(m, n, dtype=FP32, start=start), None, None, vector, out))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for k, accumulate in product((0, 32), ("fast", "split")):
        given = (c.codes(rows, k), c.codes(cols, k), c.x(rows, cols, dtype=FP32))
        yield Call(twin.gemm_fp8_part, (*given, accumulate))
        yield Call(twin.gemm_fp8_blocks_part, (*operands(c, rows, cols, k), given[-1]))
        if accumulate == "fast":
            yield Call(twin.gemm_part, (c.x(rows, k), c.x(cols, k), given[-1]))
            yield Call(twin.end_gemm, (given[-1], c.one(), c.one(), c.x(cols), BF16))
