"""`FixedStep`: the places of a step of one token of each sequence, in tensors that stay where they are.

A CUDA graph reads what lies at the addresses that it was captured with. So a step that a graph shall replay reads its
tokens, positions, rows of the cache, page table and lengths from tensors that are made once for each number of rows,
and filled before each step. Numbers in a graph stay, too: `longest_kv` of `twin::attention_paged` is the most that a
sequence may have, which changes no word, since kv_lengths say which keys there are.

Nobody waits for the copies that fill them, nor do they wait for the host: the step before may still run. Its tokens
need not be known either. A step that writes the tokens that it has drawn into `tokens` has given them to the next one.

The batch may have fewer sequences than the step has rows. A row after the batch's is a copy of row 0: the same token of
the same sequence at the same place. What it computes is what row 0 computes, so that it writes the same key and value
into the same row of the cache, and nobody reads its logits. No word of another row depends on it.
"""

from typing import Any

import numpy as np
import torch

from reference.support import pinned

_ALIGNED = 32  # elements: each part of the buffer begins at a multiple of 128 bytes


class FixedStep:
    """The tensors of a step of `rows` sequences, of at most `columns` pages of `size` tokens each.

    Attributes:
        tokens: int64 [rows], the new tokens.
        places: int64 [rows], their positions.
        tensors: positions and what follows it in `StepTensors`.
    """

    def __init__(self, rows: int, columns: int, size: int, device: torch.device) -> None:
        self.rows, self.columns, self.size = rows, columns, size
        ends = np.cumsum([0, *(-(-n // _ALIGNED) * _ALIGNED for n in (2 * rows, 2 * rows, rows, rows))])
        self._changing = int(ends[-1])  # elements before the page table, which most steps leave as it is
        with torch.inference_mode(False):
            self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
            steps = torch.ones(rows, dtype=torch.int32, device=device)
            starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
            self._device = torch.zeros(self._changing + rows * columns, dtype=torch.int32, device=device)
            self._host = torch.zeros_like(self._device, device="cpu")  # the same, where a step changes what is new

        def parts(buffer: torch.Tensor) -> list[torch.Tensor]:
            longs = [buffer[at : at + 2 * rows].view(torch.int64) for at in ends[:2]]
            ints = [buffer[at : at + rows] for at in ends[2:4]]
            return [*longs, *ints, buffer[self._changing :].view(rows, columns)]

        self.places, into, positions, lengths, table = parts(self._device)
        self.tensors: Any = (positions, into, None, None, table, steps, lengths, starts)
        self._places, self._into, self._positions, self._lengths, self._table = (x.numpy() for x in parts(self._host))
        self._rows = np.arange(rows)
        self._together: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pages: list[list[int]] = [[] for _ in range(rows)]  # whose numbers the rows of the table hold,
        self._ends = [(0, -1)] * rows  # and how many they were then, and the last of them

    def together(self, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows_lengths` and `rows_starts` of `StepTensors`, where so many queries share a head of keys."""
        if queries not in self._together:
            steps, starts = self.tensors[-3], self.tensors[-1]
            with torch.inference_mode(False):
                self._together[queries] = (steps * queries, starts * queries)
        return self._together[queries]

    def fill(self, tokens: list[int] | torch.Tensor | None, lengths: list[int], pages: list[list[int]]) -> None:
        """Let the next forward be of the batch's sequences: one copy from the host, as it is now.

        Args:
            tokens: the new token of each; or int64 [rows] on the device; or None where they lie in `tokens` already.
            lengths: how many tokens each has, the new one included.
            pages: of each, as `Pages.of` has them: a list only grows, or gets another last page, and else is a new one.
        """
        count = len(lengths)
        self._lengths[:count], self._lengths[count:] = lengths, lengths[0]
        np.subtract(self._lengths, 1, out=self._positions)
        self._places[:] = self._positions
        changed = False
        for row, one in enumerate([*pages, *pages[:1] * (self.rows - count)]):
            end = (len(one), one[-1])
            if one is not self._pages[row] or end != self._ends[row]:
                self._table[row, : end[0]], self._table[row, end[0] :] = one, 0
                self._pages[row], self._ends[row], changed = one, end, True
        column, offset = np.divmod(self._places, self.size)
        self._into[:] = self._table[self._rows, column].astype(np.int64) * self.size + offset
        many = len(self._host) if changed else self._changing
        pinned.fill(self._device[:many], self._host[:many])
        if isinstance(tokens, list):
            padded = tokens + tokens[:1] * (self.rows - count)
            pinned.fill(self.tokens, torch.tensor(padded, dtype=torch.int64, device="cpu"))
        elif tokens is not None:
            self.tokens.copy_(tokens)
