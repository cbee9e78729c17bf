"""Heads that attention computes together: what Python does for a small one takes longer than its arithmetic.

No number of a head depends on another head, so the bits are those of each alone.
"""

import itertools
from dataclasses import dataclass, replace

import torch

from reference.ops.attentions.attention_lengths import Entry

PAIRS = 1 << 18
"""Scores of one call, about: its matrices stay in the cache."""


@dataclass(frozen=True)
class Heads:
    """n neighbours, by their number batch · h + head, that have equally many queries and keys."""

    first: int  # the number of the first
    batch: torch.Tensor  # int64 [n]
    head: torch.Tensor  # int64 [n]
    shape: tuple[int, int, int, int]  # [b, h, sq, skv], the latter two of these heads
    entry: Entry

    @property
    def count(self) -> int:
        """n."""
        return self.batch.numel()

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x `[b, h, ..]` of these heads: `[n, ..]`."""
        return x[self.batch, self.head]

    def tile(self, x: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
        """A tile of x, which broadcasts to `shape`: `[n, rows, keys]`."""
        return self.of(x.expand(self.shape)[:, :, rows, keys])

    def to_keys(self, group: int) -> "Heads":
        """The heads of k and v that these read, of which each serves `group`."""
        return replace(self, head=self.head // group)

    def member(self, number: int, group: int) -> "Heads":
        """Where these are heads of k and v: of each `group` that reads one, the head of that number."""
        b, heads, *sizes = self.shape
        return replace(self, head=self.head * group + number, shape=(b, heads * group, *sizes))  # type: ignore[arg-type]


def together(found: list[Entry], heads: int) -> list[Heads]:
    """All heads of a batch with these entries, `heads` in each, in pieces; at least as many as torch has threads."""
    pieces, share = [], -(-len(found) * heads // torch.get_num_threads())
    for (sq, skv), same in itertools.groupby(range(len(found)), key=lambda n: found[n][:2]):
        numbers = [n * heads + head for n in same for head in range(heads)]
        length = max(1, min(share, PAIRS // max(1, sq * skv)))
        for at in range(0, len(numbers), length):
            some = torch.tensor(numbers[at : at + length], dtype=torch.int64, device="cpu")
            first = numbers[at]
            shape = (len(found), heads, sq, skv)
            pieces.append(Heads(first, some // heads, some % heads, shape, found[first // heads]))
    return pieces
