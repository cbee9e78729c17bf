"""Embedding and its gradient, against PyTorch's, as `copies` explains (docs/results/embedding.json).

Forward reads and writes the rows that were asked for. Backward reads their gradients and writes the whole table's.
Words come as in a text: the i-th most common one about 1 / i as often as the first.
"""

from collections.abc import Callable
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized.bench import Payload, Progress, each, silent
from optimized.bench.memory_bound import Copies, of_copy
from optimized.bench.table import Table

NAME = "embedding"
WHAT = "embedding, against PyTorch's and a copy"
KERNELS = ("embedding",)
CASES = ((8192, 50304, 2048), (65536, 50304, 2048), (8192, 128256, 4096))  # tokens, rows and width of the table

twin, aten = torch.ops.twin, torch.ops.aten


def words(tokens: int, rows: int) -> torch.Tensor:
    """Numbers of rows, of which row r comes about 1 / (r + 1) times as often as the first."""
    return torch.pow(float(rows), torch.rand(tokens, device="cuda")).long().clamp(1, rows) - 1


def variants(weight: torch.Tensor, grad: torch.Tensor, ids: torch.Tensor) -> dict[str, Callable[[int], object]]:
    """One call per op."""
    rows = weight.shape[0]
    return {
        "forward": lambda _: twin.embedding(weight, ids),
        "forward, PyTorch": lambda _: torch.nn.functional.embedding(ids, weight),
        "backward": lambda _: twin.embedding_backward(grad, ids, rows, -1),
        "backward, PyTorch": lambda _: aten.embedding_dense_backward(grad, ids, rows, -1, False),
    }


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 11) -> Payload:
    copies = Copies(4, repeats)
    found: list[dict[str, Any]] = []
    for tokens, rows, width in each(CASES, progress):
        weight, grad = (torch.empty(n, width, dtype=torch.bfloat16, device="cuda").normal_() for n in (rows, tokens))
        ops = variants(weight, grad, words(tokens, rows))
        moved = {op: 2 * width * (tokens + (tokens if op.startswith("forward") else rows)) for op in ops}
        case = f"{tokens} tokens, {rows:,} rows of {width}"
        found += copies.rows({"case": case}, ops, moved)
    return copies.result(found, KERNELS)


def tables(payload: Payload) -> list[Table]:
    """The embedding against the device copy."""
    return [of_copy(payload, "Embedding, bf16", "case", str)]
