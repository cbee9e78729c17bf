"""Scaled masked softmax on the H200: every bit of the CPU's, forward and backward."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA ops)
from reference.ops.attentions.attention import MASK_TYPES

pytestmark = pytest.mark.gpu
twin = torch.ops.twin
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compare(b, h, sq, skv, dtype, mask_type, mask_shape, scale, seed, specials=False) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(b, h, sq, skv, generator=generator) * 4).to(dtype)
    if specials:
        x.view(-1)[::31] = float("-inf")
        x.view(-1)[5::97] = float("inf")
        x.view(-1)[9::89] = float("nan")
    g = torch.randn(b, h, sq, skv, generator=generator).to(dtype)
    sizes = {"none": None, "keys": (b, 1, 1, skv), "pairs": (1, 1, sq, skv), "all": (b, h, sq, skv)}[mask_shape]
    mask = None if sizes is None else torch.rand(sizes, generator=generator) < 0.4
    results = []
    for device in ("cpu", "cuda"):
        y = twin.softmax(x.to(device), scale, mask_type, None if mask is None else mask.to(device))
        results.append((y, twin.softmax_backward(g.to(device), y, scale)))
    for name, a, c in zip(("y", "dx"), *results, strict=True):
        assert_same_bits(a, c, f"{name} of {(b, h, sq, skv)}, {dtype}, {mask_type}, {mask_shape}, scale={scale}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
@pytest.mark.parametrize("mask_shape", ["none", "keys", "pairs", "all"])
@pytest.mark.parametrize("specials", [False, True])
def test_masks(dtype: torch.dtype, mask_type: str, mask_shape: str, specials: bool) -> None:
    compare(2, 3, 33, 200, dtype, mask_type, mask_shape, 0.125, 0, specials)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    b=st.integers(0, 2),
    h=st.integers(1, 3),
    sq=st.integers(0, 60),
    skv=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    mask_type=st.sampled_from(MASK_TYPES),
    mask_shape=st.sampled_from(("none", "keys", "pairs", "all")),
    scale=st.sampled_from((1.0, 0.088, 10.0)),
    seed=st.integers(0, 2**30),
)
def test_any_shape(b, h, sq, skv, dtype, mask_type, mask_shape, scale, seed) -> None:  # type: ignore[no-untyped-def]
    compare(b, h, sq, skv, dtype, mask_type, mask_shape, scale, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skv", [8, 250, 256, 504, 510, 1000, 1001, 1500, 2048, 2049, 2056, 4099])
def test_every_configuration(dtype: torch.dtype, skv: int) -> None:
    for mask_type, mask_shape in (("causal_bottom_right", "none"), ("causal", "pairs"), ("none", "none")):
        compare(1, 2, 9, skv, dtype, mask_type, mask_shape, 1.0, 3, specials=True)


@pytest.mark.simulated
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_off_the_16_byte_boundary(dtype: torch.dtype) -> None:
    whole = torch.randn(3 * 264 + 1).to(dtype)
    x, there = whole[1:].view(1, 1, 3, 264), whole.cuda()[1:].view(1, 1, 3, 264)
    assert there.data_ptr() % 16 != 0
    y = twin.softmax(x, 1.0, "none", None)
    assert_same_bits(y, twin.softmax(there, 1.0, "none", None))
    assert_same_bits(twin.softmax_backward(x, y, 1.0), twin.softmax_backward(there, y.cuda(), 1.0))
