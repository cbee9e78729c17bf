"""The norms, compared with a device copy in the same run as `copies` explains (docs/results/norm.json)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized.bench import Payload, Progress, each, silent
from optimized.bench.memory_bound import Copies, in_turn, of_copy
from optimized.bench.table import Table

NAME = "norm"
WHAT = "norms, against a device copy"
KERNELS = ("norm", "norm_cast_transpose", "norm_backward", "norm_total")
SHAPES = ((8192, 4096), (8192, 1024), (8192, 2048), (8192, 5120), (8192, 8192), (8192, 12288))
KINDS = ("layernorm", "rmsnorm")

twin = torch.ops.twin

# Bytes that are read and written for each bf16 element.
BYTES = {"norm": 4, "norm_cast_transpose": 4, "norm_backward": 6, "norm_backward + residual": 8}


def variants(inputs: Sequence[torch.Tensor], kind: str) -> dict[str, Callable[[int], object]]:
    """One call per op; call i takes its inputs from `inputs`, in turn."""
    hidden = inputs[0].shape[1]
    weight = torch.rand(hidden, device="cuda").to(torch.bfloat16)
    bias = weight.clone() if kind == "layernorm" else None
    scale, history = torch.ones(1, device="cuda"), torch.zeros(16, 1, device="cuda")
    forward, scaling = (weight, bias, 1e-5, False, kind), (scale, history, 0, torch.float8_e4m3fn)
    _, mean, rstd = twin.norm(inputs[0], *forward, torch.bfloat16)
    x, backward = in_turn(inputs), (weight, mean, rstd, False, kind)
    return {
        "norm": lambda i: twin.norm(x(i), *forward, torch.bfloat16),
        "norm_cast_transpose": lambda i: twin.norm_cast_transpose(x(i), *forward, *scaling),
        "norm_backward": lambda i: twin.norm_backward(x(i + 1), x(i), *backward, None),
        "norm_backward + residual": lambda i: twin.norm_backward(x(i + 1), x(i), *backward, x(i + 2)),
    }


@torch.no_grad()
def run(progress: Progress = silent, repeats: int = 15) -> Payload:
    copies = Copies(8, repeats)
    rows: list[dict[str, Any]] = []
    for (tokens, hidden), kind in each([(shape, kind) for shape in SHAPES for kind in KINDS], progress):
        count = copies.inputs(tokens * hidden * 2, least=3)
        inputs = [torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16) for _ in range(count)]
        moved = {op: size * tokens * hidden for op, size in BYTES.items()}
        rows += copies.rows({"kind": kind, "rows": tokens, "hidden": hidden}, variants(inputs, kind), moved)
    return copies.result(rows, KERNELS)


def tables(payload: Payload) -> list[Table]:
    """Norms against the device copy."""
    names = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    return [of_copy(payload, "Norms, bf16", "kind", names.__getitem__)]
