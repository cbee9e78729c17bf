"""Cases of `multi_cast_transpose`: several matrices in one launch."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE, Case, Outputs, numbers, short
from reference.ops.casts.cast_transpose import cast_outputs

twin = torch.ops.twin


def _casts_together(wide: torch.dtype, dtype: torch.dtype, device: torch.device) -> Outputs:
    """Matrices of several shapes in one call; each has a column of its own."""
    xs = [numbers((rows, 80), wide, 21 + rows).to(device) for rows in (1, 7, 130)]
    scales, history = torch.tensor([1.0, 3.0, 37.5], device=device), torch.zeros(4, 3, device=device)
    parts = [list(part) for part in zip(*(cast_outputs(x, x.shape[1], dtype) for x in xs), strict=True)]
    twin.multi_cast_transpose(xs, [scales] * 3, [history] * 3, [0, 1, 2], *parts)
    found = {"amax_history": history}
    for name, part in zip(("q", "q_t", "scale_inv"), parts, strict=True):
        found |= {f"{name}.{i}": x for i, x in enumerate(part)}
    return found


def cases() -> Iterator[Case]:
    for wide, dtype in product(WIDE, FP8):
        title = f"{short(wide)} to {short(dtype)}, three matrices"
        yield Case("multi_cast_transpose", title, partial(_casts_together, wide, dtype))


def _call(
    c: Inputs,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    q: torch.dtype,
    start: int = 0,
    keeps: bool = True,
) -> Call:
    """`start`: where the first matrix begins; `keeps`: whether amaxes are recorded."""
    xs = [c.x(*shape, dtype=dtype, start=0 if i else start) for i, shape in enumerate(shapes)]
    scale, history = c.state(len(xs))
    outputs = [list(part) for part in zip(*(cast_outputs(x, x.shape[1], q) for x in xs), strict=True)]
    columns = list(range(len(xs)))
    return Call(
        twin.multi_cast_transpose, (xs, [scale] * len(xs), [history] * len(xs) if keeps else [], columns, *outputs)
    )


def calls(c: Inputs) -> Calls:
    for dtype, q in product(WIDE, FP8):
        yield _call(c, [(rows, 144) for rows in (1, 130, 400)], dtype, q)
    yield _call(c, [(7, 16), (0, 16), (16, 16), (3, 32)], BF16, E4M3, start=1, keeps=False)
    yield _call(c, [(16, 32)] * 5, BF16, E4M3)  # one more than the kernel's smallest capacity


def large(c: Inputs) -> Calls:
    for count in (4, 256, 257):  # the capacities of the kernel's arguments
        yield _call(c, [(16, 32)] * count, BF16, E4M3)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield _call(c, [(rows, cols)], BF16, E4M3)
