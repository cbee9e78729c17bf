"""The statistics of a cast on an H200 are the CPU's numbers, in every bit."""

import itertools
import math

import pytest
import torch
from shared.bits import assert_same_bits
from shared.cast_stats_values import E4M3, E5M2, WIDE, numbers

import optimized  # noqa: F401  (registers the CUDA kernels)

pytestmark = [pytest.mark.gpu, pytest.mark.simulated]

twin = torch.ops.twin
SHAPES = [(0, 16), (1, 16), (255, 16), (256, 16), (257, 16), (37, 4096), (130, 272), (4160, 272), (3, 5)]


def compare(x: torch.Tensor, q: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
    there = [None if one is None else one.cuda() for one in (x, q, scale_inv)]
    torch.full((1 << 20,), math.nan, dtype=torch.float64, device="cuda")  # what the allocator hands out next
    for a, b in zip(twin.cast_stats(x, q, scale_inv), twin.cast_stats(*there), strict=True):
        assert_same_bits(b, a, f"{x.dtype} {list(x.shape)}")


@pytest.mark.sample(4)
@pytest.mark.parametrize(("dtype", "fp8"), list(itertools.product(WIDE, (E4M3, E5M2, None))))
@pytest.mark.parametrize("shape", SHAPES)
def test_counts_and_sums(dtype: torch.dtype, fp8: torch.dtype | None, shape: tuple[int, int]) -> None:
    x = numbers(*shape, dtype, seed=shape[0])
    if fp8 is None:
        compare(x, None, None)
        return
    for scale in (1.0, 0.37, 2.0**-7, 1e30, 0.0, math.inf, math.nan):
        if shape[1] % 16 == 0:
            compare(x, *twin.cast(x, torch.tensor([scale]), None, 0, fp8))
        codes = torch.randint(0, 256, shape, dtype=torch.uint8).view(fp8)
        compare(x, codes, torch.tensor([scale]))


def test_every_code() -> None:
    for fp8 in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(fp8)
        for value in (0.0, 1.0, math.nan):
            compare(torch.full((16, 16), value), codes, torch.tensor([0.7]))


def test_a_view_that_starts_anywhere() -> None:
    x = numbers(1, 16 * 33, torch.bfloat16).cuda().reshape(-1)[3 : 3 + 16 * 32].view(32, 16)
    q, scale_inv = twin.cast(x, torch.ones(1).cuda(), None, 0, E5M2)
    for a, b in zip(twin.cast_stats(x, q, scale_inv), twin.cast_stats(x.cpu(), q.cpu(), scale_inv.cpu()), strict=True):
        assert_same_bits(a, b)
