"""Six training steps of an FP8 Linear that PyTorch and cuBLASLt computed on an H200, and the same by `reference`.

tests/golden/record_linear.py recorded them. The inputs are not stored: `words` makes them again from the raw stream of
PCG64, which NumPy promises to keep.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import reference as te
from optimized.compare import Tally
from optimized.recordings.reader import arrays

RECORDING = "linear_h200"
STEPS = 6
LEARNING_RATE = 0.125
GROWTH = (1.0, 3.0, 0.5, 40.0, 0.125, 1.0)  # factors of the inputs at each step, so that scales change


class Case(NamedTuple):
    """One recorded training run."""

    tokens: int
    in_features: int
    out_features: int
    dtype: str
    hybrid: bool
    algorithm: str
    history: int
    bias: bool


CASES = {
    "bf16_hybrid_max": Case(48, 64, 96, "bfloat16", True, "max", 4, True),
    "bf16_hybrid_recent": Case(16, 208, 48, "bfloat16", True, "most_recent", 16, False),
    "fp16_e4m3_max": Case(80, 48, 64, "float16", False, "max", 3, True),
    "fp32_hybrid_max": Case(32, 96, 32, "float32", True, "max", 1024, False),
    "bf16_long_k": Case(16, 640, 16, "bfloat16", True, "max", 8, True),
}


def words(seed: int, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Bell-shaped fp32 numbers, exactly reproducible: (sum of the word's 8 bytes − 1020) / 256 · scale."""
    count = int(np.prod(shape))
    raw = np.random.PCG64(seed).random_raw(count)
    total = raw.view(np.uint8).reshape(count, 8).sum(1, dtype=np.int64)
    values = (total - 1020).astype(np.float32) * np.float32(scale / 256)
    return torch.from_numpy(values.reshape(shape))


def inputs(name: str, case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and g = dL/dy of one step."""
    dtype = getattr(torch, case.dtype)
    seed = 1000 * list(CASES).index(name) + 10 * step
    x = words(seed + 1, (case.tokens, case.in_features), GROWTH[step])
    g = words(seed + 2, (case.tokens, case.out_features), 1e-3 * GROWTH[step])
    return x.to(dtype), g.to(dtype)


def parameters(name: str, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias before the first step, in the activation dtype."""
    dtype = getattr(torch, case.dtype)
    seed = 1000 * list(CASES).index(name)
    weight = words(seed + 900, (case.out_features, case.in_features), 0.05)
    return weight.to(dtype), words(seed + 901, (case.out_features,), 0.1).to(dtype)


def replay(name: str) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Train `reference.Linear` as recorded; for each step and by name, its result and the recorded one.

    `db`, the gradient of the bias, may differ by an ulp: the order of its sum is this project's own.
    """
    case, recorded = CASES[name], arrays(RECORDING)
    dtype = getattr(torch, case.dtype)
    recipe = te.DelayedScaling(
        fp8_format=te.Format.HYBRID if case.hybrid else te.Format.E4M3,
        amax_history_len=case.history,
        amax_compute_algo=case.algorithm,
    )
    layer: Any = te.Linear(case.in_features, case.out_features, bias=case.bias, params_dtype=dtype, device="cpu")
    weight, bias = parameters(name, case)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if case.bias:
            layer.bias.copy_(bias)
    for step in range(STEPS):
        x, gradient = inputs(name, case, step)
        x.requires_grad_()
        layer.zero_grad(set_to_none=True)
        with te.autocast(recipe=recipe):
            out = layer(x)
        out.backward(gradient)
        forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
        given = {
            "out": out.detach(),
            "dx": x.grad,
            "dw": layer.weight.grad,
            "fwd_scale": forward.scale,
            "fwd_history": forward.amax_history,
            "bwd_scale": backward.scale,
            "bwd_history": backward.amax_history,
            **({"db": layer.bias.grad} if case.bias else {}),
        }
        yield {
            key: (ours.clone(), torch.from_numpy(recorded[f"{name}.{step}.{key}"]).view(ours.dtype))
            for key, ours in given.items()
            if ours is not None
        }
        with torch.no_grad():
            layer.weight.copy_((layer.weight.float() - (layer.weight.grad.float() * LEARNING_RATE)).to(dtype))


def compare(name: str) -> Tally:
    """Compare every word of `replay`, except the gradient of the bias."""
    tally = Tally()
    for step in replay(name):
        for key, (ours, recorded) in step.items():
            if key != "db":
                tally.add(ours, recorded)
    return tally
