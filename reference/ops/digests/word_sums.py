"""`twin::word_sums`: digests of many tensors of any dtype, of sums of integers alone, 192 bits each.

A tensor's bytes, row-major, make signed little-endian words w_0, w_1, ... of 32 bits, and zeros fill up the last block
of 64 x 64. Word i stands in block b, row r, column c. With h(j) = splitmix64(j) made odd, modulo 2^64 and in any order
of addition,

    digest = (sum of w,  sum of w · h(r) · h(2^32 + b),  sum of w · h(64 + c) · h(2^33 + b))

Any way of cutting gives the same digest. Here row and column sums read each word twice and write little: two of torch's
ops for each tensor of 4 MiB or more and for each further 64 MiB of it. The others are copied side by side, 64 MiB at a
time, with three ops. In memory are then such a piece, its words as int64 (which is how torch sums them), and sums and
products of 3/32 of all bytes. The kernel reads each word once.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from reference.numbers.splitmix import splitmix64
from reference.ops.library import define

OP = "twin::word_sums"
SIDE = 64
BLOCK = SIDE * SIDE  # words
ROW, COLUMN = 1 << 32, 1 << 33
_ALONE = 1 << 20  # words of a tensor that is worth ops of its own
_BATCH = 1 << 24  # words that are copied side by side, or summed, at a time: 64 MiB


def outputs(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Check the argument; int64 `[tensors, 3]` on its device."""
    if not len(tensors):
        raise ValueError(f"{OP}: tensors is empty; one tensor or more is accepted.")
    device = tensors[0].device
    for i, x in enumerate(tensors):
        if x.layout is not torch.strided:
            raise TypeError(f"{OP}: tensors[{i}] is {x.layout}; dense tensors are accepted.")
        if x.device != device:
            raise ValueError(f"{OP}: tensors[{i}] is on {x.device}, tensors[0] on {device}; one is accepted.")
        if x.is_conj() or x.is_neg():
            raise TypeError(
                f"{OP}: tensors[{i}] is a view of conjugates or negatives; resolve_conj() and resolve_neg() give "
                f"what is accepted."
            )
    return torch.empty(len(tensors), 3, dtype=torch.int64, device=device)


def h(j: np.ndarray) -> np.ndarray:
    """The constant of number j: odd, uint64."""
    return splitmix64(j) | np.uint64(1)


def words_of(x: torch.Tensor) -> torch.Tensor:
    """The words of a tensor, int32, on its device."""
    data = x.detach().contiguous()
    data = data.as_strided((data.numel(),), (1,)).view(torch.uint8)  # a single number may have any stride
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
    # Large tensors' whole blocks come first, and then the others' and the rests, as in `_pieces_of`.
    whole = np.array([_whole(size) for size in sizes], np.int64)
    order = np.argsort(places >= whole[ids], kind="stable")
    ids, places = ids[order], places[order].astype(np.uint64)
    side = np.arange(SIDE, dtype=np.uint64)
    parts = (h(side), h(np.uint64(ROW) + places), h(np.uint64(SIDE) + side), h(np.uint64(COLUMN) + places))
    return tuple(
        torch.from_numpy(x.astype(np.int64) if x is ids else x.view(np.int64)).to(device) for x in (ids, *parts)
    )


def _whole(words: int) -> int:
    """The blocks of a tensor that are read where they are."""
    return words // BLOCK if words >= _ALONE else 0


def _pieces_of(all_words: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors' blocks `[blocks, 64, 64]`, in pieces; who takes one lets go of it before the next is made."""
    for words in all_words:
        whole = _whole(words.numel()) * BLOCK
        if whole:
            yield from words[:whole].view(-1, SIDE, SIDE).split(max(1, _BATCH // BLOCK))
    waiting, count = [], 0
    zeros = torch.zeros(BLOCK, dtype=torch.int32, device=all_words[0].device)
    for words in all_words:
        words = words[_whole(words.numel()) * BLOCK :]
        if not words.numel():
            continue
        waiting.append(words)
        if words.numel() % BLOCK:
            waiting.append(zeros[: -words.numel() % BLOCK])
        count += words.numel()
        if count >= _BATCH:
            yield torch.cat(waiting).view(-1, SIDE, SIDE)
            waiting, count = [], 0
    if waiting:
        yield torch.cat(waiting).view(-1, SIDE, SIDE)


@define(outputs)
def word_sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Digests of dense tensors: int64 `[tensors, 3]`, whose words are unsigned modulo 2^64.

    Args:
        tensors: at least one, of any dtypes, shapes, strides and addresses, on one device.
    """
    found = outputs(tensors).zero_()
    all_words = [words_of(x) for x in tensors]
    ids, row, row_block, column, column_block = _layout(tuple(w.numel() for w in all_words), found.device)
    if not len(ids):
        return found
    rows, columns = (torch.empty(len(ids), SIDE, dtype=torch.int64, device=found.device) for _ in range(2))
    at = 0
    for x in _pieces_of(all_words):
        end = at + len(x)
        torch.sum(x, 2, dtype=torch.int64, out=rows[at:end])
        torch.sum(x, 1, dtype=torch.int64, out=columns[at:end])
        at = end
        del x
    parts = (rows.sum(1), (rows * row).sum(1) * row_block, (columns * column).sum(1) * column_block)
    return found.index_add_(0, ids, torch.stack(parts, 1))
