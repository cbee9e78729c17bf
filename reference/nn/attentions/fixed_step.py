"""`FixedStep`: the places of a step of one token of each sequence, in tensors that stay where they are.

A CUDA graph reads what lies at the addresses that it was captured with. So a step that a graph shall replay reads its
tokens, positions, rows of the cache, page table and lengths from tensors that are made once for each number of rows,
and filled before each step. Numbers in a graph stay, too: `longest_kv` of `twin::attention_paged` is the most that a
sequence may have, which changes no word, since kv_lengths say which keys there are.

The batch may have fewer sequences than the step has rows. A row after the batch's is a copy of row 0: the same token of
the same sequence at the same place. What it computes is what row 0 computes, so that it writes the same key and value
into the same row of the cache, and nobody reads its logits. No word of another row depends on it.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

_ALIGNED = 32  # elements: each part of a buffer begins at a multiple of 128 bytes or more


class Places(NamedTuple):
    """Of a step's sequences: how many tokens each has, the new one included, its pages, and the new token's row."""

    lengths: list[int]
    pages: list[list[int]]
    rows: list[int]


class FixedStep:
    """The tensors of a step of `rows` sequences, of at most `columns` pages each.

    Attributes:
        tokens: int64 [rows], the new tokens.
        places: int64 [rows], their positions.
        tensors: positions and what follows it in `StepTensors`.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns = rows, columns
        with torch.inference_mode(False):
            longs, ints = (rows, rows, rows), (rows, rows * columns, rows, rows, rows + 1)
            self._long, (self.tokens, self.places, into) = _parts(longs, torch.int64, device)
            self._int, (positions, table, steps, lengths, starts) = _parts(ints, torch.int32, device)
            # The same on the host, where a step changes what is new.
            self._host_long, here = _parts(longs, torch.int64, torch.device("cpu"))
            self._host_int, there = _parts(ints, torch.int32, torch.device("cpu"))
        table = table.view(rows, columns)
        self.tensors: Any = (positions, into, None, None, table, steps, lengths, starts)
        self._new_tokens, self._places, self._into = (x.numpy() for x in here)
        self._positions, flat, ones, self._lengths, order = (x.numpy() for x in there)
        self._table = flat.reshape(rows, columns)
        ones[:], order[:] = 1, np.arange(rows + 1)
        self._pages: list[list[int]] = [[] for _ in range(rows)]  # what the rows of the table hold

    def fill(self, tokens: list[int], places: Places) -> None:
        """Let the next forward be of these tokens of the batch's sequences: two copies from the host."""
        count = len(tokens)
        self._new_tokens[:count], self._lengths[:count], self._into[:count] = tokens, places.lengths, places.rows
        for part in (self._new_tokens, self._lengths, self._into):
            part[count:] = part[0]
        np.subtract(self._lengths, 1, out=self._positions)
        self._places[:] = self._positions
        for row, pages in enumerate([*places.pages, *places.pages[:1] * (self.rows - count)]):
            if pages != self._pages[row]:  # most steps change no row of the table, or few
                self._table[row, : len(pages)], self._table[row, len(pages) :] = pages, 0
                self._pages[row] = pages.copy()
        self._long.copy_(self._host_long)
        self._int.copy_(self._host_int)


def _room(size: int) -> int:
    """Elements of a buffer that a part of this size takes."""
    return -(-size // _ALIGNED) * _ALIGNED


def _parts(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A buffer, and views of its parts."""
    buffer = torch.zeros(sum(map(_room, sizes)), dtype=dtype, device=device)
    rooms = buffer.split([_room(size) for size in sizes])
    return buffer, tuple(room[:size] for room, size in zip(rooms, sizes, strict=True))
