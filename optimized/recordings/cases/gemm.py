"""Cases of `gemm` and of its accumulating form, in 16 bits."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from optimized.ops.gemms import gemm
from optimized.ops.gemms.gemm_tile import TILES, Tile
from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs, ahead
from optimized.recordings.case import HALVES, WIDE, Case, Outputs, short
from reference.numbers import philox

twin = torch.ops.twin


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


def cases() -> Iterator[Case]:
    for half, layout in product(HALVES, ("NN", "NT", "TN", "TT")):
        for (m, n, k), out in (((33, 47, 70), torch.float32), ((64, 32, 128), half), ((300, 200, 520), half)):
            label = f"{short(half)} {m}x{n}x{k} {layout} to {short(out)}"
            yield Case("gemm", label, partial(_gemm, (m, n, k), (half, out), layout), live=m >= 300)


def _operand(c: Inputs, rows: int, k: int, transposed: bool = False, dtype: torch.dtype = BF16) -> torch.Tensor:
    return c.x(k, rows, dtype=dtype).t() if transposed else c.x(rows, k, dtype=dtype)


def with_tile(function: Callable[..., torch.Tensor], tile: Tile, cut: int | None = None) -> Callable[..., torch.Tensor]:
    """`function` with that tile."""
    return lambda *args: function(*args, tile, cut=cut)


def adding(function: Callable[..., torch.Tensor], tile: Tile, *choices: str) -> Callable[..., None]:
    """The accumulating form of `function` with that tile: of operands, and of what is added to."""

    def run(*args: torch.Tensor) -> None:
        *operands, out = args
        function(*operands, None, out.dtype, *choices, tile, out, add=True)

    return run


def calls(c: Inputs) -> Calls:
    # More than one tile and ragged in each direction; then wide and narrow tiles in one.
    for tile, (first, second) in product(TILES, product((False, True), (False, True))):
        operands = _operand(c, 264, 136, first), _operand(c, 520, 136, second)
        yield Call(twin.gemm, (*operands, None, BF16), with_tile(gemm.gemm_tiled, tile))
    for tile, dtype in product(TILES, WIDE):
        operands = _operand(c, 140, 144, True), _operand(c, 736, 144, True)
        out = c.x(140, 736, dtype=dtype)
        yield Call(twin.gemm_accumulate, (*operands, out), adding(gemm.gemm_tiled, tile))
    cut = with_tile(gemm.gemm_tiled, TILES[0], 26)
    yield Call(twin.gemm, (c.x(300, 64), c.x(1800, 64), None, BF16), cut)
    for half, wanted, bias in product(HALVES, WIDE, (None, *WIDE)):
        vector = None if bias is None else c.x(40, dtype=bias)
        yield Call(twin.gemm, (_operand(c, 33, 72, dtype=half), _operand(c, 40, 72, dtype=half), vector, wanted))
    # Padded copies: rows off 16 bytes, a slice that starts off them, and strides of rows that are longer.
    for a in (c.x(33, 70), c.x(33, 256)[:, 3:67], c.x(33, 256)[:, 64:128], c.x(70, 33).t(), c.x(1, 8)):
        yield Call(twin.gemm, (a, c.x(24, a.shape[1]), c.x(24, start=1), BF16))
        yield Call(twin.gemm, (c.x(24, a.shape[1]), a, None, FP32))
    for m, n, k in ((0, 8, 8), (8, 0, 8), (8, 8, 0), (1, 16, 16), (8, 16, 4096), (256, 256, 256)):
        yield Call(twin.gemm, (c.x(m, k), c.x(n, k), c.x(n), BF16))
        yield Call(twin.gemm_accumulate, (c.x(m, k), c.x(n, k), c.x(m, n, dtype=FP32)))
    for out in (c.x(8, 16, start=1), c.x(8, 32)[:, :16], c.x(8, 16, dtype=FP32)):
        yield Call(twin.gemm_accumulate, (c.x(64, 8).t(), c.x(64, 16).t(), out))
    # Few rows, whose weights are loaded early: less than a ring of k-blocks, more, and several tiles of a block.
    for tile, (m, n, k) in product(TILES, ((1, 136, 72), (5, 520, 1800), (3, 9000, 72))):
        if tile.cluster == 1:
            yield Call(twin.gemm, (c.x(m, k), c.x(n, k), c.x(n), BF16), ahead(with_tile(gemm.gemm_tiled, tile)))
    for half, wanted in product(HALVES, WIDE):
        yield Call(twin.gemm, (c.x(3, 72, dtype=half), c.x(40, 72, dtype=half), None, wanted), ahead(twin.gemm))


def large(c: Inputs) -> Calls:
    for m, n, k in ((8, 16, 1 << 16), (9000, 1800, 64), (4096, 4096, 4096)):
        yield Call(twin.gemm, (c.x(m, k), c.x(n, k), c.x(n), BF16))
        yield Call(twin.gemm_accumulate, (c.x(m, k), c.x(n, k), c.x(m, n, dtype=FP32)))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for k, half in product((0, 32), HALVES):
        a, b = c.x(rows, k, dtype=half), c.x(cols, k, dtype=half)
        yield Call(twin.gemm, (a, b, c.x(cols, dtype=half), half))
        yield Call(twin.gemm_accumulate, (a, b, c.x(rows, cols, dtype=FP32)))
