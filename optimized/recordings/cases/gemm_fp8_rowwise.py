"""Calls of `gemm_fp8_rowwise` and of its accumulating form."""

from itertools import product

import torch

from optimized.ops.gemms.gemm_fp8_rowwise import ADDING, gemm_fp8_rowwise_tiled
from optimized.ops.gemms.gemm_tile import TILES
from optimized.recordings.calls import BF16, E4M3, E5M2, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE
from optimized.recordings.cases.gemm import adding, with_tile

twin = torch.ops.twin
Shape = tuple[int, int, int]


def operands(
    c: Inputs, m: int, n: int, k: int, a: torch.dtype = E4M3, b: torch.dtype = E4M3
) -> tuple[torch.Tensor, ...]:
    """Codes and the inverses of their rows' scales."""
    return c.codes(m, k, dtype=a), c.codes(n, k, dtype=b), c.positive(m), c.positive(n)


def calls(c: Inputs) -> Calls:
    # More than one tile and ragged in each direction; then wide and narrow tiles in one. Rows of 8 and of 4 words.
    for tile, accumulate, (m, n, k) in product(TILES, ("fast", "split"), ((264, 528, 272), (140, 736, 144))):
        given = (*operands(c, m, n, k), None, BF16, accumulate)
        yield Call(twin.gemm_fp8_rowwise, given, with_tile(gemm_fp8_rowwise_tiled, tile))
    for dtype, tiles in ADDING.items():
        for tile in tiles:
            given = (*operands(c, 264, 272, 592), c.x(264, 272, dtype=dtype))
            chosen = adding(gemm_fp8_rowwise_tiled, tile, "split")
            yield Call(twin.gemm_fp8_rowwise_accumulate, given, chosen)
    given = (*operands(c, 300, 1808, 64), None, BF16, "fast")
    yield Call(twin.gemm_fp8_rowwise, given, with_tile(gemm_fp8_rowwise_tiled, TILES[0], 26))
    for accumulate in ("fast", "split"):  # more k-blocks than a tile has stages
        yield Call(twin.gemm_fp8_rowwise, (*operands(c, 136, 272, 1040), None, BF16, accumulate))
    biased = product([E4M3], [E4M3], WIDE, WIDE)
    for a, b, out, bias in (*product(FP8, FP8, WIDE, [None]), *biased):
        vector = None if bias is None else c.x(48, dtype=bias)
        yield Call(twin.gemm_fp8_rowwise, (*operands(c, 40, 48, 272, a, b), vector, out, "split"))
    for k, accumulate in product((16, 128, 144, 160), ("fast", "split")):
        yield Call(twin.gemm_fp8_rowwise, (*operands(c, 40, 64, k), c.x(64, start=1), FP16, accumulate))
    for of_a, of_b, accumulate in product((1, 40), (1, 64), ("fast", "split")):
        codes_of_both = operands(c, 40, 64, 272)[:2]
        scales = c.positive(of_a, start=1), c.positive(of_b, start=3)
        yield Call(twin.gemm_fp8_rowwise, (*codes_of_both, *scales, None, BF16, accumulate))
    for shape, accumulate in product(
        ((0, 16, 16), (8, 0, 16), (8, 16, 0), (1, 16, 16), (130, 272, 144), (256, 256, 256)), ("fast", "split")
    ):
        yield Call(twin.gemm_fp8_rowwise, (*operands(c, *shape), None, BF16, accumulate))
    yield Call(twin.gemm_fp8_rowwise, (*operands(c, 8, 16, 0), c.x(16), BF16, "fast"))
    for shape, dtype in product(((70, 96, 272), (8, 16, 0), (0, 16, 16)), WIDE):
        yield Call(twin.gemm_fp8_rowwise_accumulate, (*operands(c, *shape, E5M2), c.x(*shape[:2], dtype=dtype)))
    for added in (c.x(8, 16, start=1), c.x(8, 32)[:, :16]):
        yield Call(twin.gemm_fp8_rowwise_accumulate, (*operands(c, 8, 16, 272, E5M2), added))


def large(c: Inputs) -> Calls:
    for shape, accumulate in product(((9000, 1808, 64), (4096, 12288, 4096), (300, 528, 4096)), ("fast", "split")):
        yield Call(twin.gemm_fp8_rowwise, (*operands(c, *shape), None, BF16, accumulate))
    for dtype in WIDE:
        given = (*operands(c, 3000, 3008, 64, E5M2), c.x(3000, 3008, dtype=dtype))
        yield Call(twin.gemm_fp8_rowwise_accumulate, given)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for k, accumulate in product((0, 32), ("fast", "split")):
        given = operands(c, rows, cols, k)
        yield Call(twin.gemm_fp8_rowwise, (*given, c.x(cols), BF16, accumulate))
        yield Call(twin.gemm_fp8_rowwise_accumulate, (*given, c.x(rows, cols, dtype=FP32)))
