"""Calls of `tree_mean`: orders of some ranks, dtypes, and memory at any address."""

import torch

from optimized.ops.optimizers.tree_mean import ORDERS
from optimized.recordings.calls import FP32, Call, Calls, Inputs
from optimized.recordings.case import WIDE

twin = torch.ops.twin


def _call(c: Inputs, order: list[int], count: int, nodes: torch.dtype, dtype: torch.dtype, start: int = 0) -> Call:
    rows = [c.x(1, count, dtype=nodes, start=start)[0] for _ in order]
    return Call(twin.tree_mean, (rows, order, 1 / len(order), c.x(1, count, dtype=dtype, start=start)[0]))


def calls(c: Inputs) -> Calls:
    for dtype in WIDE:
        for nodes in (dtype, FP32):
            yield _call(c, [0, 1], 77, nodes, dtype)
    for order in ORDERS:
        yield _call(c, list(order), 2049, torch.bfloat16, torch.bfloat16)
    yield _call(c, [0, 1], 64, torch.bfloat16, torch.bfloat16, start=1)
    yield _call(c, [0, 1], 0, FP32, torch.bfloat16)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield _call(c, [0, 1], rows * cols, torch.bfloat16, torch.bfloat16)
