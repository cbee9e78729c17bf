"""`twin::cast_stats` is what NumPy counts and sums, element by element; its refusals.

On an H200 they are the CPU's numbers, in every bit.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits
from shared.cast_stats_values import E4M3, E5M2, SPECIAL, WIDE, numbers

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te  # noqa: F401  (registers the CPU definitions)
from reference.numbers import formats
from reference.ops.casts import cast_stats

twin = torch.ops.twin
SPECIAL += [2.0**-10 * 1.001, 2.0**-11, -(2.0**-16), 2.0**-17, 2.0**-18]
SHAPES = [(0, 16), (1, 16), (255, 16), (256, 16), (257, 16), (37, 4096), (130, 272), (4160, 272), (3, 5)]


def written_out(x: torch.Tensor, q: torch.Tensor, scale_inv: torch.Tensor) -> tuple[list[int], list[float]]:
    """By Python's floats (float64), in the written order; scale_inv of one number, or of each."""
    values, codes = x.float().reshape(-1).tolist(), formats.decode(q).reshape(-1).tolist()
    factors, limit = scale_inv.expand(x.shape).reshape(-1).tolist(), {E4M3: 464.0, E5M2: 61440.0}[q.dtype]
    counts, amax, squares = [0, 0, 0, 0], 0.0, ([], [])
    for v, c, factor in zip(values, codes, factors, strict=True):
        finite = math.isfinite(v)
        counts[0] += finite and abs(v) > limit * factor
        counts[1] += finite and v != 0 and c == 0
        counts[2] += math.isnan(v)
        counts[3] += math.isinf(v)
        amax = amax if math.isnan(v) else max(amax, abs(v))
        error = v - c * factor
        for found, one in zip(squares, (v * v, error * error), strict=True):
            found.append(one if finite else 0.0)

    def tree(chains: list[float]) -> float:
        for half in (128, 64, 32, 16, 8, 4, 2, 1):
            chains = [chains[j] + chains[j + half] for j in range(half)]
        return chains[0]

    def total(found: list[float]) -> float:
        found = found + [0.0] * (-len(found) % 4096)
        sums = [0.0] * 256
        for piece in range(len(found) // 4096):
            chains = [0.0] * 256
            for i in range(4096):
                chains[i % 256] += found[4096 * piece + i]
            sums[piece % 256] += tree(chains)
        return tree(sums)

    return counts, [*map(total, squares), amax]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("dtype", "fp8"), list(itertools.product(WIDE, (E4M3, E5M2))))
@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (256, 32), (130, 272)])
def test_every_number_is_that_of_plain_python(dtype: torch.dtype, fp8: torch.dtype, shape: tuple[int, int]) -> None:
    x, seen = numbers(*shape, dtype), torch.zeros(4, dtype=torch.int64)
    for scale in (1.0, 0.37, 2.0**-7, 300.0):
        q, scale_inv = twin.cast(x, torch.tensor([scale]), None, 0, fp8)
        counts, sums = twin.cast_stats(x, q, scale_inv)
        expected = written_out(x, q, scale_inv)
        assert counts.tolist() == expected[0]
        assert sums.tolist() == expected[1]
        seen += counts
    assert seen.min() > 0 or shape == (1, 16), "every kind of loss is among the numbers"


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (130, 272)])
def test_the_scale_of_an_elements_block(square: bool, shape: tuple[int, int]) -> None:
    rows, cols = shape
    for x, fp8 in itertools.product((numbers(*shape, torch.bfloat16), numbers(*shape, torch.float32)), (E4M3, E5M2)):
        q, scale_inv = twin.cast_blocks(x, fp8, square, "fp32", 0.0)
        scale_inv *= torch.rand(scale_inv.shape, generator=torch.Generator().manual_seed(1)) + 0.5
        each = torch.empty(shape)
        for r, c in itertools.product(range(rows), range(cols)):
            each[r, c] = scale_inv[r // 128, c // 128] if square else scale_inv[c // 128, r]
        counts, sums = twin.cast_stats_blocks(x, q, scale_inv, square)
        assert (counts.tolist(), sums.tolist()) == written_out(x, q, each)
    with pytest.raises(ValueError, match=r"^twin::cast_stats_blocks: scale_inv must be contiguous torch.float32 \["):
        twin.cast_stats_blocks(x, q, torch.ones(1), square)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (130, 272)])
def test_the_scale_of_an_elements_row(shape: tuple[int, int], device: torch.device) -> None:
    x = numbers(*shape, torch.bfloat16)
    q, scale_inv = twin.cast_rowwise(x, E4M3, False, 1e-12)
    scale_inv *= torch.rand(scale_inv.shape, generator=torch.Generator().manual_seed(1)) + 0.5
    wanted = written_out(x, q, scale_inv[:, None].expand(shape))
    for where in ("cpu", device):
        counts, sums = twin.cast_stats(x.to(where), q.to(where), scale_inv.to(where))
        assert (counts.tolist(), sums.tolist()) == wanted
    with pytest.raises(ValueError, match=r"^twin::cast_stats: scale_inv must be contiguous torch.float32 \[1\] or \["):
        twin.cast_stats(x, q, torch.ones(2))


def test_pieces_beyond_the_first_chains() -> None:
    """More than 256 pieces of 4096, so that a chain of pieces has two links, and more than is computed at once."""
    x = numbers(4160, 272, torch.bfloat16)
    q, scale_inv = twin.cast(x, torch.ones(1), None, 0, E4M3)
    counts, sums = twin.cast_stats(x, q, scale_inv)
    expected = written_out(x, q, scale_inv)
    assert x.numel() > 257 * 4096
    assert counts.tolist() == expected[0]
    assert sums.tolist() == expected[1]


def test_saturation_begins_where_rounding_would_leave_the_format() -> None:
    """Up to 464 the nearest code is 448, the largest; in E5M2 up to 61440."""
    for fp8, least in ((E4M3, 464.0), (E5M2, 61440.0)):
        assert cast_stats.limit(fp8) == least
        x = torch.tensor([[least, -least, math.nextafter(least, 1e9), least * 2] + [0.0] * 12])
        x[0, 2] = np.nextafter(np.float32(least), np.float32(1e9)).item()
        q, scale_inv = twin.cast(x, torch.ones(1), None, 0, fp8)
        assert twin.cast_stats(x, q, scale_inv)[0].tolist() == [2, 0, 0, 0]


def test_the_codes_are_compared_not_made_anew() -> None:
    """Other codes have another noise: twice the value is an error as large as the value."""
    x = torch.full((16, 16), 3.0)
    q, scale_inv = twin.cast(2 * x, torch.ones(1), None, 0, E4M3)
    signal, noise, amax = twin.cast_stats(x, q, scale_inv)[1].tolist()
    assert (signal, noise, amax) == (9.0 * 256, 9.0 * 256, 3.0)


@pytest.mark.parametrize("dtype", WIDE)
def test_without_codes_only_x_is_counted(dtype: torch.dtype) -> None:
    x = numbers(37, 48, dtype)
    q, scale_inv = twin.cast(x, torch.ones(1), None, 0, E4M3)
    (_, _, nan, inf), (signal, _, amax) = (one.tolist() for one in twin.cast_stats(x, q, scale_inv))
    counts, sums = twin.cast_stats(x, None, None)
    assert counts.tolist() == [0, 0, nan, inf]
    assert sums.tolist() == [signal, 0.0, amax]


def test_no_elements() -> None:
    counts, sums = twin.cast_stats(torch.empty(0, 16), torch.empty(0, 16).to(E4M3), torch.ones(1))
    assert counts.tolist() == [0, 0, 0, 0]
    assert sums.tolist() == [0.0, 0.0, 0.0]


def test_a_view_that_starts_anywhere() -> None:
    x = numbers(1, 16 * 33, torch.bfloat16).reshape(-1)[3 : 3 + 16 * 32].view(32, 16)
    q, scale_inv = twin.cast(x, torch.ones(1), None, 0, E5M2)
    for a, b in zip(twin.cast_stats(x, q, scale_inv), twin.cast_stats(x.clone(), q, scale_inv), strict=True):
        assert_same_bits(a, b)


def test_refusals() -> None:
    x, q, one = torch.ones(4, 16), torch.ones(4, 16).to(E4M3), torch.ones(1)
    with pytest.raises(ValueError, match=r"^twin::cast_stats: x must be 2-D, \[rows, cols\]"):
        twin.cast_stats(x[0], q, one)
    with pytest.raises(ValueError, match=r"^twin::cast_stats: q is a tensor and scale_inv None; both or neither are"):
        twin.cast_stats(x, q, None)
    with pytest.raises(ValueError, match=r"^twin::cast_stats: scale_inv is a tensor and q None; both or neither are"):
        twin.cast_stats(x, None, one)
    with pytest.raises(ValueError, match=r"^twin::cast_stats: q must be torch.float8_e4m3fn or torch.float8_e5m2; got"):
        twin.cast_stats(x, x, one)
    with pytest.raises(ValueError, match=r"^twin::cast_stats: q must be contiguous torch.float8_e4m3fn \[4, 16\]"):
        twin.cast_stats(x, q[:2], one)
    with pytest.raises(ValueError, match=r"^twin::cast_stats: scale_inv must be contiguous torch.float32 \[1\]"):
        twin.cast_stats(x, q, torch.ones(2))


def compare(x: torch.Tensor, q: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
    there = [None if one is None else one.cuda() for one in (x, q, scale_inv)]
    torch.full((1 << 20,), math.nan, dtype=torch.float64, device="cuda")  # what the allocator hands out next
    for a, b in zip(twin.cast_stats(x, q, scale_inv), twin.cast_stats(*there), strict=True):
        assert_same_bits(b, a, f"{x.dtype} {list(x.shape)}")


@pytest.mark.gpu
@pytest.mark.simulated
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


@pytest.mark.gpu
@pytest.mark.simulated
def test_every_code() -> None:
    for fp8 in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(fp8)
        for value in (0.0, 1.0, math.nan):
            compare(torch.full((16, 16), value), codes, torch.tensor([0.7]))


@pytest.mark.gpu
@pytest.mark.simulated
def test_a_view_that_starts_anywhere_on_both_sides() -> None:
    x = numbers(1, 16 * 33, torch.bfloat16).cuda().reshape(-1)[3 : 3 + 16 * 32].view(32, 16)
    q, scale_inv = twin.cast(x, torch.ones(1).cuda(), None, 0, E5M2)
    for a, b in zip(twin.cast_stats(x, q, scale_inv), twin.cast_stats(x.cpu(), q.cpu(), scale_inv.cpu()), strict=True):
        assert_same_bits(a, b)
