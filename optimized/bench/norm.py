"""The norms against the device copy of the same run (docs/results/norm.json); how: `copies`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import optimized.ops  # noqa: F401  (registers the ops)
from optimized import measure
from optimized.bench.copies import Copies, of_copy
from optimized.bench.table import Table

NAME = "norm"
WHAT = "LayerNorm and RMSNorm, forward, to FP8 and backward, against a copy"
KERNELS = (
    "norm",
    "norm_any",
    "norm_cast_transpose",
    "norm_cast_transpose_long",
    "norm_backward",
    "norm_backward_long",
    "norm_backward_any",
    "norm_total",
)
SHAPES = ((8192, 4096), (8192, 1024), (8192, 2048), (8192, 5120), (8192, 8192), (8192, 12288))
KINDS = ("layernorm", "rmsnorm")

_CALLS = 8

twin = torch.ops.twin

# Bytes an element: read and written, bf16.
BYTES = {"norm": 4, "norm_cast_transpose": 4, "norm_backward": 6, "norm_backward + residual": 8}


def variants(inputs: Sequence[torch.Tensor], kind: str) -> dict[str, Callable[[int], object]]:
    """One call per op; call i takes its inputs from `inputs`, in turn."""
    hidden = inputs[0].shape[1]
    weight = torch.rand(hidden, device="cuda").to(torch.bfloat16)
    bias = weight.clone() if kind == "layernorm" else None
    scale, history = torch.ones(1, device="cuda"), torch.zeros(16, 1, device="cuda")
    _, mean, rstd = twin.norm(inputs[0], weight, bias, 1e-5, False, kind, torch.bfloat16)

    def pick(i: int) -> torch.Tensor:
        return inputs[i % len(inputs)]

    def backward(i: int, residual: torch.Tensor | None) -> object:
        return twin.norm_backward(pick(i + 1), pick(i), weight, mean, rstd, False, kind, residual)

    return {
        "norm": lambda i: twin.norm(pick(i), weight, bias, 1e-5, False, kind, torch.bfloat16),
        "norm_cast_transpose": lambda i: twin.norm_cast_transpose(
            pick(i), weight, bias, 1e-5, False, kind, scale, history, 0, torch.float8_e4m3fn
        ),
        "norm_backward": lambda i: backward(i, None),
        "norm_backward + residual": lambda i: backward(i, pick(i + 2)),
    }


def run(progress: Callable[[float], None] | None = None, repeats: int = 15) -> dict[str, Any]:
    """Measure; `progress` is told the fraction done."""
    copies = Copies(_CALLS, repeats)
    rows: list[dict[str, Any]] = []
    cases = [(shape, kind) for shape in SHAPES for kind in KINDS]
    with torch.no_grad():
        for done, ((tokens, hidden), kind) in enumerate(cases):
            count = copies.inputs(tokens * hidden * 2, least=3)
            inputs = [torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16) for _ in range(count)]
            moved = {op: size * tokens * hidden for op, size in BYTES.items()}
            found = copies.beside(variants(inputs, kind), moved)
            case = {"kind": kind, "rows": tokens, "hidden": hidden}
            rows += [{"op": op, **case, **result} for op, result in found.items()]
            if progress is not None:
                progress((done + 1) / len(cases))
    return {
        "what": "bytes that must move over time, bf16, against Tensor.copy_ of 512 MiB and of as many bytes",
        "calls_per_sample": _CALLS,
        "repeats": repeats,
        "rows": rows,
        "provenance": measure.provenance(KERNELS),
    }


def tables(payload: dict[str, Any]) -> list[Table]:
    """Norms against the device copy."""
    names = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    return [of_copy(payload, "Norms, bf16, share of a copy", "kind", lambda kind: names[kind])]
