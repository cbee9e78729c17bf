"""Replay of tests/golden/linear_h200.npz: six training steps of an FP8 Linear, by `torch._scaled_mm` on an H200."""

from typing import Any

import torch

import reference as te
from optimized.commands import recordings
from optimized.commands.sides import Tally

RECORDING = "linear_h200"


def names() -> list[str]:
    """The recorded trainings."""
    return list(recordings.script("record_linear").CASES)


def compare(name: str) -> Tally:
    """Train `reference.Linear` as the recording was, and compare every word.

    Not the bias gradient: its order of summation is this project's own, so the recording's differs by an ulp.
    """
    script, words = recordings.script("record_linear"), recordings.arrays(RECORDING)
    case = script.CASES[name]
    dtype = getattr(torch, case.dtype)
    recipe = te.DelayedScaling(
        fp8_format=te.Format.HYBRID if case.hybrid else te.Format.E4M3,
        amax_history_len=case.history,
        amax_compute_algo=case.algorithm,
    )
    layer: Any = te.Linear(case.in_features, case.out_features, bias=case.bias, params_dtype=dtype, device="cpu")
    weight, bias = script.parameters(name, case)
    tally = Tally()
    with torch.no_grad():
        layer.weight.copy_(weight)
        if case.bias:
            layer.bias.copy_(bias)
    for step in range(script.STEPS):
        x, gradient = script.inputs(name, case, step)
        x.requires_grad_()
        layer.zero_grad(set_to_none=True)
        with te.autocast(recipe=recipe):
            out = layer(x)
        out.backward(gradient)
        forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
        for key, tensor in (
            ("out", out),
            ("dx", x.grad),
            ("dw", layer.weight.grad),
            ("fwd_scale", forward.scale),
            ("fwd_history", forward.amax_history),
            ("bwd_scale", backward.scale),
            ("bwd_history", backward.amax_history),
        ):
            recorded = torch.from_numpy(words[f"{name}.{step}.{key}"])
            tally.add(tensor.detach(), recorded.view(tensor.dtype))
        with torch.no_grad():
            layer.weight.copy_((layer.weight.float() - (layer.weight.grad.float() * script.LEARNING_RATE)).to(dtype))
    return tally
