"""`twin::normal`: what initialisation draws, on either device."""

import hashlib

import pytest
import torch
from shared.bits import assert_same_bits

import optimized.ops
from reference.numbers import philox

twin = torch.ops.twin
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def filled(shape: tuple[int, ...], mean: float, std: float, seed: int, device: torch.device) -> torch.Tensor:
    values = torch.full(shape, torch.nan, device=device)
    twin.normal(values, mean, std, seed)
    return values


def test_it_is_philoxs_normal() -> None:
    for shape in ((200_000,), (3, 5, 7), (0,), ()):
        assert_same_bits(filled(shape, 0.5, 0.023, 4, CPU), philox.normal(shape, 0.5, 0.023, seed=4))


@pytest.mark.parametrize(
    ("values", "std", "seed", "sentence"),
    [
        (torch.empty(4, dtype=torch.bfloat16), 1.0, 1, r"torch\.bfloat16 and contiguous; contiguous torch\.float32"),
        (torch.empty(4, 4).t()[:2], 1.0, 1, r"torch\.float32 and strided; contiguous torch\.float32"),
        (torch.empty(4), -1.0, 1, r"std must not be negative; got -1"),
        (torch.empty(4), float("nan"), 1, r"std must not be negative; got nan"),
        (torch.empty(4), 1.0, -1, r"seed must be from 0 to 2\^63 - 1; got -1"),
    ],
)
def test_refusals(values: torch.Tensor, std: float, seed: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        twin.normal(values, 0.0, std, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("mean_std", [(0.0, 1.0), (0.5, 0.023), (-3.0, 0.0)])
def test_the_gpu_draws_the_same(mean_std: tuple[float, float]) -> None:
    """Four million draws reach both tails; the longest are 5 standard deviations out."""
    for shape, seed in (((1 << 22,), 3), ((2049, 3), 2**63 - 1), ((1,), 0), ((0, 4), 1)):
        here, there = (filled(shape, *mean_std, seed, device) for device in (CPU, CUDA))
        assert_same_bits(here, there.cpu())


@pytest.mark.gpu
def test_a_layers_parameters_are_the_same_on_both_devices() -> None:
    digests = []
    for device in (CPU, CUDA):
        torch.manual_seed(7)
        layer = optimized.Linear(640, 384, device=device, params_dtype=torch.bfloat16)
        digests.append(hashlib.sha256(layer.weight.detach().cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
    assert digests[0] == digests[1]
