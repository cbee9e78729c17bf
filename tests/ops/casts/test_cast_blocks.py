"""twin::cast_blocks and its form with a transpose: a loop over blocks that follows the contract, and refusals."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.block_vectors import ODD, VECTORS, WHOLE, Vector, digests, kind_of, made, recorded_blocks_of_128

from optimized.ops.casts import cast_blocks as launcher
from optimized.ops.casts import cast_transpose
from reference.numbers import formats
from reference.ops.casts.cast_blocks import DIALECTS, blocks_of, ceil4

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


def scale_of(block: torch.Tensor, most: float, dialect: str, epsilon: float) -> tuple[np.float32, np.float32]:
    """(scale, scale_inv) of one block, in Python's floats and NumPy's divisions."""
    there = [abs(x) for x in block.float().flatten().tolist() if not math.isnan(x)]
    amax = np.float32(max([*there, np.float32(epsilon)]))
    if amax == 0 or np.isinf(amax):
        return np.float32(1), np.float32(1)
    with np.errstate(over="ignore", under="ignore"):
        if dialect.startswith("deep_gemm"):
            inverse = max(amax / np.float32(most), np.float32(2.0**-126))
            if dialect == "deep_gemm_ue8m0":
                mantissa, exponent = math.frexp(float(inverse))
                inverse = np.float32(math.ldexp(1.0, exponent - (mantissa == 0.5)))
            return np.float32(1) / inverse, inverse
        scale = np.float32(most) / amax
        if np.isinf(scale):
            scale = np.float32(torch.finfo(block.dtype).max)
        if dialect == "power_of_two":
            scale = np.float32(math.ldexp(1.0, math.frexp(float(scale))[1] - 1))
        return scale, np.float32(1) / scale


def by_blocks(
    x: torch.Tensor, dtype: torch.dtype, square: bool, dialect: str, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, and scales by row of blocks and column of blocks."""
    down, (rows, cols) = 128 if square else 1, x.shape
    q = torch.zeros(x.shape, dtype=dtype)
    grid = torch.zeros(-(-rows // down), -(-cols // 128))
    for i, j in itertools.product(*map(range, grid.shape)):
        part = slice(down * i, down * (i + 1)), slice(128 * j, 128 * (j + 1))
        scale, inverse = scale_of(x[part], formats.format_of(dtype).largest, dialect, epsilon)
        q[part] = formats.cast(x[part], formats.format_of(dtype), float(scale))
        grid[i, j] = float(inverse)
    return q, grid


def laid_out(grid: torch.Tensor, square: bool) -> torch.Tensor:
    grid = grid if square else grid.t()
    return torch.nn.functional.pad(grid, (0, ceil4(grid.shape[1]) - grid.shape[1])).contiguous()


def check(x: torch.Tensor, dtype: torch.dtype, square: bool, dialect: str, epsilon: float) -> None:
    how = (dtype, square, dialect, epsilon)
    q, grid = by_blocks(x, *how)
    q_t, grid_t = by_blocks(x.t().contiguous(), *how)
    q_t = torch.cat([q_t.view(torch.uint8), torch.zeros(x.shape[1], -x.shape[0] % 16, dtype=torch.uint8)], 1).view(
        dtype
    )
    for found, wanted in zip(twin.cast_blocks(x, *how), (q, laid_out(grid, square)), strict=True):
        assert_same_bits(found, wanted)
    wanted = (q, q_t, laid_out(grid, square), laid_out(grid_t, square))
    for found, one in zip(twin.cast_blocks_transpose(x, *how), wanted, strict=True):
        assert_same_bits(found, one)


@given(
    st.integers(1, 150),
    st.integers(1, 18),
    st.sampled_from([BF16, FP16, FP32]),
    st.sampled_from([E4M3, E5M2]),
    st.booleans(),
    st.sampled_from(DIALECTS),
    st.sampled_from([0.0, 1e-4, 3.0]),
    st.integers(0, 1 << 30),
)
def test_any_matrix_is_cast_block_by_block(
    rows: int,
    columns: int,
    wide: torch.dtype,
    dtype: torch.dtype,
    square: bool,
    dialect: str,
    epsilon: float,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16 * columns, generator=draw)
    x *= torch.exp2(torch.randint(-14, 12, (rows, 1), generator=draw).float())
    x[torch.rand(x.shape, generator=draw) < 0.05] = 0
    check(x.to(wide), dtype, square, dialect, epsilon)


def grid_of(scale_inv: torch.Tensor, rows: int, cols: int, square: bool) -> torch.Tensor:
    """The scales of `[rows, cols]` as a grid of blocks."""
    return scale_inv[:, : blocks_of(cols)] if square else scale_inv[:, :rows].t()


@pytest.mark.parametrize("vector", VECTORS, ids=str)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_has_the_words_of_its_source(dialect: str, vector: Vector) -> None:
    """Transformer Engine's reference, and DeepGEMM's casts: E4M3, one epsilon, and whole blocks of a column."""
    known, compared = recorded_blocks_of_128(), 0
    for shape, square, dtype, epsilon in itertools.product((WHOLE, ODD), (False, True), (E4M3, E5M2), (0.0, 1e-4)):
        kind, (rows, cols) = kind_of(dialect, square, dtype, epsilon, shape, vector), shape
        if kind not in known:
            continue
        compared += 1
        q, q_t, s, s_t = twin.cast_blocks_transpose(made(vector, 0, shape), dtype, square, dialect, epsilon)
        assert digests(q, grid_of(s, rows, cols, square)) == known[kind], kind
        if f"{kind}, transposed" in known:
            found = digests(q_t[:, :rows], grid_of(s_t, cols, rows, square))
            assert found == known[f"{kind}, transposed"], kind
    assert compared == (4 if dialect.startswith("deep_gemm") else 16)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0],
        [1.0, math.inf],
        [math.nan, 3.0],
        [1e-44, 0.0],
        [1e-40, 1e-42],
        [3e38, -3e38],
        [448.0, 1.0],
        [-0.0, 0.0],
    ],
)
def test_special_blocks(values: list[float], dialect: str) -> None:
    x = torch.tensor(values * 8)[None].expand(20, -1).contiguous()
    for square, dtype in itertools.product((False, True), (E4M3, E5M2)):
        check(x, dtype, square, dialect, 0.0)


def scales_by_dialect(amaxes: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformer Engine's and DeepGEMM's powers of two, of a block with each amax."""
    x = torch.nn.functional.pad(amaxes[:, None], (0, 15))
    down, up = (
        1 / twin.cast_blocks(x, dtype, False, dialect, 0.0)[1][0, : len(x)]
        for dialect in ("power_of_two", "deep_gemm_ue8m0")
    )
    return down, up


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("wide", [BF16, FP16])
def test_powers_of_two_are_where_they_should_be(wide: torch.dtype, dtype: torch.dtype) -> None:
    """Down of fp8_max / amax and up of amax / fp8_max give one scale of every positive finite amax, but of small ones.

    They differ in bf16 where amax <= fp8_max · 2^-127, which is 448 · 2^-127 = 2.63e-36 in E4M3 and
    57,344 · 2^-127 = 3.37e-34 in E5M2. There Transformer Engine's scale is 2^127, the largest power of two, and
    DeepGEMM's 2^126, since its inverse is at least 2^-126, the smallest normal number. In fp16 they differ nowhere: its
    smallest number is 2^-24.
    """
    words = torch.arange(1, 0x8000, dtype=torch.int16).view(wide)
    amaxes = words[words.isfinite()]
    assert len(amaxes) == (32639 if wide is BF16 else 31743)
    down, up = scales_by_dialect(amaxes, dtype)
    most = formats.format_of(dtype).largest
    small = amaxes.double() <= most * 2.0**-127
    assert int(small.sum()) == {(BF16, E4M3): 1120, (BF16, E5M2): 2016}.get((wide, dtype), 0)
    assert_same_bits(down[~small], up[~small])
    assert bool((down[small] == 2.0**127).all())
    assert bool((up[small] == 2.0**126).all())
    wanted = torch.exp2(torch.floor(torch.log2(most / amaxes.double())))  # no quotient is that near to a power of two
    assert_same_bits(down[~small], wanted[~small].float())


def test_powers_of_two_beside_an_fp32_word() -> None:
    """Around an amax of 448·2^n: down of the quotient and up of its inverse give one scale, beside it another."""
    for exponent in (-20, 0, 7):
        amax = torch.tensor(448.0 * 2.0**exponent)
        beside = [torch.nextafter(amax, torch.tensor(end)) for end in (0.0, 1e30)]
        down, up = scales_by_dialect(torch.stack([amax, *beside]), E4M3)
        assert down.tolist() == [2.0**-exponent, 2.0**-exponent, 2.0 ** (-exponent - 1)]
        assert up.tolist() == down.tolist()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"x": torch.zeros(16)}, r"x must be 2-D, \[rows, cols\]; got shape \(16,\)"),
        ({"x": torch.zeros(4, 8)}, r"a multiple of 16, .* got 8"),
        ({"x": torch.zeros(16, 4).t()}, "x must be contiguous"),
        ({"x": torch.zeros(4, 16, dtype=torch.float64)}, "got torch.float64"),
        ({"dtype": torch.int8}, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.int8"),
        ({"dialect": "mx"}, "dialect='mx'; 'power_of_two', 'fp32', 'deep_gemm', 'deep_gemm_ue8m0' are accepted"),
        ({"epsilon": -1.0}, r"epsilon=-1\.0; a finite number from 0 on is accepted"),
        ({"epsilon": math.nan}, r"epsilon=nan; a finite number from 0 on is accepted"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    given = {"x": torch.zeros(4, 16), "dtype": E4M3, "square": False, "dialect": "fp32", "epsilon": 0.0} | arguments
    for op in (twin.cast_blocks, twin.cast_blocks_transpose):
        with pytest.raises(ValueError, match=f"^twin::{op.__name__.split('.')[0]}: .*{sentence}"):
            op(*given.values())


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("square", [False, True])
def test_tiles_beyond_the_rows_write_nothing(
    square: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid is rounded up where tiles need its third dimension: 3 tiles, of which a column has 2, take 4 blocks."""
    monkeypatch.setattr(cast_transpose, "_DOWN", 2)
    x = torch.randn(300, 144, generator=torch.Generator().manual_seed(1))
    wanted = twin.cast_blocks_transpose(x, E4M3, square, "power_of_two", 0.0)
    rooms = [torch.full((4 * one.numel(),), 7, dtype=torch.float32, device=device).to(one.dtype) for one in wanted]
    q, q_t, s, s_t = (room[: one.numel()].view(one.shape) for room, one in zip(rooms, wanted, strict=True))
    launcher.run(x.to(device), (q, s), (q_t, s_t), E4M3, square, "power_of_two", 0.0)
    for room, one in zip(rooms, wanted, strict=True):
        assert_same_bits(room[: one.numel()].view(one.shape).cpu(), one)
        assert bool((room[one.numel() :].float() == 7).all()), "what lies behind"
