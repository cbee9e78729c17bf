"""Parts of a GEMM along K, each from the accumulators of the one before, have the words of the whole."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.dry_gpu import DryGpu

from optimized.ops.gemms import gemm_fp8_blocks
from optimized.ops.gemms.gemm_part import (
    SQUARES,
    gemm_fp8_blocks_part_tiled,
    gemm_fp8_end_tiled,
    gemm_fp8_part_tiled,
    gemm_part_tiled,
)
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES, Tile
from reference.ops.casts.cast_blocks import BLOCK, scale_shape
from reference.ops.gemms.gemm_part import CUTS
from reference.ops.library import twin

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def matrices(seed: int, m: int, n: int, k: int, dtypes: tuple[torch.dtype, torch.dtype], wild: bool) -> Any:
    """a and b; wild ones have large and tiny numbers beside each other, and now and then NaN."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for rows, dtype in ((m, dtypes[0]), (n, dtypes[1])):
        x = torch.randn(rows, k, generator=g)
        if wild:
            x *= 2.0 ** torch.randint(-12, 8, x.shape, generator=g)
            x[torch.rand(x.shape, generator=g) < 0.001] = torch.nan
        found.append(x.to(dtype))
    return found


def ranges(k: int, cut: int, places: list[float]) -> list[slice]:
    """[0, k) cut at multiples of `cut`."""
    steps = k // cut
    edges = sorted({0, k, *(int(place * steps) * cut for place in places)})
    return [slice(*pair) for pair in itertools.pairwise(edges)]


SHAPES = {
    "seed": st.integers(0, 1 << 16),
    "m": st.integers(1, 9),
    "steps": st.integers(1, 40),
    "places": st.lists(st.floats(0, 1), min_size=1, max_size=4),
    "wild": st.booleans(),
}


@settings(max_examples=40, deadline=None)
@given(**SHAPES, dtype=st.sampled_from([BF16, FP16]), out=st.sampled_from([BF16, FP16, FP32]), bias=st.booleans())
def test_16_bits(seed, m, steps, places, wild, dtype, out, bias):
    k = 16 * steps + seed % 16  # the last step may be short
    a, b = matrices(seed, m, 5, k, (dtype, dtype), wild)
    b1 = torch.randn(5).to(dtype) if bias else None
    acc = None
    for one in ranges(k, CUTS["16 bits"], places):
        acc = twin.gemm_part(a[:, one], b[:, one], acc)
    assert_same_bits(twin.end_gemm(acc, None, None, b1, out), twin.gemm(a, b, b1, out), "the whole")


@settings(max_examples=60, deadline=None)
@given(
    **SHAPES,
    dtypes=st.sampled_from([(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]),
    out=st.sampled_from([BF16, FP32]),
    accumulate=st.sampled_from(["fast", "split"]),
)
def test_fp8(seed, m, steps, places, wild, dtypes, out, accumulate):
    k = 16 * steps
    a, b = matrices(seed, m, 16, k, dtypes, wild)
    scales, bias = (torch.tensor([0.013]), torch.tensor([1.7])), torch.randn(16).to(BF16)
    acc = None
    for one in ranges(k, CUTS[accumulate], places):
        acc = twin.gemm_fp8_part(a[:, one].contiguous(), b[:, one].contiguous(), acc, accumulate)
    whole = twin.gemm_fp8(a, b, *scales, bias, out, accumulate)
    assert_same_bits(twin.end_gemm(acc, *scales, bias, out), whole, accumulate)


@settings(max_examples=60, deadline=None)
@given(
    **SHAPES,
    dtypes=st.sampled_from([(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]),
    out=st.sampled_from([BF16, FP16, FP32]),
    bias=st.sampled_from([None, BF16, FP16, FP32]),
    accumulate=st.sampled_from(["fast", "split"]),
)
def test_the_last_part_and_the_end_at_once(seed, m, steps, places, wild, dtypes, out, bias, accumulate):
    k = 16 * steps
    a, b = matrices(seed, m, 16, k, dtypes, wild)
    scales, vector = (torch.tensor([0.013]), torch.tensor([1.7])), None if bias is None else torch.randn(16).to(bias)
    acc = None
    *before, last = ranges(k, CUTS[accumulate], places)
    for one in before:
        acc = twin.gemm_fp8_part(a[:, one], b[:, one], acc, accumulate)
    found = twin.gemm_fp8_end(a[:, last], b[:, last], *scales, vector, acc, out, accumulate)
    sums = twin.gemm_fp8_part(a[:, last], b[:, last], acc, accumulate)
    assert_same_bits(found, twin.end_gemm(sums, *scales, vector, out), "a part and then the end")
    assert_same_bits(found, twin.gemm_fp8(a, b, *scales, vector, out, accumulate), "the whole")


@settings(max_examples=40, deadline=None)
@given(
    **SHAPES,
    squares=st.sampled_from([(False, False), (False, True), (True, False)]),
    dialect=st.sampled_from(["fp32", "power_of_two"]),
)
def test_blocks(seed, m, steps, places, wild, squares, dialect):
    k = 16 * steps
    g = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, k, generator=g) * 2.0 ** torch.randint(-9, 9, (1, k), generator=g) for rows in (m, 16))

    def operands(one: slice) -> Any:
        casts = [
            twin.cast_blocks(t[:, one].contiguous(), E4M3, square, dialect, 0.0)
            for t, square in zip((x, w), squares, strict=True)
        ]
        (a, a_scale), (b, b_scale) = casts
        return a, b, a_scale, b_scale, *squares

    acc = None
    for one in ranges(k, BLOCK, places):
        acc = twin.gemm_fp8_blocks_part(*operands(one), acc)
    whole = twin.gemm_fp8_blocks(*operands(slice(0, k)), None, BF16)
    assert_same_bits(twin.end_gemm(acc, None, None, None, BF16), whole, dialect)


def test_other_cuts_give_other_words():
    """Why a layer refuses them: a step that is cut in two truncates twice, and half a chain of 128 is a chain."""
    a, b = matrices(3, 64, 64, 256, (E4M3, E4M3), False)
    for accumulate, cut in (("fast", 16), ("split", 64)):
        acc = None
        for one in (slice(0, cut), slice(cut, 256)):
            acc = twin.gemm_fp8_part(a[:, one].contiguous(), b[:, one].contiguous(), acc, accumulate)
        assert not torch.equal(acc, twin.gemm_fp8_part(a, b, None, accumulate)), accumulate


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 64, 8192), (64, 4096, 512), (300, 1808, 16384), (4096, 12288, 256)])
def test_a_part_has_the_tile_of_the_whole(m: int, n: int, k: int) -> None:
    """It reads and multiplies as much, so the same tile is the fastest."""

    def tile(op: str, *args: Any) -> list[Any]:
        getattr(twin, op)(*args)
        (launched,) = gpu.launches
        gpu.launches.clear()
        return [launched.kernel.defines.get(name) for name in ("WARPGROUPS", "BLOCK_N", "STAGES", "CLUSTER")]

    with DryGpu(written=False) as gpu:
        one, acc = torch.empty(1, device="cuda"), torch.empty(m, n, device="cuda")
        a, b = (torch.empty(rows, k, dtype=BF16, device="cuda") for rows in (m, n))
        assert tile("gemm_part", a, b, acc) == tile("gemm", a, b, None, BF16)
        a, b = (torch.empty(rows, k, dtype=E4M3, device="cuda") for rows in (m, n))
        for accumulate in ("fast", "split"):
            whole = tile("gemm_fp8", a, b, one, one, None, BF16, accumulate)
            assert tile("gemm_fp8_part", a, b, acc, accumulate) == whole
            assert tile("gemm_fp8_end", a, b, one, one, None, acc, BF16, accumulate) == whole
        for squares in SQUARES:
            shapes = (scale_shape(rows, k, square) for rows, square in zip((m, n), squares, strict=True))
            inverses = [torch.empty(*shape, device="cuda") for shape in shapes]
            whole = tile("gemm_fp8_blocks", a, b, *inverses, *squares, None, BF16)
            assert tile("gemm_fp8_blocks_part", a, b, *inverses, *squares, acc) == whole


def test_the_end_takes_16_bytes_at_once_where_accumulators_begin_there() -> None:
    with DryGpu(written=False) as gpu:
        memory = torch.empty(5 * 48 + 4, device="cuda")
        for start, out in itertools.product(range(5), (BF16, FP16, FP32)):
            twin.end_gemm(memory[start : start + 5 * 48].view(5, 48), None, None, None, out)
        assert [int(launched.args[-1]) for launched in gpu.launches] == [1] * 3 + [0] * 9 + [1] * 3


def test_the_accumulator_that_was_given_stays():
    a, b = matrices(0, 4, 16, 128, (E4M3, E4M3), False)
    start = torch.randn(4, 16)
    before = start.clone()
    scales = (
        twin.cast_blocks(a.float(), E4M3, False, "fp32", 0.0)[1],
        twin.cast_blocks(b.float(), E4M3, False, "fp32", 0.0)[1],
    )
    twin.gemm_fp8_part(a, b, start, "split")
    twin.gemm_fp8_end(a, b, torch.ones(1), torch.ones(1), None, start, FP32, "split")
    twin.gemm_fp8_blocks_part(a, b, *scales, False, False, start)
    twin.gemm_part(a.to(BF16), b.to(BF16), start)
    assert torch.equal(start, before)


def test_what_is_refused():
    a, b = matrices(0, 4, 16, 128, (E4M3, E4M3), False)
    with pytest.raises(ValueError, match=r"accumulator is torch.float32 \(4, 8\), .*contiguous float32 \(4, 16\)"):
        twin.gemm_fp8_part(a, b, torch.zeros(4, 8), "fast")
    with pytest.raises(ValueError, match=r"accumulator is torch\.bfloat16"):
        twin.gemm_part(a.to(BF16), b.to(BF16), torch.zeros(4, 16, dtype=BF16))
    with pytest.raises(ValueError, match="one of a_scale_inv and b_scale_inv is None"):
        twin.end_gemm(torch.zeros(4, 16), torch.ones(1), None, None, BF16)
    with pytest.raises(ValueError, match=r"a_scale_inv is torch.float32 \(2,\)"):
        twin.end_gemm(torch.zeros(4, 16), torch.ones(2), torch.ones(1), None, BF16)
    with pytest.raises(ValueError, match=r"accumulator is torch.float32 \(4,\)"):
        twin.end_gemm(torch.zeros(4), None, None, None, BF16)
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"accumulator is torch.float32 \(4, 8\)"):
        twin.gemm_fp8_end(a, b, one, one, None, torch.zeros(4, 8), BF16, "fast")
    with pytest.raises(ValueError, match=r"b_scale_inv is torch.float32 \(2,\)"):
        twin.gemm_fp8_end(a, b, one, torch.ones(2), None, None, BF16, "fast")
    with pytest.raises(ValueError, match=r"bias has shape \(4,\)"):
        twin.gemm_fp8_end(a, b, one, one, torch.zeros(4), None, BF16, "fast")
    with pytest.raises(TypeError, match=r"out_dtype is torch\.float64"):
        twin.gemm_fp8_end(a, b, one, one, None, None, torch.float64, "fast")
    with pytest.raises(ValueError, match="accumulate is 'slow'"):
        twin.gemm_fp8_end(a, b, one, one, None, None, BF16, "slow")
    with pytest.raises(ValueError, match="gemm_fp8_end takes contiguous rows, which begin multiples of 16 bytes apart"):
        twin.gemm_fp8_end(a.t(), b, one, one, None, None, BF16, "fast")


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
def test_every_tile_goes_on_from_accumulators(tile: Tile, accumulate: str) -> None:
    """Three parts of K on ragged shapes, each from the one before, have the words of the whole on a CPU."""
    for m, n, k in ((70, 272, 400), (264, 48, 528)):
        a, b = matrices(m, m, n, k, (E4M3, E5M2), False)
        acc = None
        for one in ranges(k, CUTS[accumulate], [0.4, 0.9]):
            operands = (a[:, one].contiguous().cuda(), b[:, one].contiguous().cuda())
            acc = gemm_fp8_part_tiled(*operands, acc, accumulate, tile)
        assert acc is not None
        assert_same_bits(acc, twin.gemm_fp8_part(a, b, None, accumulate), f"{tile}, {(m, n, k)}")


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
def test_every_tile_ends_a_gemm(tile: Tile, accumulate: str) -> None:
    """The last of two parts with what follows it, on ragged shapes and to each dtype."""
    scales = (torch.tensor([0.013]), torch.tensor([1.7]))
    cases = (((70, 272, 400), BF16, BF16), ((264, 48, 528), FP16, FP32), ((131, 80, 272), FP32, None))
    for (m, n, k), out, bias in cases:
        a, b = matrices(m, m, n, k, (E4M3, E4M3), False)
        vector = None if bias is None else torch.randn(n).to(bias)
        first, last = ranges(k, CUTS[accumulate], [0.6])
        start = twin.gemm_fp8_part(a[:, first], b[:, first], None, accumulate).cuda()
        operands = [one[:, last].contiguous().cuda() for one in (a, b)]
        rest = [None if one is None else one.cuda() for one in (*scales, vector)]
        found = gemm_fp8_end_tiled(*operands, *rest, start, out, accumulate, tile)  # type: ignore[arg-type]
        expected = twin.gemm_fp8(a, b, *scales, vector, out, accumulate)
        assert_same_bits(found, expected, f"{tile}, {(m, n, k)}")


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("squares", "tile"), [(squares, tile) for squares in SQUARES for tile, _ in gemm_fp8_blocks.costs(squares)], ids=str
)
def test_every_tile_of_blocks_goes_on_from_accumulators(squares: tuple[bool, bool], tile: Tile) -> None:
    g = torch.Generator().manual_seed(5)
    m, n, k = 200, 272, 400
    x, w = (torch.randn(rows, k, generator=g) * 2.0 ** torch.randint(-9, 9, (1, k), generator=g) for rows in (m, n))
    acc = expected = None
    for one in ranges(k, BLOCK, [0.4, 0.9]):
        casts = [
            twin.cast_blocks(t[:, one].contiguous(), E4M3, square, "fp32", 0.0)
            for t, square in zip((x, w), squares, strict=True)
        ]
        operands = [*(q for q, _ in casts), *(scales for _, scales in casts)]
        expected = twin.gemm_fp8_blocks_part(*operands, *squares, expected)
        acc = gemm_fp8_blocks_part_tiled(*[t.cuda() for t in operands], *squares, acc, tile)  # type: ignore[misc]
    assert acc is not None
    assert_same_bits(acc, expected, f"{squares}, {tile}")


@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_of_16_bits_goes_on_from_accumulators(tile: Tile, dtype: torch.dtype) -> None:
    for m, n, k in ((70, 272, 200), (131, 47, 136)):
        a, b = matrices(m, m, n, k, (dtype, dtype), False)
        acc = None
        for one in ranges(k, CUTS["16 bits"], [0.4, 0.9]):
            operands = (a[:, one].contiguous().cuda(), b[:, one].t().contiguous().cuda().t())
            acc = gemm_part_tiled(*operands, acc, tile)
        assert acc is not None
        assert_same_bits(acc, twin.gemm_part(a, b, None), f"{tile}, {(m, n, k)}")
        for bias in (None, torch.randn(n).to(dtype)):
            there = None if bias is None else bias.cuda()
            found = twin.end_gemm(acc, None, None, there, dtype)
            assert_same_bits(found, twin.gemm(a, b, bias, dtype), f"{tile}, {(m, n, k)}, the end")
