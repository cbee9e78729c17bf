"""`twin::rotary`: sine and cosine, float64, the transposed map, layouts, refusals.

On an H200 it has every bit of the CPU's, for every layout, forward and backward.
"""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA ops)
from reference.ops.attentions.rotary import sine_cosine_tables

twin = torch.ops.twin
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def ulp(x: np.ndarray) -> np.ndarray:
    """The spacing of fp32 at x, in float64."""
    return np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)


@pytest.mark.parametrize("reach", [1.0, 100.0, 65536.0, 2.0**20])
def test_sine_and_cosine(reach: float) -> None:
    """Half an ulp of fp32, and 2^-12 of one for float64's own error: NumPy's float64 functions are the oracle."""
    angles = np.random.default_rng(0).uniform(-reach, reach, 200_000).astype(np.float32)
    for found, exact in zip(
        sine_cosine_tables(torch.from_numpy(angles)),
        (np.sin(angles.astype(np.float64)), np.cos(angles.astype(np.float64))),
        strict=True,
    ):
        error = np.abs(found.numpy().astype(np.float64) - exact)
        assert (error <= ulp(exact) * (0.5 + 2.0**-12) + 2.0**-60).all()


def test_special_angles() -> None:
    zero, huge = torch.tensor([0.0, -0.0]), torch.tensor([math.inf, -math.inf, math.nan, 2.0**31, -3e9, 1e30])
    sine, cosine = sine_cosine_tables(zero)
    assert torch.equal(sine, zero)
    assert torch.equal(cosine, torch.ones(2))
    assert all(table.isnan().all() for table in sine_cosine_tables(huge))
    sine, cosine = sine_cosine_tables(torch.tensor([2.0**31 - 256]))
    assert abs(sine**2 + cosine**2 - 1) < 1e-6


def turned(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        out = torch.empty_like(x)
        out[..., ::2], out[..., 1::2] = -x[..., 1::2], x[..., ::2]
        return out
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


@settings(max_examples=40, deadline=None)
@given(
    s=st.integers(0, 9),
    d=st.integers(1, 40),
    part=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_against_float64(s, d, part, dtype, interleaved, seed) -> None:  # type: ignore[no-untyped-def]
    """sine, cosine, each product and the sum round once each in fp32: 4 units of |x| + |turned x|; then the type's."""
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(s, 2, 3, d, generator=generator).to(dtype) for _ in range(2))
    d2 = int(part * d) // 2 * 2
    freqs = torch.randn(s + 2, d2, generator=generator) * 30
    leaf = x.double().requires_grad_()
    angles = freqs[:s, None, None].double()
    rotated = leaf[..., :d2] * angles.cos() + turned(leaf[..., :d2], interleaved) * angles.sin()
    exact = torch.cat([rotated, leaf[..., d2:]], -1)
    exact.backward(g.double())
    for found, expected, source in (
        (twin.rotary(x, freqs, interleaved, False), exact.detach(), x),
        (twin.rotary(g, freqs, interleaved, True), leaf.grad, g),
    ):
        size = source.double().abs()
        size[..., :d2] += turned(size[..., :d2], interleaved).abs()
        bound = 4 * 2.0**-24 * size + UNIT[dtype] * expected.abs() + 2.0**-25 * (dtype == torch.float16)
        assert bool(((found.double() - expected).abs() <= bound).all())
        assert_same_bits(found[..., d2:], source[..., d2:], "what is not turned")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_the_order_is_the_written_one(interleaved: bool, backward: bool) -> None:
    x, freqs = torch.randn(3, 1, 1, 8), torch.randn(3, 8) * 10
    sine, cosine = (table.numpy() for table in sine_cosine_tables(freqs))
    expected = np.empty((3, 8), np.float32)
    for i in range(3):
        t = x[i, 0, 0].numpy()
        for j in range(8):
            other = (j ^ 1) if interleaved else (j + 4) % 8
            first = j % 2 == 0 if interleaved else j < 4
            sign = np.float32(-1 if first != backward else 1)
            angle = other if backward else j
            expected[i, j] = np.float32(t[j] * cosine[i, j]) + np.float32(sign * t[other] * sine[i, angle])
    assert_same_bits(twin.rotary(x, freqs, interleaved, backward)[:, 0, 0], torch.from_numpy(expected))


def test_layouts_change_no_bit() -> None:
    x, freqs = torch.randn(5, 2, 3, 8), torch.randn(5, 8)
    expected = twin.rotary(x, freqs, False, False)
    batch_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    found = twin.rotary(batch_first, freqs, False, False)
    assert found.stride() == batch_first.stride()
    assert_same_bits(found, expected)
    inside = torch.randn(5, 2, 3, 24)
    inside[..., 8:16] = x
    assert_same_bits(twin.rotary(inside[..., 8:16], freqs, False, False), expected)


@pytest.mark.parametrize(
    ("x", "freqs", "sentence"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 2), "x must be 4-D"),
        (torch.zeros(2, 1, 1, 4).double(), torch.zeros(2, 2), "x must be torch.float32"),
        (torch.zeros(2, 1, 4, 4).transpose(2, 3), torch.zeros(2, 2), "contiguous in d"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(2, 2).double(), "freqs must be contiguous torch.float32"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(1, 2), "at least 2 positions"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(2, 3), "even number of dimensions"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(2, 6), "up to 4"),
    ],
)
def test_refusals(x: torch.Tensor, freqs: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        twin.rotary(x, freqs, False, False)


@pytest.mark.gpu
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    s=st.integers(0, 40),
    b=st.integers(1, 3),
    h=st.integers(1, 20),
    d=st.integers(1, 100),
    part=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(("sbhd", "bshd", "interleaved")),
    interleaved=st.booleans(),
    backward=st.booleans(),
    reach=st.sampled_from((1.0, 100.0, 1e6, 1e10)),
    seed=st.integers(0, 2**30),
)
def test_any_shape(s, b, h, d, part, dtype, layout, interleaved, backward, reach, seed) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    shape = {"sbhd": (s, b, h, d), "bshd": (b, s, h, d), "interleaved": (s, b, h, 3 * d)}[layout]
    memory = torch.randn(shape, generator=generator).to(dtype)
    freqs = torch.randn(s + 3, int(part * d) // 2 * 2, generator=generator) * reach

    def result(device: str) -> torch.Tensor:
        x = memory.to(device)
        x = x.transpose(0, 1) if layout == "bshd" else x[..., d : 2 * d] if layout == "interleaved" else x
        return twin.rotary(x, freqs.to(device), interleaved, backward)

    assert_same_bits(result("cpu"), result("cuda"), f"{shape}, {freqs.shape}, {dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "d2"), [(128, 128), (128, 64), (64, 48), (256, 0)])
def test_whole_vectors(dtype: torch.dtype, backward: bool, interleaved: bool, d: int, d2: int) -> None:
    x, freqs = torch.randn(37, 2, 5, d).to(dtype), torch.randn(40, d2) * 50
    assert_same_bits(
        twin.rotary(x, freqs, interleaved, backward), twin.rotary(x.cuda(), freqs.cuda(), interleaved, backward)
    )


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("b", "h", "d", "d2"), [(1, 1, 4352, 4096), (3, 100, 128, 128), (1, 1, 8, 8), (2, 70, 80, 48)])
def test_more_and_fewer_heads_than_threads(
    dtype: torch.dtype, interleaved: bool, b: int, h: int, d: int, d2: int
) -> None:
    x, freqs = torch.randn(3, b, h, d).to(dtype), torch.randn(3, d2) * 50
    for backward in (False, True):
        assert_same_bits(
            twin.rotary(x, freqs, interleaved, backward), twin.rotary(x.cuda(), freqs.cuda(), interleaved, backward)
        )


@pytest.mark.gpu
def test_angles() -> None:
    """A million angles of every size, through cos and sin apart."""
    words = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), generator=torch.Generator().manual_seed(0))
    angles = words.to(torch.int32).view(torch.float32)
    freqs = torch.stack([angles, angles], dim=1).contiguous()
    x = torch.zeros(freqs.shape[0], 1, 1, 2)
    x[..., 0] = 1.0  # out = (cos, sin)
    assert_same_bits(twin.rotary(x, freqs, False, False), twin.rotary(x.cuda(), freqs.cuda(), False, False))
