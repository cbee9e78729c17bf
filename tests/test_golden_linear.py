"""`reference.Linear` against six training steps that cuBLASLt computed on an H200 (tests/golden/record_linear.py)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from golden import record_linear
from golden.record_linear import CASES, LEARNING_RATE, STEPS

import reference as te

GOLDEN = Path(__file__).parent / "golden" / "linear_h200.npz"


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as data:
        return {name: data[name] for name in data.files}


def bf16_ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance in representable numbers of the dtype."""

    def order(t: torch.Tensor) -> torch.Tensor:
        word = t.view(torch.int16).int()
        return torch.where(word < 0, -(word & 0x7FFF), word)

    return int((order(a) - order(b)).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_six_training_steps(name: str, recorded: dict[str, np.ndarray], same_bits) -> None:
    case = CASES[name]
    dtype = getattr(torch, case.dtype)
    recipe = te.DelayedScaling(
        fp8_format=te.Format.HYBRID if case.hybrid else te.Format.E4M3,
        amax_history_len=case.history,
        amax_compute_algo=case.algorithm,
    )
    layer = te.Linear(case.in_features, case.out_features, bias=case.bias, params_dtype=dtype)
    weight, bias = record_linear.parameters(name, case)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if case.bias:
            layer.bias.copy_(bias)
    for step in range(STEPS):
        x, g = record_linear.inputs(name, case, step)
        x.requires_grad_()
        layer.zero_grad(set_to_none=True)
        with te.autocast(recipe=recipe):
            out = layer(x)
        out.backward(g)
        forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
        computed = {
            "out": out, "dx": x.grad, "dw": layer.weight.grad, "fwd_scale": forward.scale,
            "fwd_history": forward.amax_history, "bwd_scale": backward.scale, "bwd_history": backward.amax_history,
        }  # fmt: skip
        for key, value in computed.items():
            expected = torch.from_numpy(recorded[f"{name}.{step}.{key}"]).view(value.dtype)
            same_bits(value.detach(), expected, f"{name}, step {step}, {key}")
        if case.bias:
            # The bias gradient's order of summation is our own; the recording is the float64 sum, rounded once.
            expected = torch.from_numpy(recorded[f"{name}.{step}.db"]).view(dtype)
            assert bf16_ulps(layer.bias.grad, expected) <= 1
        with torch.no_grad():
            layer.weight.copy_((layer.weight.float() - (layer.weight.grad.float() * LEARNING_RATE)).to(dtype))
