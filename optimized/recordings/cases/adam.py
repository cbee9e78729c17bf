"""Cases of `adam`."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE, Case, Outputs, numbers, short
from reference.ops.optimizers.adam import correction

twin = torch.ops.twin
SIZES = ((3, 7), (33, 100))
NUMBERS = (1e-2, 0.9, 0.999, 1e-8, 0.1, 0.19, 0.002)
SHAPES = ((), (2, 0, 3))  # beside those of any size: one number, and none


def _drawn(dtype: torch.dtype, seed: int, device: torch.device) -> list[torch.Tensor]:
    """A matrix of each of the SIZES."""
    return [numbers(shape, dtype, seed + i).to(device) for i, shape in enumerate(SIZES)]


def _adam(dtype: torch.dtype, master: bool, decoupled: bool, device: torch.device) -> Outputs:
    """Three steps of two tensors."""
    param = torch.float32 if master else dtype
    grads, params = _drawn(dtype, 171, device), _drawn(param, 173, device)
    first, second = ([torch.zeros(shape, device=device) for shape in SIZES] for _ in range(2))
    rounded = [torch.zeros_like(grad) for grad in grads] if master else []
    for step in (1, 2, 3):
        divisors = correction(0.9, step), correction(0.999, step)
        twin.adam(grads, params, first, second, rounded, 1e-2, 0.9, 0.999, 1e-8, 0.1, *divisors, decoupled)
    named = {"param": params, "exp_avg": first, "exp_avg_sq": second, "rounded": rounded}
    return {f"{name}.{i}": x for name, found in named.items() for i, x in enumerate(found)}


def cases() -> Iterator[Case]:
    for dtype, master, decoupled in product(WIDE, (False, True), (False, True)):
        if not (master and dtype == torch.float32):
            label = f"{short(dtype)}{', masters' * master}{', decoupled decay' * decoupled}"
            yield Case("adam", label, partial(_adam, dtype, master, decoupled))


def _call(
    c: Inputs,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    master: bool,
    decoupled: bool = True,
    start: int = -1,
) -> Call:
    """`start`: which of the five lists' last tensor begins off a multiple of 16 bytes."""
    starts = [[int(i == start and shape is shapes[-1]) for shape in shapes] for i in range(5)]

    def of(i: int, kind: torch.dtype, positive: bool = False) -> list[torch.Tensor]:
        make = c.positive if positive else c.x
        return [make(*shape, dtype=kind, start=n) for shape, n in zip(shapes, starts[i], strict=True)]

    given = [of(0, dtype), of(1, FP32 if master else dtype), of(2, FP32), of(3, FP32, True)]
    return Call(twin.adam, (*given, of(4, dtype) if master else [], *NUMBERS, decoupled))


def calls(c: Inputs) -> Calls:
    for dtype, master, decoupled in product(WIDE, (False, True), (False, True)):
        if not (master and dtype == FP32):
            yield _call(c, [(3, 7), (41, 100)], dtype, master, decoupled)
    yield _call(c, [(3, 7), (0, 4), (16,), ()], BF16, False)
    for start in range(5):
        yield _call(c, [(8,), (8,)], BF16, True, start=start)
    yield _call(c, [(5, 5)] * 33, BF16, True)  # one more than the kernel's smallest capacity


def large(c: Inputs) -> Calls:
    for count in (32, 512, 513):  # the capacities of the kernel's arguments
        yield _call(c, [(5, 5)] * count, BF16, True)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for shape, dtype in product((*SHAPES, (rows, cols)), (BF16, FP32)):
        yield _call(c, [shape], dtype, dtype == BF16)
