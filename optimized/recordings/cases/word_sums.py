"""Cases of `word_sums`: digests of tensors of every dtype, at any address."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.case import Case, Outputs
from reference.numbers import philox

twin = torch.ops.twin
BLOCK = 4 * 64 * 64  # bytes
PART = 8 * BLOCK  # of a block of threads
SIZES = (0, 1, 2, 3, 4, 5, 63, BLOCK - 1, BLOCK, BLOCK + 1, 0, PART - 16, PART, PART + 6, 2 * PART + 4 * BLOCK + 7, 0)


def _bytes(count: int, seed: int) -> torch.Tensor:
    return (philox.uniform((count,), 0.0, 1.0, seed=seed) * 256).to(torch.uint8)


def _digests(start: int, device: torch.device) -> Outputs:
    tensors = [_bytes(start + size, 260 + i).to(device)[start:] for i, size in enumerate(SIZES)]
    return {"digests": twin.word_sums(tensors)}


def cases() -> Iterator[Case]:
    for start in (0, 1, 4, 6, 16):
        yield Case("word_sums", f"from byte {start}", partial(_digests, start), live=True)  # not recorded yet


def calls(c: Inputs) -> Calls:
    for dtype in (FP32, BF16, FP16, E4M3):
        x = c.x(130, 96, dtype=BF16 if dtype is E4M3 else dtype)
        yield Call(twin.word_sums, ([x.to(dtype) if dtype is E4M3 else x],))
    for rows, start in product((3, 200), range(1, 9)):  # odd addresses
        yield Call(twin.word_sums, ([c.x(rows, 41, start=start), c.x(7, 5)],))
    x = c.x(70, 33, dtype=FP32)
    yield Call(twin.word_sums, ([x.t(), x[::3], x[0, 0], c.x(0, 4), x > 0, x.double(), x.long(), c.x(0)],))
    yield Call(twin.word_sums, ([c.x(0, 4)],))
    yield Call(twin.word_sums, ([c.x(5, 5)] * 65,))  # one more than the kernel's smallest capacity


def large(c: Inputs) -> Calls:
    for count in (64, 256, 257, 1024, 1025):  # the capacities of the kernel's arguments
        yield Call(twin.word_sums, ([c.x(5, 5)] * count,))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for dtype in (BF16, FP32):
        yield Call(twin.word_sums, ([c.x(rows, cols, dtype=dtype), c.x(cols, rows, dtype=dtype)],))
