"""Calls of `normal`: numbers that Philox draws."""

import torch

from optimized.recordings.calls import Call, Calls, Inputs

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    for count, mean, std, seed in (
        (1, 0.0, 1.0, 0),
        (7, 0.5, 2.0, 3),
        (2048, 0.5, 0.023, 7),
        (2049, -0.5, 0.0, 2**63 - 1),
        (10001, 0.5, 2.0, 3),
        (0, 0.0, 1.0, 1),
    ):
        yield Call(twin.normal, (c.zeros(count), mean, std, seed))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.normal, (c.zeros(rows, cols), 0.0, 1.0, 1))
