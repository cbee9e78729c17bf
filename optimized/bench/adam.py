"""A step of `FusedAdam` over the weights of a layer, against PyTorch's fused AdamW (docs/results/adam.json).

The step is bound by memory, so its bandwidth is compared with `Tensor.copy_` of 512 MiB in the same run. Gradients,
weights and moments must be read; all but the gradients must be written. `multi_cast_transpose` writes FP8 weights from
their masters.
"""

from collections.abc import Callable
from typing import Any

import torch

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, result, silent
from optimized.bench.copies import COPY_BYTES, large_copy
from optimized.bench.table import Table, percent, table

NAME = "adam"
WHAT = "the optimizer, against PyTorch's fused AdamW"
KERNELS = ("adam", "multi_cast_transpose")
HIDDEN = 4096
_WEIGHTS = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
SHAPES = (*_WEIGHTS, *((rows,) for rows, _ in _WEIGHTS))
_MOMENTS = 2 * 2 * 4  # bytes for each number: two moments in fp32 are read and written


def _parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype)) for shape in SHAPES]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def _fp8() -> list[Any]:
    """Weights in FP8 with their transposed codes, and biases, as a layer has them in training."""
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
    """Each optimizer with its parameters and gradients, and the bytes that it must move for each number."""
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
        # The masters are read once more for the cast, which writes codes and transposed codes.
        "FusedAdam, FP8 weights, fp32 masters": (adam(_fp8(), master_weights=True), _MOMENTS + 2 + 2 * 4 + 4 + 2),
    }


def run(progress: Progress = silent, repeats: int = 15) -> Payload:
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES)
    entrants = contestants()
    progress(0.3)
    steps: dict[str, Callable[[], object]] = {name: optimizer.step for name, (optimizer, _) in entrants.items()}
    samples = measure.interleave({**steps, "copy": large_copy()}, repeats, 3, measure.Flush())
    times = {name: measure.summary(values) for name, values in samples.items()}
    ceiling = 2 * COPY_BYTES / times["copy"]["median"]
    progress(1.0)
    rows = []
    for name, (_, size) in entrants.items():
        of_copy = numbers * size / times[name]["median"] / ceiling
        rows.append({"optimizer": name, "bytes_a_number": size, "ms": times[name], "of_copy": of_copy})
    what = "one optimizer step over the weights and biases of a layer, hidden 4096"
    return result(what, KERNELS, numbers=numbers, repeats=repeats, rows=rows)


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
