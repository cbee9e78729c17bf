"""twin::norm_cast_blocks_transpose: the ops that it stands for, one by one; special values; refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.bits import assert_same_bits

from reference.ops.casts.cast_blocks import DIALECTS
from reference.ops.norms.norm import KINDS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = (BF16, FP16, FP32)
twin = torch.ops.twin


@given(
    st.integers(0, 140),
    st.integers(1, 9),
    st.sampled_from(KINDS),
    st.sampled_from(WIDE),
    st.sampled_from(WIDE),
    st.booleans(),
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from(DIALECTS),
    st.sampled_from([0.0, 8.0]),  # of many blocks the amax is smaller
    st.sampled_from([1e-5, 1.0]),
    st.integers(0, 1 << 30),
)
def test_what_is_cast_is_rounded_first(
    rows: int,
    columns: int,
    kind: str,
    wide: torch.dtype,
    parameters: torch.dtype,
    zero_centered: bool,
    dtype: torch.dtype,
    dialect: str,
    epsilon: float,
    eps: float,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16 * columns, generator=draw).to(wide)
    weight, bias = torch.randn(2, 16 * columns, generator=draw).to(parameters)
    norm = (x, weight, bias if kind == "layernorm" and seed % 2 else None, eps, zero_centered, kind)
    y, mean, rstd = twin.norm(*norm, wide)
    wanted = (*twin.cast_blocks_transpose(y, dtype, False, dialect, epsilon), mean, rstd)
    for found, one in zip(twin.norm_cast_blocks_transpose(*norm, dtype, dialect, epsilon), wanted, strict=True):
        assert_same_bits(found, one)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize(("rows", "cols"), [(130, 144), (24, 1040)])
def test_kernels_of_special_values(rows: int, cols: int, wide: torch.dtype, kind: str, device: torch.device) -> None:
    """Zeros, NaN, infinities, the largest and the smallest numbers, in rows and in places of them."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).to(wide)
    most, least = torch.finfo(wide).max, torch.finfo(wide).smallest_normal
    for row, fill in enumerate((0.0, -0.0, 1.0, most, -most, torch.inf, -torch.inf, torch.nan, least, least / 4)):
        x[row] = fill
    x[10, 0], x[11, -1], x[12, cols // 2], x[13, 5] = torch.nan, torch.inf, -torch.inf, most
    weight, bias = torch.randn(2, cols, generator=torch.Generator().manual_seed(2))
    weight[0], weight[-1], weight[3] = -0.0, 1e30, torch.nan
    norm = (x, weight, bias if kind == "layernorm" else None)
    there = [None if one is None else one.to(device) for one in norm]
    torch.full((1 << 16,), torch.nan, device=device)  # what the allocator hands out next
    how = (1e-5, True, kind, E4M3, "power_of_two", 0.0)
    found = twin.norm_cast_blocks_transpose(*there, *how)
    for a, b in zip(found, twin.norm_cast_blocks_transpose(*norm, *how), strict=True):
        assert_same_bits(a, b)


GOOD = [torch.zeros(4, 32), torch.ones(32), torch.ones(32), 1e-5, False, "layernorm", E4M3, "fp32", 0.0]


@pytest.mark.parametrize(
    ("position", "wrong", "sentence"),
    [
        (1, torch.ones(31), r"weight must be contiguous torch.float32 \[32\]"),
        (3, 0.0, "eps must be a positive finite number"),
        (5, "rmsnorm", "bias must be None for kind 'rmsnorm'"),
        (6, BF16, "dtype must be"),
        (7, "tall", "dialect='tall'"),
        (8, -1.0, "epsilon=-1.0"),
    ],
)
def test_refusals(position: int, wrong: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^twin::norm_cast_blocks_transpose: .*{sentence}"):
        twin.norm_cast_blocks_transpose(*GOOD[:position], wrong, *GOOD[position + 1 :])
    with pytest.raises(ValueError, match=r"a multiple of 16, .* got 24"):
        twin.norm_cast_blocks_transpose(torch.zeros(4, 24), torch.ones(24), None, *GOOD[3:])
