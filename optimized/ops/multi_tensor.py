"""Launches over many tensors: their addresses lie in the kernel's argument (kernels/common/multi_tensor.cuh).

A row of the table has an `x` or other addresses, `count` elements, `first_block`, and whether all addresses are
`aligned` to 16 bytes. A list that is longer than the largest table takes more launches.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from optimized.cuda import launch

THREADS = 256
ELEMENTS_PER_BLOCK = THREADS * 8
Tensor = tuple[tuple[int, ...], int, tuple[int, ...]]  # addresses, count, numbers


def entries(pointers: Sequence[str], numbers: Sequence[str] = ()) -> np.dtype:
    """The dtype of a table's row: 8-byte addresses, `count`, `first_block`, 4-byte numbers, `aligned`, padding."""
    fields = [*((name, "u8") for name in pointers), ("count", "i8"), ("first_block", "i4")]
    row = np.dtype([*fields, *((name, "i4") for name in numbers), ("aligned", "i4")])
    padded = -(-row.itemsize // 8) * 8
    return row if row.itemsize == padded else np.dtype([*row.descr, ("unused", "i4")])


def tables(
    row: np.dtype, found: Sequence[Tensor], capacities: Sequence[int], per_block: int
) -> Iterator[tuple[int, int, list[Any]]]:
    """For each launch its capacity, blocks, and first two arguments."""
    for start in range(0, len(found), capacities[-1]):
        part = found[start : start + capacities[-1]]
        capacity = next(c for c in capacities if len(part) <= c)
        rows, blocks = [], 0
        for addresses, count, numbers in part:
            at = 0
            for address in addresses:
                at |= address
            rows.append((*addresses, count, blocks, *numbers, at % 16 == 0))
            blocks += -(-count // per_block)
        table = np.zeros(capacity, row)
        for i, values in enumerate(rows):
            table[i] = values if len(values) == len(row.names or ()) else (*values, 0)
        yield capacity, blocks, [launch.by_value(table), np.int32(len(part))]


def kernels(
    file: str, name: str, keys: Mapping[Any, Mapping[str, int]], capacities: Sequence[int]
) -> dict[tuple[Any, int], launch.Kernel]:
    """The function `name` of `file` for each key, whose macros are given, and capacity."""
    return {
        (key, capacity): launch.function(file, name, {**defines, "CAPACITY": capacity})
        for key, defines in keys.items()
        for capacity in capacities
    }
