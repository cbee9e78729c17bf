"""Cases of `cast` and of the amax that is recorded with it."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import E4M3, E5M2, Call, Calls, Inputs, ahead
from optimized.recordings.case import FP8, WIDE, Case, Outputs, every_word, named, numbers, short
from optimized.recordings.cases.attention import int32

twin = torch.ops.twin


def cast(op: str, make: Callable[[], torch.Tensor], dtype: torch.dtype, scale: float, device: torch.device) -> Outputs:
    """What a cast gives, with the amax history after it."""
    names = {"cast": "q scale_inv", "cast_transpose": "q q_t scale_inv"}.get(op, "q q_t scale_inv dbias")
    scales = torch.tensor([1.0, scale, 1.0], device=device)
    history = torch.zeros(4, 3, device=device)
    history[0, 1] = 0.5
    results = getattr(twin, op)(make().to(device), scales, history, 1, dtype)
    return {**named(names, results), "amax_history": history}


def _amax(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Outputs:
    history = torch.zeros(2, 3, device=device)
    twin.amax(numbers(shape, dtype, 41).to(device), history, 0)
    return {"amax_history": history}


def cases() -> Iterator[Case]:
    for wide, dtype, scale in product(WIDE, FP8, (1.0, 37.5)):
        run = partial(cast, "cast", partial(every_word, wide), dtype, scale)
        yield Case("cast", f"{short(wide)} to {short(dtype)}, 65,536 words, scale {scale}", run)
    for wide, rows in product(WIDE, (1, 63, 64, 65, 1000)):
        yield Case("amax", f"{short(wide)} [{rows}, 48]", partial(_amax, (rows, 48), wide))


def calls(c: Inputs) -> Calls:
    for dtype in WIDE:
        for shape in ((1, 48), (33, 4096), (0, 48)):
            yield Call(twin.amax, (c.x(*shape, dtype=dtype, special=True), c.state()[1], 2))
        for q in FP8:
            for shape in ((1, 80), (33, 4096)):
                yield Call(twin.cast, (c.x(*shape, dtype=dtype, special=True), *c.state(), 1, q))
    yield Call(twin.amax, (c.x(3, 48, start=1), c.state()[1], 0))
    yield Call(twin.cast, (c.x(0, 16), *c.state(), 0, E4M3))
    yield Call(twin.cast, (c.x(5, 16, start=3), c.state()[0], None, 2, E4M3))
    yield Call(twin.cast, (c.x(5, 16, start=8), *c.state(step=3), 2, E5M2))
    yield Call(twin.cast, (c.x(5, 80), *c.state(), 1, E4M3), ahead(twin.cast))

    for dtype, q in product(WIDE, FP8):
        for shape in ((150, 16), (70, 1040)):
            yield Call(twin.cast, (c.x(*shape, dtype=dtype, special=True), *c.state(), 1, q, *places(c, shape[0])))
    yield Call(twin.cast, (c.x(0, 16), *c.state(), 0, E4M3, *places(c, 0)))


def places(c: Inputs, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths and starts of three packed sequences among so many rows; some rows are in none."""
    third = rows // 3
    starts = (min(2, third), third, third, rows - third // 2)
    return int32(c, max(third - 5, 0), 0, max(rows - 2 * third, 0)), int32(c, *starts)


def large(c: Inputs) -> Calls:
    yield Call(twin.amax, (c.x(40000, 1024), c.state(step=2)[1], 1))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.amax, (c.x(rows, cols), c.state()[1], 0))
    yield Call(twin.cast, (c.x(rows, cols), *c.state(), 1, E4M3))
