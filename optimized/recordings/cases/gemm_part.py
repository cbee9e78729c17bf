"""Calls of GEMMs that go on from accumulators, and of what follows them."""

from itertools import product

import torch

from optimized.ops.gemms.gemm_fp8_blocks import costs
from optimized.ops.gemms.gemm_part import (
    SQUARES,
    gemm_fp8_blocks_part_tiled,
    gemm_fp8_end_tiled,
    gemm_fp8_part_tiled,
    gemm_part_tiled,
)
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES
from optimized.recordings.calls import BF16, E4M3, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, HALVES, WIDE
from optimized.recordings.cases.gemm import with_tile
from optimized.recordings.cases.gemm_fp8_blocks import operands

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    # More than one tile and ragged in each direction; then wide and narrow tiles in one.
    for tile, accumulate, (m, n, k) in product(FP8_TILES, ("fast", "split"), ((264, 528, 272), (140, 736, 144))):
        given = (c.codes(m, k, dtype=E4M3), c.codes(n, k, dtype=E4M3), c.x(m, n, dtype=FP32), accumulate)
        yield Call(twin.gemm_fp8_part, given, with_tile(gemm_fp8_part_tiled, tile))
    from_zero = (c.codes(300, 64, dtype=E4M3), c.codes(1808, 64, dtype=E4M3), None, "fast")
    yield Call(twin.gemm_fp8_part, from_zero, with_tile(gemm_fp8_part_tiled, TILES[0], 26))
    for accumulate in ("fast", "split"):  # more k-blocks than a tile has stages
        given = (c.codes(136, 1040, dtype=E4M3), c.codes(272, 1040, dtype=E4M3), c.x(136, 272, dtype=FP32), accumulate)
        yield Call(twin.gemm_fp8_part, given)
    for a, b, accumulate, start in product(FP8, FP8, ("fast", "split"), (0, 1, None)):
        accumulator = None if start is None else c.x(40, 48, dtype=FP32, start=start)
        yield Call(twin.gemm_fp8_part, (c.codes(40, 272, dtype=a), c.codes(48, 272, dtype=b), accumulator, accumulate))
    for accumulate, first, m in product(("fast", "split"), (0, 128), (264, 1)):  # columns of larger matrices
        columns = slice(first, first + 144)
        some = (c.codes(m, 400, dtype=E4M3)[:, columns], c.codes(528, 288, dtype=E4M3)[:, columns])
        yield Call(twin.gemm_fp8_part, (*some, None, accumulate))
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

    yield from ends(c)


def ends(c: Inputs) -> Calls:
    """Of `gemm_fp8_end`."""
    scales = (c.one(), c.one())
    flags, both = (False, True), ("fast", "split")
    for tile, accumulate, (m, n, k) in product(FP8_TILES, both, ((264, 528, 272), (140, 736, 144))):
        codes = (c.codes(m, k, dtype=E4M3), c.codes(n, k, dtype=E4M3))
        started = (c.x(n), c.x(m, n, dtype=FP32))
        yield Call(
            twin.gemm_fp8_end, (*codes, *scales, *started, BF16, accumulate), with_tile(gemm_fp8_end_tiled, tile)
        )
    for out, bias, accumulate, start in product(WIDE, (None, *WIDE), both, (0, 1, None)):
        vector = None if bias is None else c.x(48, dtype=bias, start=start or 0)
        accumulator = None if start is None else c.x(40, 48, dtype=FP32, start=start)
        codes = (c.codes(40, 272, dtype=E4M3), c.codes(48, 272, dtype=E4M3))
        yield Call(twin.gemm_fp8_end, (*codes, *scales, vector, accumulator, out, accumulate))
    for a, b, biased in product(FP8, FP8, flags):
        codes = (c.codes(300, 144, dtype=a), c.codes(80, 144, dtype=b))
        vector = c.x(80, special=True) if biased else None
        accumulator = c.x(300, 80, dtype=FP32, special=True)
        yield Call(twin.gemm_fp8_end, (*codes, *scales, vector, accumulator, BF16, "split"))
    for accumulate, first in product(both, (0, 128)):  # columns of larger matrices; more k-blocks than stages
        some = [c.codes(rows, 1296, dtype=E4M3)[:, first : first + 1040] for rows in (136, 272)]
        yield Call(twin.gemm_fp8_end, (*some, *scales, c.x(272), c.x(136, 272, dtype=FP32), BF16, accumulate))
    for (m, n, k), biased, goes_on in product(((0, 16, 32), (3, 0, 16), (5, 16, 0)), flags, flags):
        codes, vector = (c.codes(m, k), c.codes(n, k)), c.x(n) if biased else None
        accumulator = c.x(m, n, dtype=FP32) if goes_on else None
        yield Call(twin.gemm_fp8_end, (*codes, *scales, vector, accumulator, BF16, "split"))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for k, accumulate in product((0, 32), ("fast", "split")):
        given = (c.codes(rows, k), c.codes(cols, k), c.x(rows, cols, dtype=FP32))
        yield Call(twin.gemm_fp8_part, (*given, accumulate))
        yield Call(twin.gemm_fp8_end, (*given[:2], c.one(), c.one(), c.x(cols), given[2], BF16, accumulate))
        yield Call(twin.gemm_fp8_blocks_part, (*operands(c, rows, cols, k), given[-1]))
        if accumulate == "fast":
            yield Call(twin.gemm_part, (c.x(rows, k), c.x(cols, k), given[-1]))
            yield Call(twin.end_gemm, (given[-1], c.one(), c.one(), c.x(cols), BF16))
