"""Digests of tensors: 128 bits that any device computes with integer additions and multiplications alone.

The numbers of a tensor, in row-major order, are bytes; zeros fill up the last four. They make signed little-endian
words w_0, w_1, ... of 32 bits. With h(j) = splitmix64(j) made odd, modulo 2^64 and for any order of addition,

    c_i = h(i mod 2^16) · h(2^32 + i div 2^16)
    digest = (sum of w_i,  sum of w_i · c_i)

A NaN of 32 or 16 bits counts as 7FC00000, 7FC0 (bf16) or 7E00 (fp16), because devices make different NaN words
(docs/numerics.md). FP8 codes, integers and bools count as they are.

Where one word has changed by d, the first sum has changed by d and the second by d · c_i: `locate` finds i, and so the
other word, from the digest alone. A change of one or two words always changes the digest. Of changes of more words, one
in 2^64 does not, by chance; one in 2^32 where all of them are of the words' top bits.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from reference.numbers.splitmix import splitmix64

ROW = 1 << 16
PIECE = 1 << 24  # words at a time: 128 MiB of products
_NAN = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _h(first: int, count: int) -> np.ndarray:
    return splitmix64(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)


def factors(words: int) -> np.ndarray:
    """c_0, c_1, ...: uint64 `[words]`."""
    rows = -(-words // ROW)
    table = _h(0, min(words, ROW))[None] * _h(1 << 32, rows)[:, None]
    return table.reshape(-1)[:words]


@cache
def _tables(device: torch.device, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """h of the columns `[2^16]` and of `rows` rows, int64, which multiplies as uint64 does."""
    pair = (_h(0, ROW), _h(1 << 32, rows))
    columns, first = (torch.from_numpy(part.view(np.int64).copy()).to(device) for part in pair)
    return columns, first


def _rows_of(words: int) -> int:
    """Rows of a table: a power of two, so that few tables are made."""
    return 1 << max(0, (-(-words // ROW) - 1).bit_length())


def with_one_nan(x: torch.Tensor) -> torch.Tensor:
    """The numbers as integers of their size, every NaN of 32 or 16 bits the same."""
    if x.dtype not in _NAN:
        return x.view(_INTEGERS[x.element_size()])
    integers, nan = _NAN[x.dtype]
    return x.view(integers).masked_fill(x.isnan(), nan)


def words_of(x: torch.Tensor) -> torch.Tensor:
    """The words of a tensor, int32, on its device."""
    flat = x.detach().contiguous().reshape(-1)
    data = with_one_nan(flat).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


def digest(x: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor of any shape, with real numbers: int64 `[2]` on its device, without waiting for it."""
    words = words_of(x)
    if x.device.type == "cpu" and words.numel() <= ROW:  # without a dozen calls of torch's
        return _small(words.numpy())
    found = torch.zeros(2, dtype=torch.int64, device=x.device)
    columns, rows = _tables(x.device, _rows_of(words.numel()))
    for start in range(0, words.numel(), PIECE):
        piece, row = words[start : start + PIECE], start // ROW
        whole = piece.numel() // ROW
        sums = (piece[: whole * ROW].view(whole, ROW) * columns).sum(1)
        rest = piece[whole * ROW :]
        weighted = (sums * rows[row : row + whole]).sum()
        if rest.numel():
            weighted = weighted + (rest * columns[: rest.numel()]).sum() * rows[row + whole]
        found += torch.stack((piece.sum(dtype=torch.int64), weighted))
    return found


def _small(words: np.ndarray) -> torch.Tensor:
    """The digest of at most 2^16 words."""
    row = _first_row()
    with np.errstate(over="ignore"):
        weighted = np.sum(words.astype(np.int64) * row[: len(words)], dtype=np.int64)
    return torch.tensor([int(words.sum(dtype=np.int64)), int(weighted)], dtype=torch.int64, device="cpu")


@cache
def _first_row() -> np.ndarray:
    """c_0, ... of the first 2^16 words, int64, which multiplies as uint64 does."""
    return factors(ROW).view(np.int64)


class Word(NamedTuple):
    """A 32-bit word of a tensor that differs from the digested one, and what the digest says it was."""

    position: int
    word: int


def changed_word(words: int, one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    """The position of the one word of `words` in which two tensors with these digests differ, and by how much.

    None if they differ in more words, or in none. That more words look like one is as rare as two equal digests.
    """
    change = _signed(other[0] - one[0])
    weighted = np.uint64((other[1] - one[1]) % 2**64)
    if change == 0 or abs(change) >= 1 << 32:
        return None
    with np.errstate(over="ignore"):
        found = np.flatnonzero(factors(words) * np.uint64(change % 2**64) == weighted)
    return (int(found[0]), change) if len(found) == 1 else None


def number_of(dtype: str, shape: tuple[int, ...], position: int, change: int) -> tuple[tuple[int, ...], str]:
    """Which number of a tensor has a 32-bit word at this position that has changed by so much: its index, and in words.

    Where a word holds several numbers, it is the one with the lowest bit that has changed.
    """
    size = getattr(torch, dtype).itemsize
    low = (change & -change).bit_length() - 1
    part = low // (8 * size) if size < 4 else 0
    index, rest = [], position * 4 // size + part
    for n in reversed(shape):
        index.append(rest % n)
        rest //= n
    digits = f"{abs(change) >> 8 * size * part:0{2 * min(size, 4)}X}"
    return tuple(index[::-1]), f"its bits changed by {'+-'[change < 0]}{digits}"


def locate(x: torch.Tensor, other: tuple[int, int]) -> Word | None:
    """The one word in which `x`, on the CPU, differs from the tensor that has the digest `other`; else None."""
    words, mine = words_of(x), [int(part) for part in digest(x)]
    found = changed_word(words.numel(), (mine[0], mine[1]), other)
    if found is None:
        return None
    word = int(words[found[0]]) + found[1]
    return Word(found[0], word) if -(2**31) <= word < 2**31 else None


def with_word(x: torch.Tensor, word: Word) -> torch.Tensor:
    """A copy of `x` on the CPU with one word replaced; NaNs are as in the digest."""
    words = words_of(x).clone()
    words[word.position] = word.word
    return words.view(torch.uint8)[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)


def _signed(n: int) -> int:
    """n modulo 2^64, as a signed number."""
    return (n + 2**63) % 2**64 - 2**63
