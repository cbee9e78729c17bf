"""Cases of `dbias`: column sums."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from optimized.recordings.calls import Call, Calls, Inputs
from optimized.recordings.case import WIDE, Case, Outputs, numbers, short

twin = torch.ops.twin


def _dbias(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Outputs:
    return {"dbias": twin.dbias(numbers(shape, dtype, 31).to(device))}


def cases() -> Iterator[Case]:
    for wide, rows in product(WIDE, (1, 63, 64, 65, 1000)):
        yield Case("dbias", f"{short(wide)} [{rows}, 48]", partial(_dbias, (rows, 48), wide))


def calls(c: Inputs) -> Calls:
    for dtype, (rows, cols) in product(WIDE, ((1, 48), (65, 300), (64, 9))):
        yield Call(twin.dbias, (c.x(rows, cols, dtype=dtype),))
    for rows, cols, start in ((5, 0, 0), (0, 16, 0), (5, 48, 1), (5, 48, 8)):
        yield Call(twin.dbias, (c.x(rows, cols, start=start),))


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    yield Call(twin.dbias, (c.x(rows, cols),))
