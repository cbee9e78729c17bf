"""Cases of `dequantize`."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, Case, Outputs, numbers, short
from reference.ops.casts.cast_blocks import scale_shape

twin = torch.ops.twin
_LAYOUTS = ("one scale", "blocks of a row", "square blocks")


def _dequantize(layout: str, q: torch.dtype, wide: torch.dtype, device: torch.device) -> Outputs:
    x, square = numbers((300, 272), BF16, 51).to(device), layout == _LAYOUTS[2]
    if layout == _LAYOUTS[0]:
        codes, scale_inv = twin.cast(x, torch.full((1,), 37.5, device=device), None, 0, q)
    else:
        codes, scale_inv = twin.cast_blocks(x, q, square, "fp32", 0.0)
    return {"out": twin.dequantize(codes, scale_inv, square, wide)}


def cases() -> Iterator[Case]:
    for layout, q, wide in product(_LAYOUTS, FP8, WIDE):
        label = f"{layout}, {short(q)} to {short(wide)}"
        yield Case("dequantize", label, partial(_dequantize, layout, q, wide), live=True)


def calls(c: Inputs) -> Calls:
    for q, wide, (rows, cols) in product(FP8, WIDE, ((1, 16), (37, 144), (130, 272))):
        yield Call(twin.dequantize, (c.codes(rows, cols, dtype=q), c.one(), False, wide))
        yield Call(twin.dequantize, (c.codes(rows, cols, dtype=q), c.positive(rows), False, wide))
        for square in (False, True):
            scales = c.positive(*scale_shape(rows, cols, square))
            yield Call(twin.dequantize, (c.codes(rows, cols, dtype=q), scales, square, wide))
    for rows, cols, start in ((0, 16, 0), (16, 0, 0), (5, 48, 1), (5, 48, 16)):
        yield Call(twin.dequantize, (c.codes(rows, cols, start=start), c.one(), False, BF16))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.dequantize, (c.codes(rows, cols, dtype=E4M3), c.one(), True, BF16))
