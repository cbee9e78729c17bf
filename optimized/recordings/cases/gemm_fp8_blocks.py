"""Cases of `gemm_fp8_blocks`, of its accumulating form, and of that with bias, dropout and residual."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.ops.gemms import gemm_fp8_blocks
from optimized.ops.gemms.gemm_fp8_blocks import costs, fused_tiles, gemm_fp8_blocks_tiled
from optimized.ops.gemms.gemm_tile import Tile
from optimized.recordings.calls import BF16, E4M3, E5M2, FP16, Call, Calls, Inputs
from optimized.recordings.case import FP8, HALVES, WIDE, Case, Outputs, codes, numbers, short
from optimized.recordings.cases.gemm import adding, with_tile
from reference.numbers import philox
from reference.ops.casts.cast_blocks import scale_shape

twin = torch.ops.twin
Shape = tuple[int, int, int]
Squares = tuple[bool, bool]
_SQUARES: tuple[Squares, ...] = ((False, False), (False, True), (True, False))
_FORMS = {squares: " by ".join("128x128" if one else "1x128" for one in squares) for squares in _SQUARES}


def _scales(shape: tuple[int, int], square: bool, seed: int) -> torch.Tensor:
    """Scales that are no powers of two, by arithmetic that rounds alike on every CPU: torch's exp2 does not."""
    return numbers(scale_shape(*shape, square), torch.float32, seed).abs()


def _blocks(
    shape: Shape, types: tuple[torch.dtype, ...], squares: Squares, bias: bool, device: torch.device
) -> Outputs:
    m, n, k = shape
    a, b = codes((m, k), types[0], 61).to(device), codes((n, k), types[1], 62).to(device)
    scales = [_scales(*one).to(device) for one in (((m, k), squares[0], 64), ((n, k), squares[1], 65))]
    vector = philox.normal((n,), seed=63).to(device, torch.bfloat16) if bias else None
    out = numbers((m, n), torch.float32, 66).to(device)
    twin.gemm_fp8_blocks_accumulate(a, b, *scales, *squares, out)
    return {"out": twin.gemm_fp8_blocks(a, b, *scales, *squares, vector, types[2]), "added": out}


def cases() -> Iterator[Case]:
    for a, b, squares in product(FP8, FP8, _SQUARES):
        for (m, n, k), out, bias in (
            ((40, 48, 272), torch.float32, False),
            ((1, 32, 128), torch.bfloat16, True),
            ((7, 64, 16), torch.float16, False),
            ((520, 272, 1040), torch.bfloat16, True),
        ):
            label = f"{_FORMS[squares]}, {short(a)}·{short(b)} {m}x{n}x{k} to {short(out)}{', bias' * bias}"
            run = partial(_blocks, (m, n, k), (a, b, out), squares, bias)
            yield Case("gemm_fp8_blocks", label, run)


def operands(
    c: Inputs, m: int, n: int, k: int, squares: Squares = (False, True), a: torch.dtype = E4M3, b: torch.dtype = E4M3
) -> tuple[torch.Tensor | bool, ...]:
    """Codes, scales, and which blocks are square."""
    scales = (c.positive(*scale_shape(rows, k, one)) for rows, one in zip((m, n), squares, strict=True))
    return (c.codes(m, k, dtype=a), c.codes(n, k, dtype=b), *scales, *squares)


def _add(
    c: Inputs,
    shape: Shape,
    p: float,
    squares: Squares = (False, True),
    half: torch.dtype = BF16,
    parts: str = "br",
    tile: Tile | None = None,
    start: int = 0,
    formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
) -> Call:
    m, n, k = shape
    bias, added = c.x(n, dtype=half, start=start), c.x(m, n, dtype=half, start=start)
    rest = (bias if "b" in parts else None, added if "r" in parts else None, half, p, c.random_state() if p else None)
    chosen = None if tile is None else partial(gemm_fp8_blocks.gemm_fp8_blocks_bias_dropout_add, tile=tile)
    return Call(twin.gemm_fp8_blocks_bias_dropout_add, (*operands(c, m, n, k, squares, *formats), *rest), chosen)


def _fused(c: Inputs) -> Calls:
    for squares, cols in product(_SQUARES, (272, 288)):
        for tile, p in product(fused_tiles(squares), (0.0, 0.1)):
            yield _add(c, (140, cols, 272), p, squares, tile=tile)
    for parts, half in product(("br", "b", "r", ""), HALVES):
        yield _add(c, (70, 64, 144), 0.1, half=half, parts=parts, start=1)
    for shape, p in product(((0, 16, 16), (8, 0, 16), (8, 16, 0), (1, 16, 16), (256, 256, 256)), (0.0, 0.1)):
        yield _add(c, shape, p)
    for formats in ((E4M3, E5M2), (E5M2, E4M3)):
        yield _add(c, (70, 64, 144), 0.1, formats=formats)
    yield _add(c, (8, 16, 16), 0.1, half=torch.float32)


def calls(c: Inputs) -> Calls:
    yield from _fused(c)
    # More than one tile and ragged in each direction. Rows of 8 and of 4 words.
    for squares, (m, n, k) in product(_SQUARES, ((264, 528, 272), (140, 736, 144))):
        for tile, _ in costs(squares):
            given = (*operands(c, m, n, k, squares), None, BF16)
            yield Call(twin.gemm_fp8_blocks, given, with_tile(gemm_fp8_blocks_tiled, tile))
    for (tile, _), dtype in product(costs((False, False)), WIDE):
        given = (*operands(c, 264, 272, 592, (False, False)), c.x(264, 272, dtype=dtype))
        yield Call(twin.gemm_fp8_blocks_accumulate, given, adding(gemm_fp8_blocks_tiled, tile))
    biased = product([E4M3], [E4M3], WIDE, WIDE)
    for a, b, out, bias in (*product(FP8, FP8, WIDE, [None]), *biased):
        vector = None if bias is None else c.x(48, dtype=bias)
        yield Call(twin.gemm_fp8_blocks, (*operands(c, 40, 48, 272, (False, False), a, b), vector, out))
    for k, squares in product((16, 128, 144, 160), _SQUARES):
        yield Call(twin.gemm_fp8_blocks, (*operands(c, 40, 64, k, squares), c.x(64, start=1), FP16))
    for shape in ((0, 16, 16), (8, 0, 16), (8, 16, 0), (1, 16, 16), (130, 272, 144), (256, 256, 256)):
        yield Call(twin.gemm_fp8_blocks, (*operands(c, *shape), None, BF16))
    yield Call(twin.gemm_fp8_blocks, (*operands(c, 8, 16, 0), c.x(16), BF16))
    for shape, dtype in product(((70, 96, 272), (8, 16, 0), (0, 16, 16)), WIDE):
        given = operands(c, *shape, a=E5M2)
        yield Call(twin.gemm_fp8_blocks_accumulate, (*given, c.x(*shape[:2], dtype=dtype)))
    for added in (c.x(8, 16, start=1), c.x(8, 32)[:, :16]):
        yield Call(twin.gemm_fp8_blocks_accumulate, (*operands(c, 8, 16, 272, a=E5M2), added))


def large(c: Inputs) -> Calls:
    for shape in ((9000, 1808, 64), (4096, 12288, 4096), (300, 528, 4096), (64, 64, 65536)):
        yield Call(twin.gemm_fp8_blocks, (*operands(c, *shape), None, BF16))
    for shape in ((2048, 256, 2032), (2048, 256, 2048), (4000, 4112, 4096), (1 << 19, 1 << 16, 4096)):
        for p in (0.0, 0.1):
            yield _add(c, shape, p)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for k in (0, 32):
        given = operands(c, rows, cols, k)
        yield Call(twin.gemm_fp8_blocks, (*given, c.x(cols), BF16))
        yield Call(twin.gemm_fp8_blocks_accumulate, (*given, c.x(rows, cols, dtype=torch.float32)))
        yield _add(c, (rows, cols, k), 0.5)
