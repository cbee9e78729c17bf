"""Cases of `normal`: numbers that Philox draws."""

from collections.abc import Iterator
from functools import partial

import torch

from optimized.recordings.calls import Call, Calls, Inputs
from optimized.recordings.case import Case, Outputs

twin = torch.ops.twin


def _normal(mean: float, std: float, device: torch.device) -> Outputs:
    values = torch.full((1 << 20,), torch.nan, device=device)
    twin.normal(values, mean, std, 161)
    return {"values": values}


def cases() -> Iterator[Case]:
    for mean, std in ((0.0, 1.0), (0.5, 0.023)):
        yield Case("normal", f"mean {mean}, std {std}", partial(_normal, mean, std), live=True)  # not recorded yet


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
