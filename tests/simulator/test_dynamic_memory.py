"""Launches ask for no more dynamic shared memory than their kernels write, but for what aligns it.

That they ask for no less, the simulator sees in every launch.
"""

from collections.abc import Callable

import pytest
import torch
from shared.attention_cases import Case, inputs, run

from optimized.ops.attentions import attention_decode
from simulator import Simulator

pytestmark = pytest.mark.simulated
twin = torch.ops.twin
SLACK = 4096


def attend(d: int) -> None:
    """Forward and backward."""
    case = Case(1, 1, 1, 64, 128, d)
    run(case, inputs(case))


def decode(d: int) -> None:
    """So many keys that every stage of the pipelines has some."""
    given = inputs(Case(1, 1, 1, 1, 1000, d))
    twin.attention(given["q"], given["k"], given["v"], 0.1, "none", -1, -1, None, 0.0, None)


def differentiate_norm(hidden: int) -> None:
    """With a residual, in one block, whose rows fill every stage."""
    grad, x, residual = (torch.randn(64, hidden).bfloat16() for _ in range(3))
    weight, rstd = torch.ones(hidden).bfloat16(), torch.ones(64)
    twin.norm_backward_part(grad, x, weight, rstd, rstd, False, "layernorm", residual, 64)


CALLS: dict[str, tuple[Callable[[int], None], int, set[str]]] = {
    "heads of 64": (attend, 64, {"attention", "attention_backward"}),
    "heads of 128": (attend, 128, {"attention", "attention_backward"}),
    "heads of 256": (attend, 256, {"attention", "attention_backward"}),
    "a query of 64 channels": (decode, 64, {"attention_scores", "attention_chain"}),
    "a query of 200 channels": (decode, 200, {"attention_scores", "attention_chain"}),
    "a norm of 1024 columns": (differentiate_norm, 1024, {"norm_backward"}),
    "a norm of 5120 columns": (differentiate_norm, 5120, {"norm_backward"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_more_is_asked_for_than_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "LEAST_KEYS", 200)
    call, size, kernels = CALLS[name]
    with Simulator(processors=1) as gpu:
        call(size)
    found = {kernel.name: asked - written for kernel, asked, written in gpu.shared if asked}
    assert found.keys() == kernels
    for kernel, more in found.items():
        assert 0 <= more < SLACK, kernel
