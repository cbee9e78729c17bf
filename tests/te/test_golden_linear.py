"""`reference.Linear` against six training steps that cuBLASLt computed on an H200 (tests/golden/record_linear.py)."""

import pytest
import torch

from optimized.recordings import linear


def bf16_ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance in representable numbers of the dtype."""

    def order(t: torch.Tensor) -> torch.Tensor:
        word = t.view(torch.int16).int()
        return torch.where(word < 0, -(word & 0x7FFF), word)

    return int((order(a) - order(b)).abs().max())


@pytest.mark.parametrize("name", linear.CASES)
def test_six_training_steps(name: str, same_bits) -> None:
    steps = list(linear.replay(name))
    assert len(steps) == linear.STEPS
    for number, step in enumerate(steps):
        assert ("db" in step) == linear.CASES[name].bias
        assert len(step) == 7 + ("db" in step)
        for key, (ours, recorded) in step.items():
            if key == "db":  # the order of summation is our own; the recording is the float64 sum, rounded once
                assert bf16_ulps(ours, recorded) <= 1
            else:
                same_bits(ours, recorded, f"{name}, step {number}, {key}")
