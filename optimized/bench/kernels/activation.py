"""The activations, compared with a device copy in the same run as `copies` explains (docs/results/activation.json)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized.bench import Payload, Progress, each, silent
from optimized.bench.memory_bound import DTYPES, Copies, in_turn, of_copy
from optimized.bench.table import Table
from reference.ops.activations.activation import RECORDED as KINDS
from reference.ops.activations.activation import width

NAME = "activation"
WHAT = "activations, against a device copy"
KERNELS = ("activation", "activation_cast_transpose", "dbias")
# Dtype, rows and columns of y. x has as many columns, or twice as many for the gated kinds.
CASES = (("bf16", 8192, 16384), ("bf16", 8192, 4096), ("fp32", 8192, 4096))

twin = torch.ops.twin


def bytes_moved(op: str, rows: int, n: int, m: int, size: int) -> int:
    """The fewest bytes that an op must move, for x of n columns and y of m."""
    a_row = {
        "activation": (n + m) * size,
        "activation_backward": (m + 2 * n) * size,
        "activation_cast_transpose": n * size + 2 * m,
        "activation_backward_cast_transpose_dbias": (m + n) * size + 2 * n,
    }
    return rows * a_row[op]


def variants(
    xs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], kind: str
) -> dict[str, Callable[[int], object]]:
    """One call per op; call i takes its inputs from `xs` and `grads`, in turn."""
    state = (torch.full((1,), 2.0, device="cuda"), torch.zeros(16, 1, device="cuda"), 0)
    forward, backward = (*state, torch.float8_e4m3fn), (*state, torch.float8_e5m2)
    x, grad, fused = in_turn(xs), in_turn(grads), "activation_backward_cast_transpose_dbias"
    return {
        "activation": lambda i: twin.activation(x(i), kind),
        "activation_backward": lambda i: twin.activation_backward(grad(i), x(i), kind),
        "activation_cast_transpose": lambda i: twin.activation_cast_transpose(x(i), kind, *forward),
        fused: lambda i: twin.activation_backward_cast_transpose_dbias(grad(i), x(i), kind, *backward),
    }


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 11) -> Payload:
    copies = Copies(4, repeats)
    rows: list[dict[str, Any]] = []
    for (name, tokens, m), kind in each([(case, kind) for case in CASES for kind in KINDS], progress):
        dtype, n = DTYPES[name], m * (m // width(kind, m))
        count = copies.inputs(tokens * m * dtype.itemsize)
        xs = [torch.empty(tokens, n, dtype=dtype, device="cuda").normal_() for _ in range(count)]
        grads = [torch.empty(tokens, m, dtype=dtype, device="cuda").normal_() for _ in range(count)]
        ops = variants(xs, grads, kind)
        moved = {op: bytes_moved(op, tokens, n, m, dtype.itemsize) for op in ops}
        rows += copies.rows({"kind": kind, "dtype": name, "rows": tokens, "x_columns": n}, ops, moved)
    return copies.result(rows, KERNELS)


def tables(payload: Payload) -> list[Table]:
    """Activations against the device copy, every kind in its column."""
    return [of_copy(payload, "Activations", "kind", str)]
