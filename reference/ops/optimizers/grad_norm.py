"""`twin::grad_norm`: the norm of all numbers of a list of gradients, as one fp32 number.

`kind` "l2" is sqrt(Σ x²). Squares and sums are float64, in which the square of an fp32 number is exact: nothing
overflows, and only the additions round. Their order depends on the shapes alone:

    chunk    32,768 neighbours of a gradient (row-major), the last one filled up with +0.0
    column   of a chunk: numbers 2,048 apart; column c = Σ_i x[2048 i + c]², i = 0 … 15 in order, from +0.0
    tree     of the 2,048 columns, in halves of neighbours: 8 at a time (c += c + 4, + 2, + 1), then those sums 32 at a
             time (+ 16 … + 1), then those 8 (+ 4, + 2, + 1)
    chunks   k = 0, 1, … in the order of the list; lane l = Σ_i chunk[1024 i + l], i in order, from +0.0; of the 1,024
             lanes the tree 32 at a time, then of those 32

    norm = fp32(sqrt(sum))                    IEEE square root in float64, then one rounding

`kind` "max" is max |x| in fp32, which is exact and needs no order; NaN wins. No numbers give +0.

The gradients may mix fp32, bf16 and fp16. The definition for "l2" has no counterpart to quote: `torch.nn.utils.
get_total_norm` adds in an order that depends on the machine, and rounds each gradient's norm to its dtype.
"""

from collections.abc import Sequence

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.library import define

OP = "twin::grad_norm"
KINDS = ("l2", "max")
CHUNK, COLUMNS, LANES = 32768, 2048, 1024
_SLAB = 64  # chunks that are widened to float64 at once


def check_grads(op: str, grads: Sequence[torch.Tensor]) -> None:
    """Refuse gradients that are not contiguous fp32, bf16 or fp16 on one device."""
    for i, grad in enumerate(grads):
        if grad.dtype not in formats.WIDE_DTYPES:
            raise TypeError(f"{op}: grads[{i}] is {grad.dtype}; float32, bfloat16 and float16 are accepted.")
        if not grad.is_contiguous():
            raise ValueError(f"{op}: grads[{i}] has strides {grad.stride()}; contiguous gradients are accepted.")
        if grad.device != grads[0].device:
            raise ValueError(f"{op}: grads[{i}] is on {grad.device}, grads[0] on {grads[0].device}; one is accepted.")


def outputs(grads: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    """Check the arguments; an fp32 number `[]` on the gradients' device."""
    if kind not in KINDS:
        raise ValueError(f"{OP}: kind={kind!r}; one of {KINDS} is accepted.")
    if not len(grads):
        raise ValueError(f"{OP}: grads is empty; one gradient or more is accepted.")
    check_grads(OP, grads)
    return torch.empty((), dtype=torch.float32, device=grads[0].device)


def halves(x: np.ndarray, count: int) -> np.ndarray:
    """Sums of `count` neighbours of the last axis in halves: the first half plus the second, until one is left."""
    x = x.reshape(*x.shape[:-1], -1, count)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def chunk_sums(numbers: np.ndarray) -> np.ndarray:
    """Sums of squares of the chunks of flat fp32 numbers, float64."""
    found = []
    for start in range(0, numbers.size, _SLAB * CHUNK):
        part = numbers[start : start + _SLAB * CHUNK].astype(np.float64)
        rows = np.zeros(-(-part.size // CHUNK) * CHUNK)
        rows[: part.size] = part * part
        columns = np.zeros((rows.size // CHUNK, COLUMNS))
        for i in range(CHUNK // COLUMNS):
            columns = columns + rows.reshape(-1, CHUNK // COLUMNS, COLUMNS)[:, i]
        found.append(halves(halves(halves(columns, 8), 32), 8)[:, 0])
    return np.concatenate(found) if found else np.zeros(0)


def total(sums: np.ndarray) -> np.float64:
    """The sum of the chunks' sums."""
    padded = np.zeros((-(-sums.size // LANES), LANES))
    padded.reshape(-1)[: sums.size] = sums
    lanes = np.zeros(LANES)
    for row in padded:
        lanes = lanes + row
    return np.float64(halves(halves(lanes, 32), 32)[0])


@define(outputs)
def grad_norm(grads: list[torch.Tensor], kind: str) -> torch.Tensor:
    """The norm of all numbers of `grads`, fp32 `[]`.

    Args:
        grads: contiguous fp32, bf16 or fp16 tensors of any shapes on one device.
        kind: "l2" or "max".
    """
    out = outputs(grads, kind)
    numbers = [formats.widen(grad.detach()).reshape(-1).numpy() for grad in grads]
    with np.errstate(all="ignore"):
        if kind == "l2":
            found = np.float32(np.sqrt(total(np.concatenate([chunk_sums(x) for x in numbers]))))
        else:
            # The words of numbers without sign have the order of the numbers, with NaN after infinity.
            words = [np.max(np.abs(x).view(np.uint32), initial=0) for x in numbers]
            found = np.max(np.asarray(words, np.uint32)).view(np.float32)
    return out.fill_(float(found)) if not np.isnan(found) else out.fill_(float("nan"))
