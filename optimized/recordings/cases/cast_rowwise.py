"""Cases of `cast_rowwise`, and of it with a transposed copy."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, E5M2, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, Case, Outputs, every_word, named, numbers, short

twin = torch.ops.twin
_OPS = (twin.cast_rowwise, twin.cast_rowwise_transpose)


def _rowwise(
    shape: tuple[int, int], wide: torch.dtype, dtype: torch.dtype, power_of_two: bool, device: torch.device
) -> Outputs:
    """Rows of different magnitudes, and one of zeros."""
    x = numbers(shape, wide, 81)
    x[shape[0] // 2] = 0
    x, how = x.to(device), (dtype, power_of_two, 1e-12)
    alone = named("alone alone_inv", twin.cast_rowwise(x, *how))
    return alone | named("codes codes_t scale_inv scale_inv_t", twin.cast_rowwise_transpose(x, *how))


def _words(wide: torch.dtype, device: torch.device) -> Outputs:
    """A number a row, with zeros: the scale of every word."""
    x = torch.nn.functional.pad(every_word(wide).reshape(-1, 1), (0, 15)).to(device)
    return named("codes scale_inv", twin.cast_rowwise(x, E4M3, True, 1e-12))


def cases() -> Iterator[Case]:
    for wide, dtype, power_of_two in product(WIDE, FP8, (True, False)):
        for rows in (1, 300, 2048):
            label = f"{short(wide)} to {short(dtype)}, [{rows}, 272]{', powers of two' * power_of_two}"
            run = partial(_rowwise, (rows, 272), wide, dtype, power_of_two)
            yield Case("cast_rowwise_transpose", label, run, live=True)
    for wide in WIDE:
        yield Case("cast_rowwise", f"{short(wide)}, 65,536 words", partial(_words, wide), live=True)


def calls(c: Inputs) -> Calls:
    for op, dtype, q, power_of_two in product(_OPS, WIDE, FP8, (True, False)):
        for shape in ((1, 16), (130, 272)):
            yield Call(op, (c.x(*shape, dtype=dtype, special=True), q, power_of_two, 1e-12))
    for op, epsilon in product(_OPS, (0.0, 1e-12, 1e4)):
        yield Call(op, (c.x(20, 144, dtype=BF16), E4M3, True, epsilon))
        yield Call(op, (c.x(20, 144, dtype=FP32) * 1e-40, E5M2, True, epsilon))
        yield Call(op, (c.zeros(20, 48), E4M3, False, epsilon))
    for op in _OPS:
        for shape, start in (
            ((0, 16), 0),
            ((16, 0), 0),
            ((65, 16), 4),
            ((128, 256), 0),
            ((257, 272), 0),
            ((3, 4112), 0),
        ):
            yield Call(op, (c.x(*shape, start=start), E4M3, True, 1e-12))


def large(c: Inputs) -> Calls:
    for op, rows in product(_OPS, (128 * 65535, 128 * 65536)):
        yield Call(op, (c.x(rows, 16), E4M3, True, 1e-12))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for op in _OPS:
        yield Call(op, (c.x(rows, cols), E4M3, True, 1e-12))
