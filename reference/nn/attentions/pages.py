"""Which pages of a cache each sequence has: a page table on the host.

A page is a place for `size` neighbouring tokens in the cache of every layer. A sequence of n tokens has ceil(n / size)
of them, in the order of its tokens. Sequences that begin with the same tokens may have the same pages (`share`); before
a sequence writes into a page that others have, it gets a copy of its own (`extend` says which pages to copy).
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np


class Pages:
    """Sequences by name, each with its length and its pages.

    Args:
        count: pages that there are.
        size: tokens of a page.

    Attributes:
        of: the pages of each sequence.
        lengths: its tokens.
        free: pages that nobody has.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.reset()

    def reset(self) -> None:
        """Nobody has a page."""
        self.of: dict[Hashable, list[int]] = {}
        self.lengths: dict[Hashable, int] = {}
        self.free = list(range(self.count))[::-1]
        self._owners = [0] * self.count
        self._batch: tuple[Sequence[Hashable], np.ndarray] | None = None

    def needed(self, steps: Mapping[Hashable, int], ended: Iterable[Hashable] = ()) -> int:
        """How many free pages `extend` takes for these new tokens, after `drop` of those that have ended."""
        lost: dict[int, int] = Counter(page for name in ended for page in self.of[name])  # owners, by page
        found = 0
        lengths, of, owners, size = self.lengths, self.of, self._owners, self.size
        for name, new in steps.items():
            length = lengths.get(name, 0)
            if new == 1 and length % size and owners[of[name][-1]] == 1:
                continue  # as nearly all in a step of one token each
            pages = of.get(name, [])
            found += -(-(length + new) // size) - len(pages)
            if new and length % size and owners[pages[-1]] - lost.get(pages[-1], 0) > 1:
                lost[pages[-1]] = lost.get(pages[-1], 0) + 1
                found += 1
        return found - sum(self._owners[page] == count for page, count in lost.items())

    def extend(self, name: Hashable, new: int) -> list[tuple[int, int]]:
        """Make room for new tokens of a sequence, which begins with them if there is none; pages to copy, from and to.

        As many pages must be free as `needed` says.
        """
        self._batch = None
        pages, length = self.of.setdefault(name, []), self.lengths.get(name, 0)
        copies = []
        if new and length % self.size and self._owners[pages[-1]] > 1:
            copies.append((pages[-1], self.free[-1]))
            self._owners[pages[-1]] -= 1
            pages[-1] = self._take()
        self.lengths[name] = length + new
        while len(pages) * self.size < length + new:
            pages.append(self._take())
        return copies

    def grow(self, names: Sequence[Hashable]) -> tuple[list[int], list[int]] | None:
        """`extend` by one token of each of these sequences; their lengths, and which of them have got a page.

        None, and nothing is done, where a page would have to be copied, too few are free, or a sequence has no token.
        From call to call with the same names, lengths stay in an array, and only who gets a page is looked at.
        """
        if self._batch is None or self._batch[0] != tuple(names):
            lengths = [self.lengths.get(name, 0) for name in names]
            shared = (
                length % self.size and self._owners[self.of[name][-1]] > 1
                for name, length in zip(names, lengths, strict=True)
            )
            if not all(lengths) or any(shared):
                return None
            self._batch = tuple(names), np.array(lengths)
        batch = self._batch[1]
        full = np.flatnonzero(batch % self.size == 0).tolist()
        if len(full) > len(self.free):
            return None
        for i in full:
            self.of[names[i]].append(self._take())
        batch += 1
        found = batch.tolist()
        self.lengths.update(zip(names, found, strict=True))
        return found, full

    def share(self, name: Hashable, source: Hashable, tokens: int) -> None:
        """Begin a sequence with the first tokens of another one, in its pages."""
        self._batch = None
        pages = self.of[source][: -(-tokens // self.size)]
        for page in pages:
            self._owners[page] += 1
        self.of[name], self.lengths[name] = pages, tokens

    def cut(self, name: Hashable, tokens: int) -> None:
        """Forget a sequence's tokens after so many."""
        self._batch = None
        kept = -(-tokens // self.size)
        self._release(self.of[name][kept:])
        self.of[name], self.lengths[name] = self.of[name][:kept], tokens

    def drop(self, name: Hashable) -> None:
        """Forget a sequence."""
        self._batch = None
        self._release(self.of.pop(name))
        del self.lengths[name]

    def rows(self, name: Hashable, start: int) -> list[int]:
        """Rows of a cache `[count · size]` in which a sequence's tokens from `start` on lie."""
        pages, size = self.of[name], self.size
        return [pages[i // size] * size + i % size for i in range(start, self.lengths[name])]

    def _take(self) -> int:
        page = self.free.pop()
        self._owners[page] = 1
        return page

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self.free.append(page)
