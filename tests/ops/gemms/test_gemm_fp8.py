"""twin::gemm_fp8 on Hopper equals its definition on the CPU in every bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.determinism import assert_same_again
from shared.gemm_codes import E4M3, E5M2, FORMATS, OUTPUTS, draw, normal, on_gpu, one, random_codes

import optimized.ops
from optimized.ops.gemms.gemm_fp8 import gemm_fp8_tiled
from optimized.ops.gemms.gemm_tile import FP8_TILES, Tile

# Fewer rows than a warpgroup, odd ones, one more than a tile; K of half a step, of no whole block, of several.
RAGGED = ((1, 16, 16), (7, 48, 144), (17, 272, 48), (127, 32, 400), (129, 80, 128), (70, 528, 272))
twin = torch.ops.twin


@pytest.mark.sample(10)
@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
def test_every_tile_on_ragged_shapes(tile: Tile, accumulate: str) -> None:
    """Poisoned outputs: what the kernel leaves unwritten would show, and what it writes outside too."""
    for m, n, k in RAGGED:
        a, b = draw(m, m, k, E4M3), draw(n + 1, n, k, E4M3)
        args = (a, b, one(0.37), one(1.7), None)
        memory = torch.full((m * n + 256,), -77.0, dtype=torch.float32, device="cuda")
        out = memory[128 : 128 + m * n].view(m, n)
        gemm_fp8_tiled(*on_gpu(*args), torch.float32, accumulate, tile, out)  # type: ignore[arg-type]
        assert_same_bits(out, twin.gemm_fp8(*args, torch.float32, accumulate), f"{tile}, {(m, n, k)}")
        assert bool((memory[:128] == -77).all()), f"{tile}, {(m, n, k)}: written before the output"
        assert bool((memory[128 + m * n :] == -77).all()), f"{tile}, {(m, n, k)}: written after the output"


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("tile", [tile for tile in FP8_TILES if tile.warpgroups == 1], ids=str)
def test_producers_and_chains_go_around_the_ring_of_stages(tile: Tile, accumulate: str) -> None:
    """Up to twice as many k-blocks as there are stages: even and odd numbers, which four producers share unevenly."""
    for m, n, k in ((70, 80, 4112), (65, 144, 3200), (5, 16, 5904)):
        a, b = draw(m, m, k, E4M3), draw(n + 1, n, k, E4M3)
        args = (a, b, one(0.37), one(1.7), None, torch.float32, accumulate)
        ours = gemm_fp8_tiled(*on_gpu(*args[:5]), *args[5:], tile)  # type: ignore[arg-type]
        assert_same_bits(ours, twin.gemm_fp8(*args), f"{tile}, {(m, n, k)}")


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("tile", [tile for tile in FP8_TILES if tile.warpgroups == 1], ids=str)
def test_producers_take_turns_from_tile_to_tile(tile: Tile, accumulate: str) -> None:
    """Several tiles a block, of stages that four producers share unevenly: who skips a round of the ring is lost."""
    for k in (1280, 1536, 1792, 1920):
        a, b = (torch.randn(rows, k, device="cuda").to(E4M3) for rows in (19200, 48))
        args = (a, b, *on_gpu(one(0.37), one(1.7)), None, torch.bfloat16, accumulate)
        ours, expected = (gemm_fp8_tiled(*args, each) for each in (tile, Tile(2, 128, 7)))  # type: ignore[arg-type]
        assert_same_bits(ours, expected, f"{tile}, {k}")


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("tile", [tile for tile in FP8_TILES if tile.narrow < tile.block_n], ids=str)
def test_every_cut_into_wide_and_narrow_tiles(tile: Tile, accumulate: str, out_dtype: torch.dtype) -> None:
    """From wide tiles alone to all that are possible, in rows of as many and of one more; and more than one wave."""
    for m, n, k in ((260, 1792, 80), (300, 3616, 272), (140, 3600, 48), (9000, 1792, 16)):
        a, b = draw(m, m, k, E4M3), draw(n + 1, n, k, E4M3)
        args = (a, b, one(0.37), one(1.7), normal(3, n))
        expected = twin.gemm_fp8(*args, out_dtype, accumulate)
        whole, most = tile.count(m, n), tile.rows(m) * (n // tile.narrow)
        for cut in sorted({whole, whole + 1, (whole + most) // 2, most}):
            memory = torch.full((m * n + 256,), -77.0, dtype=out_dtype, device="cuda")
            out = memory[128 : 128 + m * n].view(m, n)
            gemm_fp8_tiled(*on_gpu(*args), out_dtype, accumulate, tile, out, cut=cut)  # type: ignore[arg-type]
            assert_same_bits(out, expected, f"{tile}, {(m, n, k)}, {cut} of {whole} to {most}")
            assert bool((memory[:128] == -77).all()), f"{(m, n, k)}, {cut}: written before the output"
            assert bool((memory[128 + m * n :] == -77).all()), f"{(m, n, k)}, {cut}: written after the output"


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
def test_what_shared_memory_held_before_reaches_no_output(tile: Tile, accumulate: str) -> None:
    """Rows that do not exist are not copied: there, what stands in shared memory is another product's NaN."""
    scales = on_gpu(one(1.0), one(1.0))
    nan = torch.full((2048, 1024), float("nan"), device="cuda").to(E4M3)
    for m, n, k in ((1, 16, 1040), (130, 272, 1040), (300, 288, 128)):
        a, b = draw(m, m, k, E4M3), draw(n + 1, n, k, E4M3)
        expected = twin.gemm_fp8(a, b, one(1.0), one(1.0), None, torch.bfloat16, accumulate)
        for x, y in ((nan, nan), (a.cuda(), b.cuda())):
            out = gemm_fp8_tiled(x, y, *scales, None, torch.bfloat16, accumulate, tile)  # type: ignore[arg-type]
        assert_same_bits(out, expected, f"{tile}, {(m, n, k)}")


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize(("a_format", "b_format"), list(itertools.product(FORMATS, FORMATS)))
def test_formats_outputs_and_bias(a_format: torch.dtype, b_format: torch.dtype, accumulate: str) -> None:
    m, n, k = 65, 96, 320
    a, b = draw(1, m, k, a_format), draw(2, n, k, b_format)
    biases = [None, *(normal(3, n).to(dtype) for dtype in OUTPUTS)]
    for out_dtype, bias in itertools.product(OUTPUTS, biases):
        args = (a, b, one(0.013), one(3.1), bias)
        ours = twin.gemm_fp8(*on_gpu(*args), out_dtype, accumulate)
        what = f"{out_dtype}, bias {None if bias is None else bias.dtype}"
        assert_same_bits(ours, twin.gemm_fp8(*args, out_dtype, accumulate), what)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize(("a_format", "b_format"), list(itertools.product(FORMATS, FORMATS)))
@pytest.mark.parametrize("k", [272, 128])  # 128: one chain, whichever the accumulation
def test_special_values(k: int, a_format: torch.dtype, b_format: torch.dtype, accumulate: str) -> None:
    """All codes at random (NaN in most sums), then rows that hold few of them: zeros, infinities, subnormals."""
    dense = random_codes(4, 40, k, a_format), random_codes(5, 32, k, b_format)
    a, b = draw(6, 40, k, a_format), draw(7, 32, k, b_format)
    a.view(torch.uint8)[0] = 0
    a.view(torch.uint8)[1] = 0x80
    a.view(torch.uint8)[2] = 1  # the least subnormal
    a.view(torch.uint8)[3, 5] = 0x7F  # NaN in both formats
    a.view(torch.uint8)[4, 100] = 0x7C  # infinity in E5M2
    a.view(torch.uint8)[5, 3] = 0xFC
    b.view(torch.uint8)[0] = 0
    b.view(torch.uint8)[1, 100] = 0x7C
    for x, y in (dense, (a, b)):
        for out_dtype in (torch.float32, torch.bfloat16):
            args = (x, y, one(1.0), one(2.0**-20), None)
            ours = twin.gemm_fp8(*on_gpu(*args), out_dtype, accumulate)
            assert_same_bits(ours, twin.gemm_fp8(*args, out_dtype, accumulate), str(out_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, 2.0**-100, 2.0**100, float("inf"), float("nan")])
def test_extreme_scales(scale: float) -> None:
    """The product of the scales is rounded first, then multiplies: it may be zero, infinite or NaN."""
    a, b = draw(8, 33, 64, E4M3), draw(9, 32, 64, E5M2)
    for other in (1.0, 2.0**60):
        args = (a, b, one(scale), one(other), None)
        ours = twin.gemm_fp8(*on_gpu(*args), torch.float32, "fast")
        assert_same_bits(ours, twin.gemm_fp8(*args, torch.float32, "fast"), f"{scale}, {other}")


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 300),
    n=st.integers(1, 20).map(lambda i: 16 * i),
    k=st.integers(0, 40).map(lambda i: 16 * i),
    tile=st.sampled_from(FP8_TILES),
    accumulate=st.sampled_from(["fast", "split"]),
    out_dtype=st.sampled_from(OUTPUTS[:2]),
    seed=st.integers(0, 2**31),
)
def test_random_problems(
    m: int, n: int, k: int, tile: Tile, accumulate: str, out_dtype: torch.dtype, seed: int
) -> None:
    a, b = draw(seed, m, k, E4M3, 2.0), draw(seed + 1, n, k, E4M3, 0.5)
    args = (a, b, one(0.7), one(1.3), normal(seed, n))
    ours = gemm_fp8_tiled(*on_gpu(*args), out_dtype, accumulate, tile)  # type: ignore[arg-type]
    assert_same_bits(ours, twin.gemm_fp8(*args, out_dtype, accumulate), f"{tile}")


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
def test_cublaslt_agrees(accumulate: str) -> None:
    """torch._scaled_mm in fp32; the long list, with the layer's shapes, is docs/results/gemm_equality.json."""
    for m, n, k in ((256, 512, 512), (1000, 2064, 2048), (1024, 4096, 512), (48, 128, 4096)):
        a, b = (draw(m, m, k, E4M3).cuda(), draw(n, n, k, E4M3).cuda())
        scales = one(0.37).cuda(), one(1.7).cuda()
        theirs = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.float32, use_fast_accum=accumulate == "fast")
        ours = twin.gemm_fp8(a, b, *scales, None, torch.float32, accumulate)
        assert_same_bits(ours, theirs, f"{(m, n, k)}")


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fast", "split"])
def test_two_runs_two_streams_and_a_graph_give_the_same_bits(accumulate: str) -> None:
    m, n, k = 1111, 1040, 2064
    args = on_gpu(draw(1, m, k, E4M3), draw(2, n, k, E4M3), one(0.5), one(0.3), None)
    assert_same_again(lambda: twin.gemm_fp8(*args, torch.bfloat16, accumulate))


@pytest.mark.gpu
def test_unaligned_operands_are_refused_with_a_sentence() -> None:
    memory = torch.zeros(16 * 32 + 8, dtype=torch.uint8, device="cuda").view(E4M3)
    a, b = memory[8:].view(16, 32), torch.zeros(16, 32, dtype=torch.uint8, device="cuda").view(E4M3)
    scale = one(1.0).cuda()
    with pytest.raises(ValueError, match=r"^a starts at address 0x\w+; the copy engine needs a multiple of 16"):
        twin.gemm_fp8(a, b, scale, scale, None, torch.float32, "fast")
    with pytest.raises(ValueError, match=r"^b_scale_inv is on cpu and a on cuda:0; gemm_fp8 runs on one device"):
        optimized.ops.gemms.gemm_fp8.gemm_fp8(b, b, scale, one(1.0), None, torch.float32, "fast")
