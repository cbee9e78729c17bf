"""Cases of `gemm_fp8` and of its accumulating form."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.ops.gemms.gemm_fp8 import gemm_fp8_tiled
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES
from optimized.recordings.calls import BF16, E4M3, E5M2, FP16, FP32, Call, Calls, Inputs, ahead
from optimized.recordings.case import FP8, WIDE, Case, Outputs, codes, inverses, numbers, short
from optimized.recordings.cases.gemm import adding, with_tile
from reference.numbers import philox

twin = torch.ops.twin
Shape = tuple[int, int, int]


def _gemm_fp8(
    shape: Shape, types: tuple[torch.dtype, ...], bias: bool, accumulate: str, device: torch.device
) -> Outputs:
    m, n, k = shape
    a, b = codes((m, k), types[0], 61).to(device), codes((n, k), types[1], 62).to(device)
    scale_invs = inverses(device)
    vector = philox.normal((n,), seed=63).to(device, torch.bfloat16) if bias else None
    return {"out": twin.gemm_fp8(a, b, *scale_invs, vector, types[2], accumulate)}


def _accumulated(shape: Shape, dtype: torch.dtype, device: torch.device) -> Outputs:
    """With the one of 16 bits, too."""
    m, n, k = shape
    a, b = codes((m, k), FP8[1], 91).to(device), codes((n, k), FP8[0], 92).to(device)
    scale_invs = inverses(device)
    out, wide_out = (numbers(shape[:2], dtype, 93 + i).to(device) for i in range(2))
    twin.gemm_fp8_accumulate(a, b, *scale_invs, out)
    wide = (philox.normal((rows, k), seed=95).to(torch.bfloat16).to(device) for rows in (m, n))
    twin.gemm_accumulate(*wide, wide_out)
    return {"FP8": out, "bf16": wide_out}


def cases() -> Iterator[Case]:
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
    for dtype, shape in product(WIDE, ((1, 16, 16), (70, 96, 272), (300, 528, 400))):
        label = f"to {short(dtype)}, {'x'.join(map(str, shape))}"
        yield Case("gemm accumulation", label, partial(_accumulated, shape, dtype), live=shape[0] > 200)


def operands(
    c: Inputs, m: int, n: int, k: int, a: torch.dtype = E4M3, b: torch.dtype = E4M3
) -> tuple[torch.Tensor, ...]:
    """Codes and the inverses of their scales."""
    return (c.codes(m, k, dtype=a), c.codes(n, k, dtype=b), c.one(), c.one())


def calls(c: Inputs) -> Calls:
    # More than one tile and ragged in each direction; then wide and narrow tiles in one. Rows of 8 and of 4 words.
    for tile, accumulate, (m, n, k) in product(
        FP8_TILES, ("fast", "split"), ((264, 528, 272), (264, 544, 272), (140, 736, 144))
    ):
        given = (*operands(c, m, n, k), None, BF16, accumulate)
        yield Call(twin.gemm_fp8, given, with_tile(gemm_fp8_tiled, tile))
    for tile, dtype in product(TILES, WIDE):
        chosen = adding(gemm_fp8_tiled, tile, "split")
        yield Call(twin.gemm_fp8_accumulate, (*operands(c, 264, 272, 592), c.x(264, 272, dtype=dtype)), chosen)
    given = (*operands(c, 300, 1808, 64), None, BF16, "fast")
    yield Call(twin.gemm_fp8, given, with_tile(gemm_fp8_tiled, TILES[0], 26))
    biased = product([E4M3], [E4M3], WIDE, WIDE)
    for a, b, out, bias in (*product(FP8, FP8, WIDE, [None]), *biased):
        vector = None if bias is None else c.x(48, dtype=bias)
        yield Call(twin.gemm_fp8, (*operands(c, 40, 48, 272, a, b), vector, out, "split"))
    for k, accumulate in product((16, 128, 144, 160), ("fast", "split")):
        yield Call(twin.gemm_fp8, (*operands(c, 40, 64, k), c.x(64, start=1), FP16, accumulate))
    for shape, accumulate in product(
        ((0, 16, 16), (8, 0, 16), (8, 16, 0), (1, 16, 16), (130, 272, 144), (256, 256, 256)), ("fast", "split")
    ):
        yield Call(twin.gemm_fp8, (*operands(c, *shape), None, BF16, accumulate))
    yield Call(twin.gemm_fp8, (*operands(c, 8, 16, 0), c.x(16), BF16, "fast"))
    for shape, dtype in product(((70, 96, 272), (8, 16, 0), (0, 16, 16)), WIDE):
        yield Call(twin.gemm_fp8_accumulate, (*operands(c, *shape, E5M2), c.x(*shape[:2], dtype=dtype)))
    for added in (c.x(8, 16, start=1), c.x(8, 32)[:, :16]):
        yield Call(twin.gemm_fp8_accumulate, (*operands(c, 8, 16, 272, E5M2), added))
    # Weights that are loaded early: less than a ring of k-blocks, more, and several tiles of a block.
    for tile, (m, n, k) in product(FP8_TILES, ((1, 144, 144), (5, 544, 3600), (3, 9024, 144))):
        if tile.sharing_b == 1:
            given = (*operands(c, m, n, k), c.x(n), BF16, "fast")
            yield Call(twin.gemm_fp8, given, ahead(with_tile(gemm_fp8_tiled, tile)))


def large(c: Inputs) -> Calls:
    for shape, accumulate in product(
        ((9000, 1808, 64), (4096, 12288, 4096), (300, 528, 4096), (64, 64, 65536)), ("fast", "split")
    ):
        yield Call(twin.gemm_fp8, (*operands(c, *shape), None, BF16, accumulate))
    for dtype in WIDE:
        yield Call(twin.gemm_fp8_accumulate, (*operands(c, 3000, 3008, 64, E5M2), c.x(3000, 3008, dtype=dtype)))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for k, accumulate in product((0, 32), ("fast", "split")):
        given = operands(c, rows, cols, k)
        yield Call(twin.gemm_fp8, (*given, c.x(cols), BF16, accumulate))
        yield Call(twin.gemm_fp8_accumulate, (*given, c.x(rows, cols, dtype=FP32)))
