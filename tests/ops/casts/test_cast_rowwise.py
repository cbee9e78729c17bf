"""twin::cast_rowwise and its form with a transpose: a loop over rows that follows the contract, torchao's, refusals."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.bits import assert_same_bits

from optimized.ops.casts import cast_rowwise as launcher
from optimized.ops.casts import cast_transpose
from reference.numbers import formats

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


def scale_of(row: torch.Tensor, most: float, power_of_two: bool, epsilon: float) -> np.float32:
    """Of one row, in Python's floats and one of NumPy's divisions."""
    there = [abs(x) for x in row.tolist() if not math.isnan(x)]
    amax = np.float32(max([*there, np.float32(epsilon)]))
    if amax == 0 or np.isinf(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(most) / amax, np.finfo(np.float32).max)
    return np.float32(math.ldexp(1.0, math.frexp(float(scale))[1] - 1)) if power_of_two else scale


def by_rows(x: torch.Tensor, dtype: torch.dtype, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    fmt = formats.format_of(dtype)
    q, inverses = torch.zeros(x.shape, dtype=dtype), torch.zeros(len(x))
    for i, row in enumerate(x):
        scale = scale_of(row, fmt.largest, *how)
        q[i], inverses[i] = formats.cast(row, fmt, float(scale)), float(np.float32(1) / scale)
    return q, inverses


def check(x: torch.Tensor, dtype: torch.dtype, *how: Any) -> None:
    q, scale_inv = by_rows(x, dtype, *how)
    q_t, scale_inv_t = by_rows(x.t().contiguous(), dtype, *how)
    filling = torch.zeros(x.shape[1], -len(x) % 16, dtype=torch.uint8)
    q_t = torch.cat([q_t.view(torch.uint8), filling], 1).view(dtype)
    for found, wanted in zip(twin.cast_rowwise(x, dtype, *how), (q, scale_inv), strict=True):
        assert_same_bits(found, wanted)
    wanted = (q, q_t, scale_inv, scale_inv_t)
    for found, one in zip(twin.cast_rowwise_transpose(x, dtype, *how), wanted, strict=True):
        assert_same_bits(found, one)


@given(
    st.integers(1, 40),
    st.integers(1, 10),
    st.sampled_from([BF16, FP16, FP32]),
    st.sampled_from([E4M3, E5M2]),
    st.booleans(),
    st.sampled_from([0.0, 1e-12, 3.0]),
    st.integers(0, 1 << 30),
)
def test_any_matrix_is_cast_row_by_row(
    rows: int, columns: int, wide: torch.dtype, dtype: torch.dtype, power_of_two: bool, epsilon: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16 * columns, generator=draw)
    x *= torch.exp2(torch.randint(-14, 12, (rows, 1), generator=draw).float())
    x[torch.rand(x.shape, generator=draw) < 0.05] = 0
    check(x.to(wide), dtype, power_of_two, epsilon)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0],
        [1.0, math.inf],
        [math.nan, 3.0],
        [math.nan, math.nan],
        [1e-44, 0.0],
        [1e-40, 1e-42],
        [3e38, -3e38],
        [448.0, 1.0],
    ],
)
def test_special_rows(values: list[float], power_of_two: bool) -> None:
    x = torch.tensor(values * 8)[None].repeat(20, 1)
    x[3:] = 1
    for dtype, epsilon in itertools.product((E4M3, E5M2), (0.0, 1e-12)):
        check(x, dtype, power_of_two, epsilon)


def torchao(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its definition: 448 over the clamped amax in fp64, to fp32, down to a power of two by fp32 logarithms."""
    amax = x.abs().amax(1, keepdim=True).double()
    scale = torch.exp2(torch.floor(torch.log2((448.0 / amax.clamp(min=1e-12)).float())))
    return (x.float() * scale).clamp(-448, 448).to(E4M3), scale.reciprocal().squeeze(1)


@pytest.mark.parametrize("wide", [BF16, FP16])
def test_the_scale_of_every_amax_of_16_bits_is_torchaos(wide: torch.dtype) -> None:
    """Each finite word is the amax of a row, beside a half, a 15th and a 1000th of it."""
    words = torch.arange(1 << 15).to(torch.int16).view(wide)
    amax = words[words.isfinite()].float()
    x = (amax[:, None] * torch.tensor([1, 0.5, 1 / 15, -0.001] * 4)).to(wide)
    for found, wanted in zip(twin.cast_rowwise(x, E4M3, True, 1e-12), torchao(x), strict=True):
        assert_same_bits(found, wanted)


def test_torchao_rounds_some_scales_of_fp32_up() -> None:
    """Of an amax just above 448 · 2^n its logarithm may be that of the power itself; then the largest saturate."""
    edges = torch.tensor([448.0]) * torch.exp2(torch.arange(-30.0, 30.0))
    above = torch.nextafter(edges, edges.new_tensor(math.inf))
    for amax in (edges, above, edges * 1.01):
        x = torch.nn.functional.pad(amax[:, None], (0, 15))
        (q, inverse), (theirs, their_inverse) = twin.cast_rowwise(x, E4M3, True, 1e-12), torchao(x)
        same = inverse == their_inverse
        assert bool(same.all()) is (amax is not above)
        assert torch.equal(inverse[~same], 2 * their_inverse[~same])
        assert bool((theirs[~same, 0].float() == 448).all())
        assert bool((q[~same, 0].float() == 224).all())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"x": torch.zeros(16)}, r"x must be 2-D, \[rows, cols\]; got shape \(16,\)"),
        ({"x": torch.zeros(4, 8)}, r"the columns of x must be a multiple of 16, .* got 8"),
        ({"x": torch.zeros(16, 4).t()}, "x must be contiguous"),
        ({"x": torch.zeros(4, 16, dtype=torch.float64)}, "got torch.float64"),
        ({"dtype": torch.int8}, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.int8"),
        ({"epsilon": -1.0}, r"epsilon=-1\.0; a finite number of fp32, from 0 on, is accepted"),
        ({"epsilon": math.nan}, r"epsilon=nan; a finite number of fp32, from 0 on, is accepted"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    given = {"x": torch.zeros(4, 16), "dtype": E4M3, "power_of_two": True, "epsilon": 0.0} | arguments
    for op in (twin.cast_rowwise, twin.cast_rowwise_transpose):
        with pytest.raises(ValueError, match=f"^twin::{op.__name__.split('.')[0]}: .*{sentence}"):
            op(*given.values())


@pytest.mark.gpu
@pytest.mark.simulated
def test_tiles_beyond_the_rows_write_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid is rounded up where tiles need its third dimension: 3 tiles, of which a column has 2, take 4 blocks."""
    monkeypatch.setattr(cast_transpose, "_DOWN", 2)
    x = torch.randn(300, 144, generator=torch.Generator().manual_seed(1))
    wanted = twin.cast_rowwise_transpose(x, E4M3, True, 1e-12)
    rooms = [torch.full((4 * one.numel(),), 7.0, device=device).to(one.dtype) for one in wanted]
    out = tuple(room[: one.numel()].view(one.shape) for room, one in zip(rooms, wanted, strict=True))
    monkeypatch.setattr(launcher, "transpose_outputs", lambda *_: out)
    launcher.cast_rowwise_transpose(x.to(device), E4M3, True, 1e-12)
    for room, one in zip(rooms, wanted, strict=True):
        assert_same_bits(room[: one.numel()].view(one.shape).cpu(), one)
        assert bool((room[one.numel() :].float() == 7).all()), "what lies behind"


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize(("rows", "cols"), [(1, 16), (17, 528), (130, 272), (257, 48), (3, 2064)])
def test_odd_sizes_have_the_words_of_the_cpu(device: torch.device, rows: int, cols: int) -> None:
    """More than a tile of either kernel in each direction; zeros, NaN and infinity."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows))
    x[rows // 2], x[:, 5], x[0, 3], x[-1, 9] = 0, 0, math.nan, math.inf
    for wide, dtype, how in itertools.product((BF16, FP16, FP32), (E4M3, E5M2), ((True, 1e-12), (False, 0.0))):
        here = x.to(wide)
        for op in (twin.cast_rowwise, twin.cast_rowwise_transpose):
            for found, wanted in zip(op(here.to(device), dtype, *how), op(here, dtype, *how), strict=True):
                assert_same_bits(found.cpu(), wanted)
