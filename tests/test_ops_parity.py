"""Every call in the lists of the ops (optimized/recordings/cases): CUDA's words are the CPU's."""

import pytest
import torch
from conftest import assert_same_bits
from test_ops import LISTS, check_nothing, drawn

import optimized  # noqa: F401  (registers the CUDA kernels)
from optimized.recordings import cases
from optimized.recordings.calls import tensors_in

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", LISTS)
def test_calls(name: str) -> None:
    """Results, and arguments after them, of numbers that are fresh in each session."""
    seed = int(torch.randint(1 << 20, ()))
    for i, (here, there) in enumerate(zip(drawn(name, "cpu", seed), drawn(name, "cuda", seed), strict=True)):
        torch.full((1 << 20,), torch.nan, device="cuda")  # what the allocator hands out next
        found, expected = there.run(), here.run()
        for a, b in zip(tensors_in([found, there.args]), tensors_in([expected, here.args]), strict=True):
            assert_same_bits(a, b, f"{name}, call {i}: {here.name}, seed {seed}")


@pytest.mark.parametrize("name", sorted(cases.having("sized")))
def test_nothing_gives_no_nan(name: str) -> None:
    check_nothing(name, "cuda")
