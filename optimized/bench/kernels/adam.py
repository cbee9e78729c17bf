"""Optimizer steps and clipping over the weights of a layer, against PyTorch's fused ones (docs/results/adam.json).

Each is bound by memory, so its bandwidth is compared with `Tensor.copy_` of 512 MiB in the same run. Gradients, weights
and state must be read; all but the gradients must be written. What is kept with a scale is read twice, and
the gradients with it: a tensor's scale is known once all its numbers are. `multi_cast_transpose` writes FP8 weights
from their masters. Clipping reads gradients for their norm, and then once more to scale them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, result, silent
from optimized.bench.memory_bound import COPY_BYTES, large_copy
from optimized.bench.table import Table, percent, table

NAME = "adam"
WHAT = "optimizers, clipping, against PyTorch's"
KERNELS = (
    *("adafactor", "adam", "adam_control", "adam_states", "clip_grads", "grad_norm"),
    *("multi_cast_transpose", "sgd"),
)
HIDDEN = 4096
_WEIGHTS = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
SHAPES = (*_WEIGHTS, *((rows,) for rows, _ in _WEIGHTS))
_MOMENTS = 16  # bytes for each number: two moments in fp32 are read and written
_MASTERED = 2 + 2 * 4 + 2  # of a bf16 gradient, an fp32 master and its copy
_FP8_STATE = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
_BF16_STATE = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
_FP16_STATE = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}


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


def contestants() -> dict[str, tuple[Callable[[], object], int]]:
    """Each optimizer's step on its own parameters and gradients, and the bytes that it must move for each number."""
    adam = te.optimizers.FusedAdam
    fp32 = _MOMENTS + 4 + 2 * 4

    def masters(**options: Any) -> Callable[[], object]:
        return adam(_parameters(torch.bfloat16), master_weights=True, **options).step

    return {
        "FusedAdam, fp32": (adam(_parameters(torch.float32)).step, fp32),
        "torch.optim.AdamW(fused=True), fp32": (torch.optim.AdamW(_parameters(torch.float32), fused=True).step, fp32),
        "FusedAdam, bf16": (adam(_parameters(torch.bfloat16)).step, _MOMENTS + 2 + 2 * 2),
        "FusedAdam, bf16, fp32 masters": (masters(), _MOMENTS + _MASTERED),
        # The masters are read once more for the cast, which writes codes and transposed codes.
        "FusedAdam, FP8 weights, fp32 masters": (adam(_fp8(), master_weights=True).step, _MOMENTS + 2 + 2 * 4 + 4 + 2),
        **_states(masters),
    }


def _states(masters: Callable[..., Callable[[], object]]) -> dict[str, tuple[Callable[[], object], int]]:
    """bf16 parameters with masters, by what their state is kept in."""
    scaled = 2 + 1 + 1  # gradients and codes once more
    return {
        "… capturable": (masters(capturable=True), _MOMENTS + _MASTERED),
        "… remainders as masters": (masters(store_param_remainders=True), _MOMENTS + 2 + 2 * 4),
        "… moments in bf16": (masters(**_BF16_STATE), 2 * 2 * 2 + _MASTERED),
        "… moments in fp16": (masters(**_FP16_STATE), 2 * 2 * 2 + _MASTERED + 2 + 2 + 2),
        "… moments in FP8": (masters(**_FP8_STATE), 2 * 2 * 1 + _MASTERED + scaled),
        "… moments in FP8, masters in fp16": (
            masters(master_weight_dtype=torch.float16, **_FP8_STATE),
            2 * 2 * 1 + 2 + 2 * 2 + 2 + scaled + 2,
        ),
    }


def others() -> dict[str, tuple[Callable[[], object], int]]:
    """SGD, Adafactor and clipping, with the bytes that they must move for each number."""
    momentum: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    ours, theirs = te.optimizers.FusedSGD, torch.optim.SGD
    # A norm that is never reached keeps the coefficient below 1.
    clip, torchs = (
        partial(function, _parameters(torch.bfloat16), 1e-3)
        for function in (te.optimizers.clip_grad_norm_, torch.nn.utils.clip_grad_norm_)
    )
    return {
        "FusedSGD with momentum, fp32": (ours(_parameters(torch.float32), **momentum).step, 4 + 8 + 8),
        "torch.optim.SGD(fused=True), fp32": (
            theirs(_parameters(torch.float32), fused=True, **momentum).step,
            4 + 8 + 8,
        ),
        "FusedSGD with momentum, bf16": (ours(_parameters(torch.bfloat16), **momentum).step, 2 + 4 + 4),
        # Gradients are read for their means, for the update's norm, and for the step; parameters for their norm first.
        "Adafactor, fp32": (te.optimizers.Adafactor(_parameters(torch.float32)).step, 3 * 4 + 3 * 4),
        "torch.optim.Adafactor, fp32": (torch.optim.Adafactor(_parameters(torch.float32)).step, 3 * 4 + 3 * 4),
        "clip_grad_norm_, bf16": (clip, 2 + 4),
        "torch.nn.utils.clip_grad_norm_, bf16": (torchs, 2 + 4),
    }


def run(progress: Progress = silent, repeats: int = 15) -> Payload:
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES)
    entrants = {**contestants(), **others()}
    progress(0.3)
    steps = {name: step for name, (step, _) in entrants.items()}
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
