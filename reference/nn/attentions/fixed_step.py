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
            self._long, (self.tokens, self.places, into) = _parts((rows, rows, rows), torch.int64, device)
            sizes = (rows, rows * columns, rows, rows, rows + 1)
            self._int, (positions, table, steps, lengths, starts) = _parts(sizes, torch.int32, device)
        table = table.view(rows, columns)
        self.tensors: Any = (positions, into, None, None, table, steps, lengths, starts)

    def fill(self, tokens: list[int], places: Places) -> None:
        """Let the next forward be of these tokens of the batch's sequences: two copies from the host."""
        more, own = self.rows - len(tokens), np.array(places.lengths)
        table = np.zeros((len(tokens), self.columns), np.int64)
        for row, pages in zip(table, places.pages, strict=True):
            row[: len(pages)] = pages

        def repeated(*each: Any) -> list[np.ndarray]:
            return [np.concatenate([x, np.repeat(x[:1], more, 0)]) for x in each]

        _copy(repeated(np.array(tokens), own - 1, np.array(places.rows)), self._long)
        _copy([*repeated(own - 1, table, np.ones_like(own), own), np.arange(self.rows + 1)], self._int)


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


def _copy(parts: list[np.ndarray], buffer: torch.Tensor) -> None:
    """Fill a buffer of `_parts`."""
    found = [np.pad(x.reshape(-1), (0, _room(x.size) - x.size)) for x in parts]
    buffer.copy_(torch.from_numpy(np.concatenate(found)).to(buffer.dtype))
