"""What a step played from tapes costs its host: it makes few calls of Python, so that each check in it counts."""

import cProfile
import pstats
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from shared.dry_gpu import DryGpu

import optimized as te
from optimized.tapes.tape import Tape

ROOT = Path(__file__).parents[2]
STEPS = 10


@pytest.mark.parametrize(
    ("fp8", "anew", "most"),
    [(False, False, 111), (True, False, 168), (True, True, 171)],
    ids=["bf16", "fp8", "a recipe made anew"],
)
def test_a_played_step_makes_few_calls(fp8: bool, anew: bool, most: int) -> None:
    """Of a layer that runs as one pair, forward and backward, with the updates of its scales.

    The bounds are what a step makes: whoever adds calls takes as many away.
    """
    with DryGpu() as gpu:
        gpu.tapes()
        layer: Any = te.TransformerLayer(
            128, 256, 2, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, params_dtype=torch.bfloat16
        )
        x = torch.empty(32, 2, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        recipes = [te.DelayedScaling(amax_history_len=4) for _ in range(20 + STEPS)]

        def step() -> None:
            x.grad = None
            for parameter in layer.parameters():
                parameter.grad = None
            with te.autocast(enabled=fp8, recipe=recipes.pop() if anew else recipes[0]):
                y = layer(x)
            y.backward(y)

        for _ in range(20):
            step()
        launches = len(gpu.launches)
        gpu.enter_context(mock.patch.object(Tape, "play", return_value=None))  # one CUDA graph
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(STEPS):
            step()
        profile.disable()
        assert len(gpu.launches) == launches, "every step was played"
    calls = 0
    for (file, _, name), (count, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        ours = Path(file).is_relative_to(ROOT / "reference") or Path(file).is_relative_to(ROOT / "optimized")
        calls += count if ours and "comp>" not in name else 0  # Python 3.12 makes no call of a comprehension
    assert calls / STEPS <= most, f"{calls / STEPS} calls of ours in a step"
