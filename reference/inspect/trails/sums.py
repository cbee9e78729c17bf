"""Digests of many tensors at once, where they lie: 192 bits each, of integer sums alone, without waiting for a device.

What they are stands in `reference.ops.digests.word_sums`. One changed word always changes the first sum, and the other
two say which word it is and what it was (`changed_word`). Changes of several words go unseen with the chance 2^-64 or
so, and 2^-32 where all are of top bits. It is no protection against somebody who wants it to be the same: for that
there is SHA-256 (`te.digest`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from reference.ops.digests import word_sums
from reference.ops.digests.word_sums import BLOCK, COLUMN, ROW, SIDE, h, words_of
from reference.ops.library import runs_on_cuda, twin

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of dense tensors of one device: int64 `[tensors, 3]` on it.

    By a kernel on a Hopper GPU if `optimized` has been imported, 1,024 tensors a launch; elsewhere by torch's ops.
    """
    with torch.no_grad():
        plain = [x if type(x) in _PLAIN else words_of(x) for x in tensors]
        device = plain[0].device
        if device.type == "cpu" or (runs_on_cuda("word_sums") and torch.cuda.get_device_capability(device)[0] == 9):
            found: torch.Tensor = twin.word_sums(plain)
            return found
        return word_sums.word_sums(plain)


def changed_word(words: int, one: Sequence[int], other: Sequence[int]) -> tuple[int, int] | None:
    """The position of the one word of `words` in which tensors with these digests differ, and by how much; or None."""
    change, by_row, by_column = ((b - a) % 2**64 for a, b in zip(one, other, strict=True))
    signed = change - 2**64 if change >> 63 else change
    if signed == 0 or abs(signed) >= 1 << 32:
        return None
    blocks, side = np.arange(-(-words // BLOCK), dtype=np.uint64), np.arange(SIDE, dtype=np.uint64)
    with np.errstate(over="ignore"):
        rows = h(side)[None] * h(np.uint64(ROW) + blocks)[:, None] * np.uint64(change)
        columns = h(np.uint64(SIDE) + side)[None] * h(np.uint64(COLUMN) + blocks)[:, None] * np.uint64(change)
    in_row, in_column = np.argwhere(rows == np.uint64(by_row)), np.argwhere(columns == np.uint64(by_column))
    at = [b * BLOCK + r * SIDE + c for b, r in in_row.tolist() for b2, c in in_column.tolist() if b == b2]
    at = [i for i in at if i < words]
    return (at[0], signed) if len(at) == 1 else None
