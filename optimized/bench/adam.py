"""A step of `FusedAdam` over the weights of a layer against a copy and PyTorch's fused AdamW (docs/results/adam.json).

Bound by memory: what must move, gradients, weights and moments in and all but the gradients out, over the time, beside
`Tensor.copy_` of 512 MiB in the same run. FP8 weights are written by `multi_cast_transpose` from their masters.
"""

from collections.abc import Callable
from typing import Any

import torch

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, silent
from optimized.bench.copies import COPY_BYTES, large_copy
from optimized.bench.table import Table, percent, table

NAME = "adam"
WHAT = "the optimizer, against PyTorch's fused AdamW"
KERNELS = ("adam", "multi_cast_transpose")
HIDDEN = 4096
_WEIGHTS = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
SHAPES = (*_WEIGHTS, *((rows,) for rows, _ in _WEIGHTS))
# Bytes a number: gradient, weight, two moments, and the master or FP8 codes, each read and written but the gradient.
_MOMENTS = 2 * 2 * 4


def _parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype)) for shape in SHAPES]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def _fp8() -> list[Any]:
    """Weights in FP8 with their transposed codes, and biases, as a layer in training has them."""
    found: list[Any] = []
    for rows, columns in _WEIGHTS:
        with te.quantized_model_init():
            linear = te.Linear(columns, rows, params_dtype=torch.bfloat16, init_method=torch.nn.init.normal_)
        weight: Any = linear.weight
        weight.operand(True)
        found += [weight, linear.bias]
    for parameter in found:
        parameter.grad = torch.randn(parameter.shape, device="cuda", dtype=torch.bfloat16)
    return found


def contestants() -> dict[str, tuple[torch.optim.Optimizer, int]]:
    """An optimizer with its gradients, and the bytes a number that it must move."""
    adam = te.optimizers.FusedAdam
    fp32 = _MOMENTS + 4 + 2 * 4
    return {
        "FusedAdam, fp32": (adam(_parameters(torch.float32)), fp32),
        "torch.optim.AdamW(fused=True), fp32": (torch.optim.AdamW(_parameters(torch.float32), fused=True), fp32),
        "FusedAdam, bf16": (adam(_parameters(torch.bfloat16)), _MOMENTS + 2 + 2 * 2),
        "FusedAdam, bf16, fp32 masters": (
            adam(_parameters(torch.bfloat16), master_weights=True),
            _MOMENTS + 2 + 2 * 4 + 2,
        ),
        # The masters are read once more to be cast; codes and transposed codes are written.
        "FusedAdam, FP8 weights, fp32 masters": (adam(_fp8(), master_weights=True), _MOMENTS + 2 + 2 * 4 + 4 + 2),
    }


def run(progress: Progress = silent, repeats: int = 15) -> Payload:
    """Measure."""
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES)
    entrants = contestants()
    progress(0.3)
    calls: dict[str, Callable[[], object]] = {name: optimizer.step for name, (optimizer, _) in entrants.items()}
    samples = measure.interleave({**calls, "copy": large_copy()}, repeats, 3, measure.Flush())
    times = {name: measure.summary(values) for name, values in samples.items()}
    ceiling = 2 * COPY_BYTES / times["copy"]["median"]
    progress(1.0)
    return {
        "what": "one optimizer step over the weights and biases of a layer, hidden 4096",
        "numbers": numbers,
        "repeats": repeats,
        "rows": [
            {
                "optimizer": name,
                "bytes_a_number": size,
                "ms": times[name],
                "of_copy": numbers * size / times[name]["median"] / ceiling,
            }
            for name, (_, size) in entrants.items()
        ],
        "provenance": measure.provenance(KERNELS),
    }


def tables(payload: Payload) -> list[Table]:
    """One optimizer step, as a share of the copy."""
    rows = [
        (row["optimizer"], str(row["bytes_a_number"]), f"{row['ms']['median']:.2f}", percent(row["of_copy"]))
        for row in payload["rows"]
    ]
    how = (
        f"One step over the {payload['numbers'] / 1e6:.0f} million parameters of a GPT layer; the last column is its "
        "bandwidth as a share of what `Tensor.copy_` of 512 MiB reaches in the same run."
    )
    return [table(payload, "Optimizers", ("optimizer", "bytes a parameter", "ms", "of a copy"), rows, how)]
