"""Rotary embedding on the H200: every bit of the CPU's, for every layout, forward and backward."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA ops)

pytestmark = pytest.mark.gpu
twin = torch.ops.twin
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "d2"), [(128, 128), (128, 64), (64, 48), (256, 0)])
def test_whole_vectors(dtype: torch.dtype, backward: bool, interleaved: bool, d: int, d2: int) -> None:
    x, freqs = torch.randn(37, 2, 5, d).to(dtype), torch.randn(40, d2) * 50
    assert_same_bits(
        twin.rotary(x, freqs, interleaved, backward), twin.rotary(x.cuda(), freqs.cuda(), interleaved, backward)
    )


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


def test_angles() -> None:
    """A million angles of every size, through cos and sin apart."""
    words = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), generator=torch.Generator().manual_seed(0))
    angles = words.to(torch.int32).view(torch.float32)
    freqs = torch.stack([angles, angles], dim=1).contiguous()
    x = torch.zeros(freqs.shape[0], 1, 1, 2)
    x[..., 0] = 1.0  # out = (cos, sin)
    assert_same_bits(twin.rotary(x, freqs, False, False), twin.rotary(x.cuda(), freqs.cuda(), False, False))
