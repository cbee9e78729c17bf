"""`twin::embedding` and `twin::embedding_backward`: rows of a table by their numbers, and the table's gradient.

    out[i] = weight[ids[i]]                                         copies
    dweight[v] = round(Σ over i with ids[i] = v of grad[i])         fp32, one rounding to grad's dtype

The order of a row's sum depends on its own terms alone. They come in order of i, in chunks of 64, the last one
shorter. A chunk is its first term plus the others in order; the sum is the first chunk plus the others in order. A row
without terms is +0, and so is the row `padding_idx`.

A number outside the table is an error here. On a GPU, where looking would cost a wait, it gives a row of NaN, and
backward leaves it out.
"""

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_input
from reference.ops.library import define

CHUNK = 64


def check_ids(op: str, ids: torch.Tensor, device: torch.device) -> None:
    """Refuse numbers that are not int64 `[count]`, contiguous, on the device."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or ids.device != device or not ids.is_contiguous():
        raise ValueError(
            f"{op}: ids must be contiguous torch.int64 [count] on {device}; got {ids.dtype} {list(ids.shape)} on "
            f"{ids.device}, strides {ids.stride()}."
        )


def check_range(op: str, ids: torch.Tensor, rows: int) -> None:
    """Refuse a number outside the table. It looks at the numbers, so only the CPU calls it."""
    wrong = (ids < 0) | (ids >= rows)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0, 0])
        raise IndexError(f"{op}: ids[{at}] is {int(ids[at])}; 0 to {rows - 1}, the rows of the table, are accepted.")


def outputs(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    check_input("twin::embedding", "weight", weight)
    check_ids("twin::embedding", ids, weight.device)
    return weight.new_empty((ids.shape[0], weight.shape[1]))


def backward_outputs(grad: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int) -> torch.Tensor:
    op = "twin::embedding_backward"
    check_input(op, "grad", grad)
    check_ids(op, ids, grad.device)
    if ids.shape[0] != grad.shape[0]:
        raise ValueError(f"{op}: grad has {grad.shape[0]} rows and ids {ids.shape[0]}; one number a row is accepted.")
    if rows < 0:
        raise ValueError(f"{op}: rows must not be negative; got {rows}.")
    if not -1 <= padding_idx < rows:
        raise ValueError(f"{op}: padding_idx must be from -1 (none) to {rows - 1}; got {padding_idx}.")
    return grad.new_empty((rows, grad.shape[1]))


@define(outputs)
def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows `ids` of `weight`.

    Args:
        weight: `[rows, width]`, contiguous; fp32, bf16 or fp16.
        ids: int64 `[count]`.

    Returns:
        `[count, width]` of weight's dtype.

    Raises:
        IndexError: a number is outside the table.
    """
    out = outputs(weight, ids)
    check_range("twin::embedding", ids, weight.shape[0])
    return out.copy_(weight[ids])


@define(backward_outputs)
def embedding_backward(grad: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int) -> torch.Tensor:
    """The gradient `[rows, width]` of the table, of grad's dtype.

    Args:
        grad: of the output, `[count, width]`, contiguous; fp32, bf16 or fp16.
        ids: int64 `[count]`, the forward's.
        rows: of the table.
        padding_idx: a row that gets no gradient; -1 is none.
    """
    out = backward_outputs(grad, ids, rows, padding_idx)
    check_range("twin::embedding_backward", ids, rows)
    return out.copy_(torch.from_numpy(_sums(formats.widen(grad).numpy(), ids.numpy(), rows, padding_idx)))


def _sums(grad: np.ndarray, ids: np.ndarray, rows: int, padding_idx: int) -> np.ndarray:
    """The sums before their rounding, all rows' i-th terms at a time: within chunks, then chunk after chunk."""
    total = np.zeros((rows, grad.shape[1]), np.float32)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    rank = np.arange(len(ids)) - np.searchsorted(ids, ids)  # of a term among its row's
    heads = np.flatnonzero(rank % CHUNK == 0)
    chunks = np.empty((len(heads), grad.shape[1]), np.float32)
    chunk_of = np.cumsum(rank % CHUNK == 0) - 1
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(min(CHUNK, len(ids))):
            at = np.flatnonzero(rank % CHUNK == i)
            terms, to = grad[order[at]], chunk_of[at]
            chunks[to] = terms if i == 0 else chunks[to] + terms
        number = rank[heads] // CHUNK  # of a chunk among its row's
        for i in range(number.max(initial=-1) + 1):
            at = np.flatnonzero(number == i)
            to = ids[heads[at]]
            total[to] = chunks[at] if i == 0 else total[to] + chunks[at]
    if padding_idx >= 0:
        total[padding_idx] = 0
    return total
