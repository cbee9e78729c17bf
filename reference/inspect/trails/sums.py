"""Digests of many tensors at once, where they lie: 192 bits each, of integer sums alone, without waiting for a device.

A tensor's bytes make signed little-endian words w_0, w_1, ... of 32 bits, and zeros fill up the last block of 64 x 64.
Word i stands in block b, row r, column c. With h(j) = splitmix64(j) made odd, modulo 2^64 and in any order of addition,

    digest = (sum of w,  sum of w · h(r) · h(2^32 + b),  sum of w · h(64 + c) · h(2^33 + b))

Row and column sums read each word twice and write little, and small tensors are read side by side; a few dozen kernels
serve a whole model. Any device, and any way of cutting, gives the same digest.

What it sees: one changed word always changes the first sum, and the other two say which word it is and what it was
(`changed_word`). Changes of several words go unseen with the chance 2^-64 or so, and 2^-32 where all are of top bits.
It is no protection against somebody who wants it to be the same: for that there is SHA-256 (`te.digest`).
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from reference.inspect.recorded_step.digest import splitmix64

SIDE = 64
BLOCK = SIDE * SIDE  # words
_ALONE = 1 << 20  # words of a tensor that is worth kernels of its own
_BATCH = 1 << 24  # words that are copied side by side at a time: 64 MiB
_ROW, _COLUMN = 1 << 32, 1 << 33


def _h(j: np.ndarray) -> np.ndarray:
    return splitmix64(j) | np.uint64(1)


def _words(x: torch.Tensor) -> torch.Tensor:
    """The words of a tensor, int32, on its device."""
    data = x.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


@lru_cache(64)
def _layout(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Of tensors with so many words: to which tensor each block belongs, and the blocks' and the sides' constants."""
    blocks = [-(-n // BLOCK) for n in sizes]
    ids = np.repeat(np.arange(len(sizes)), blocks)
    places = np.concatenate([np.arange(n) for n in blocks]) if sizes else np.zeros(0, np.int64)
    # Large tensors' whole blocks come first, and then the others' and the rests, as in `_blocks_of`.
    whole = np.array([_whole(size) for size in sizes], np.int64)
    order = np.argsort(places >= whole[ids], kind="stable")
    ids, places = ids[order], places[order].astype(np.uint64)
    side = np.arange(SIDE, dtype=np.uint64)
    parts = (
        _h(side), _h(np.uint64(_ROW) + places), _h(np.uint64(SIDE) + side), _h(np.uint64(_COLUMN) + places),
    )  # fmt: skip
    return tuple(
        torch.from_numpy(x.astype(np.int64) if x is ids else x.view(np.int64)).to(device) for x in (ids, *parts)
    )


def _whole(words: int) -> int:
    """The blocks of a tensor that are read where they are."""
    return words // BLOCK if words >= _ALONE else 0


def _blocks_of(all_words: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors' blocks `[blocks, 64, 64]`, in pieces."""
    found, waiting, count = [], [], 0
    zeros = torch.zeros(BLOCK, dtype=torch.int32, device=all_words[0].device)
    for words in all_words:
        whole = _whole(words.numel()) * BLOCK
        if whole:
            found.append(words[:whole].view(-1, SIDE, SIDE))
    for words in all_words:
        words = words[_whole(words.numel()) * BLOCK :]
        if not words.numel():
            continue
        waiting.append(words)
        if words.numel() % BLOCK:
            waiting.append(zeros[: -words.numel() % BLOCK])
        count += words.numel()
        if count >= _BATCH:
            found.append(torch.cat(waiting).view(-1, SIDE, SIDE))
            waiting, count = [], 0
    if waiting:
        found.append(torch.cat(waiting).view(-1, SIDE, SIDE))
    return found


def sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of dense tensors of one device: int64 `[tensors, 3]` on it."""
    device = tensors[0].device
    with torch.no_grad():
        all_words = [_words(x) for x in tensors]
        ids, row, row_block, column, column_block = _layout(tuple(w.numel() for w in all_words), device)
        found = torch.zeros(len(tensors), 3, dtype=torch.int64, device=device)
        if not len(ids):
            return found
        pieces = _blocks_of(all_words)
        rows = torch.cat([x.sum(2, dtype=torch.int64) for x in pieces])
        columns = torch.cat([x.sum(1, dtype=torch.int64) for x in pieces])
        parts = (rows.sum(1), (rows * row).sum(1) * row_block, (columns * column).sum(1) * column_block)
        return found.index_add_(0, ids, torch.stack(parts, 1))


def changed_word(words: int, one: Sequence[int], other: Sequence[int]) -> tuple[int, int] | None:
    """The position of the one word of `words` in which tensors with these digests differ, and by how much; or None."""
    change, by_row, by_column = ((b - a) % 2**64 for a, b in zip(one, other, strict=True))
    signed = change - 2**64 if change >> 63 else change
    if signed == 0 or abs(signed) >= 1 << 32:
        return None
    blocks, side = np.arange(-(-words // BLOCK), dtype=np.uint64), np.arange(SIDE, dtype=np.uint64)
    with np.errstate(over="ignore"):
        rows = _h(side)[None] * _h(np.uint64(_ROW) + blocks)[:, None] * np.uint64(change)
        columns = _h(np.uint64(SIDE) + side)[None] * _h(np.uint64(_COLUMN) + blocks)[:, None] * np.uint64(change)
    in_row, in_column = np.argwhere(rows == np.uint64(by_row)), np.argwhere(columns == np.uint64(by_column))
    at = [b * BLOCK + r * SIDE + c for b, r in in_row.tolist() for b2, c in in_column.tolist() if b == b2]
    at = [i for i in at if i < words]
    return (at[0], signed) if len(at) == 1 else None
