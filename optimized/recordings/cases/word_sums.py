"""Calls of `word_sums`: digests of tensors of every dtype, at any address."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, E4M3, FP16, FP32, Call, Calls, Inputs

twin = torch.ops.twin
BLOCK = 4 * 64 * 64  # bytes
PART = 8 * BLOCK  # of a block of threads
SIZES = (0, 1, 2, 3, 4, 5, 63, BLOCK - 1, BLOCK, BLOCK + 1, 0, PART - 16, PART, PART + 6, 2 * PART + 4 * BLOCK + 7, 0)


def calls(c: Inputs) -> Calls:
    for dtype in (FP32, BF16, FP16, E4M3):
        x = c.x(130, 96, dtype=BF16 if dtype is E4M3 else dtype)
        yield Call(twin.word_sums, ([x.to(dtype) if dtype is E4M3 else x],))
    for rows, start in product((3, 200), range(1, 9)):  # odd addresses
        yield Call(twin.word_sums, ([c.x(rows, 41, start=start), c.x(7, 5)],))
    for start in (0, 1, 4, 6, 16):
        bytes_of = (c.integers(start + size, below=256, dtype=torch.uint8) for size in SIZES)
        yield Call(twin.word_sums, ([x[start:] for x in bytes_of],))
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
