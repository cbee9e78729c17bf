"""`FixedStep`: the places of a step of one token of each sequence, in tensors that stay where they are.

A CUDA graph reads what lies at the addresses that it was captured with. So a step that a graph shall replay reads its
tokens, positions, rows of the cache, page table and lengths from tensors that are made once for each number of rows,
and filled before each step. Numbers in a graph stay, too: `longest_kv` of `twin::attention_paged` is the most that a
sequence may have, which changes no word, since kv_lengths say which keys there are.

Nobody waits for the copies that fill them, nor do they wait for the host: the step before may still run. Its tokens
need not be known either. A step that writes the tokens that it has drawn into `tokens` has given them to the next one.
At its end it also moves all sequences on by a token (`end`). So where the same sequences go on, and none has got a
page, the next step finds everything in its place, and nothing is copied from the host.

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
        found: int32 [3 * rows], the memory of `tokens` and `losses`: one copy brings them to the host.
        tokens: int64 [rows], the new tokens, and after the step those that it has drawn.
        losses: fp32 [rows], of those.
        places: int64 [rows], the positions of the new tokens.
        tensors: positions and what follows it in `StepTensors`.
    """

    def __init__(self, rows: int, columns: int, size: int, device: torch.device) -> None:
        self.rows, self.columns, self.size = rows, columns, size
        ends = np.cumsum([0, *(-(-n // _ALIGNED) * _ALIGNED for n in (2 * rows, 2 * rows, rows, rows))])
        self._changing = int(ends[-1])  # elements before the page table, which most steps leave as it is

        def parts(buffer: torch.Tensor) -> list[torch.Tensor]:
            longs = [buffer[at : at + 2 * rows].view(torch.int64) for at in ends[:2]]
            return [*longs, *(buffer[at : at + rows] for at in ends[2:4])]

        with torch.inference_mode(False):
            self.found = torch.zeros(3 * rows, dtype=torch.int32, device=device)
            steps = torch.ones(rows, dtype=torch.int32, device=device)
            starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
            self._device = torch.zeros(self._changing + rows * columns, dtype=torch.int32, device=device)
            self._host = torch.zeros_like(self._device, device="cpu")  # the same, where a step changes what is new
            one = torch.zeros(self._changing, dtype=torch.int32, device="cpu")
            for part in parts(one):
                part.fill_(1)
            self._one = one.to(device)  # no number exceeds 31 bits, so those of 64 are moved on like two of 32
        self.tokens, self.losses = self.parted(self.found)
        self.places, into, positions, lengths = parts(self._device)
        table = self._device[self._changing :].view(rows, columns)
        self.tensors: Any = (positions, into, None, None, table, steps, lengths, starts)
        self._places, self._into, self._positions, self._lengths = (x.numpy() for x in parts(self._host))
        self._table = self._host[self._changing :].view(rows, columns).numpy()
        self._rows = np.arange(rows)
        self._together: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pages: list[list[int]] = [[] for _ in range(rows)]  # whose numbers the rows of the table hold,
        self._ends = [(0, -1)] * rows  # and how many they were then, and the last of them
        self._step, self._host_step = one.numpy(), self._host.numpy()[: self._changing]
        self._there: np.ndarray | None = None  # what lies on the device before the page table, if a step has ended

    def parted(self, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and losses in `found` or in a copy of it."""
        return found[: 2 * self.rows].view(torch.int64), found[2 * self.rows :].view(torch.float32)

    def together(self, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows_lengths` and `rows_starts` of `StepTensors`, where so many queries share a head of keys."""
        if queries not in self._together:
            steps, starts = self.tensors[-3], self.tensors[-1]
            with torch.inference_mode(False):
                self._together[queries] = (steps * queries, starts * queries)
        return self._together[queries]

    def fill(
        self,
        tokens: list[int] | torch.Tensor | None,
        lengths: list[int],
        pages: list[list[int]],
        changed: list[int] | None = None,
    ) -> None:
        """Let the next forward be of the batch's sequences: one copy from the host, as it is now, or none.

        Args:
            tokens: the new token of each; or int64 [rows] on the device; or None where they lie in `tokens` already.
            lengths: how many tokens each has, the new one included.
            pages: of each, as `Pages.of` has them: a list only grows, or gets another last page, and else is a new one.
            changed: rows whose pages are not those of the last call, where the caller knows; None looks at all.
        """
        count = len(lengths)
        self._lengths[:count], self._lengths[count:] = lengths, lengths[0]
        np.subtract(self._lengths, 1, out=self._positions)
        self._places[:] = self._positions
        if changed is None:
            looked_at: Any = range(self.rows)
        else:
            looked_at = [*changed, *(range(count, self.rows) if 0 in changed else ())]
        table = False
        for row in looked_at:
            one = pages[row if row < count else 0]
            end = (len(one), one[-1])
            if one is not self._pages[row] or end != self._ends[row]:
                self._table[row, : end[0]], self._table[row, end[0] :] = one, 0
                self._pages[row], self._ends[row], table = one, end, True
        column, offset = np.divmod(self._places, self.size)
        self._into[:] = self._table[self._rows, column].astype(np.int64) * self.size + offset
        if table or self._there is None or not np.array_equal(self._host_step, self._there):
            many = len(self._host) if table else self._changing
            pinned.fill(self._device[:many], self._host[:many])
        self._there = None
        if isinstance(tokens, list):
            padded = tokens + tokens[:1] * (self.rows - count)
            pinned.fill(self.tokens, torch.tensor(padded, dtype=torch.int64, device="cpu"))
        elif tokens is not None:
            self.tokens.copy_(tokens)

    def end(self, tokens: torch.Tensor, losses: torch.Tensor) -> None:
        """The step's last launches: keep what it has drawn, int64 and fp32 [rows], and move all sequences on."""
        torch.cat((tokens.view(torch.int32), losses.view(torch.int32)), out=self.found)
        self._device[: self._changing] += self._one

    def ended(self) -> None:
        """On the host: a step has been launched up to its end."""
        self._there = self._host_step + self._step
