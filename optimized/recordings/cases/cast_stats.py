"""Cases of `cast_stats`, of one scale and of blocks. They have not been recorded yet."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import E4M3, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, Case, Outputs, every_word, named, short
from reference.ops.casts.cast_blocks import scale_shape

twin = torch.ops.twin


def _cast_stats(make: Callable[[], torch.Tensor], dtype: torch.dtype, device: torch.device) -> Outputs:
    x = make().to(device)
    q, scale_inv = twin.cast(x, torch.tensor([37.5], device=device), None, 0, dtype)
    found = named("counts sums", twin.cast_stats(x, q, scale_inv))
    return found | named("plain_counts plain_sums", twin.cast_stats(x, None, None))


def _of_blocks(wide: torch.dtype, dtype: torch.dtype, square: bool, device: torch.device) -> Outputs:
    x = every_word(wide).to(device)
    return named("counts sums", twin.cast_stats_blocks(x, *twin.cast_blocks(x, dtype, square, "fp32", 0.0), square))


def cases() -> Iterator[Case]:
    for wide, dtype, square in product(WIDE, FP8, (False, True)):
        label = f"{'square blocks' if square else 'blocks of a row'}, {short(wide)} to {short(dtype)}, 65,536 words"
        yield Case("cast_stats_blocks", label, partial(_of_blocks, wide, dtype, square), live=True)
    for wide, dtype in product(WIDE, FP8):
        run = partial(_cast_stats, partial(every_word, wide), dtype)
        yield Case("cast_stats", f"{short(wide)} to {short(dtype)}, 65,536 words", run, live=True)


def calls(c: Inputs) -> Calls:
    for dtype in WIDE:
        for shape in ((1, 16), (33, 4096), (4160, 272)):
            yield Call(twin.cast_stats, (c.x(*shape, dtype=dtype, special=True), None, None))
            for q in FP8:
                x = c.x(*shape, dtype=dtype, special=True)
                yield Call(twin.cast_stats, (x, c.codes(*shape, dtype=q), c.one()))
                yield Call(twin.cast_stats, (x, c.codes(*shape, dtype=q), c.positive(shape[0])))
    for dtype, q, square, shape in product(WIDE, FP8, (False, True), ((1, 16), (33, 4096), (260, 272))):
        scales = c.positive(*scale_shape(*shape, square))
        yield Call(
            twin.cast_stats_blocks, (c.x(*shape, dtype=dtype, special=True), c.codes(*shape, dtype=q), scales, square)
        )
    yield Call(twin.cast_stats, (c.x(0, 48), None, None))
    yield Call(twin.cast_stats, (c.x(3, 48, start=1), c.codes(3, 48, start=3), c.one()))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    scales = c.positive(*scale_shape(rows, cols, True))
    yield Call(twin.cast_stats_blocks, (c.x(rows, cols), c.codes(rows, cols, dtype=E4M3), scales, True))
    yield Call(twin.cast_stats, (c.x(rows, cols), c.codes(rows, cols, dtype=E4M3), c.one()))
    yield Call(twin.cast_stats, (c.x(rows, cols), None, None))
