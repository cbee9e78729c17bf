"""twin::gemm (bf16, fp16) on Hopper equals its definition on the CPU in every bit, in every layout."""

import itertools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

from optimized.ops.gemms.gemm import gemm_tiled
from optimized.ops.gemms.gemm_tile import TILES, Tile

DTYPES = (torch.bfloat16, torch.float16)
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
# Odd sizes need the padded copy and the guarded stores; multiples of 8 need neither.
SHAPES = ((1, 1, 1), (1, 8, 8), (3, 5, 7), (40, 72, 200), (65, 131, 70), (130, 264, 136))
LAYOUTS = list(itertools.product((False, True), (False, True)))
twin = torch.ops.twin


def draw(seed: int, rows: int, cols: int, dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
    """Normal values `[rows, cols]`, row-major or a transposed view, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shape = (cols, rows) if transposed else (rows, cols)
    values = torch.randn(shape, generator=generator).to(dtype)
    return values.t() if transposed else values


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """The same layout on the GPU: `.cuda()` would keep it too, but not for every degenerate shape."""
    return x.t().contiguous().cuda().t() if x.stride(1) != 1 else x.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_and_layout_on_ragged_shapes(tile: Tile, transpose_a: bool, transpose_b: bool) -> None:
    """Poisoned outputs: what the kernel leaves unwritten would show, and what it writes outside too."""
    for m, n, k in SHAPES:
        a = draw(m, m, k, torch.bfloat16, transpose_a)
        b = draw(n + 1, n, k, torch.bfloat16, transpose_b)
        memory = torch.full((m * n + 256,), -77.0, dtype=torch.bfloat16, device="cuda")
        out = memory[128 : 128 + m * n].view(m, n)
        gemm_tiled(on_gpu(a), on_gpu(b), None, torch.bfloat16, tile, out)
        assert_same_bits(out, twin.gemm(a, b, None, torch.bfloat16), f"{tile}, {(m, n, k)}")
        assert bool((memory[:128] == -77).all()), f"{tile}, {(m, n, k)}: written before the output"
        assert bool((memory[128 + m * n :] == -77).all()), f"{tile}, {(m, n, k)}: written after the output"


@pytest.mark.gpu
@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS)
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.narrow < tile.block_n], ids=str)
def test_every_cut_into_wide_and_narrow_tiles(tile: Tile, transpose_a: bool, transpose_b: bool) -> None:
    """From wide tiles alone to all that are possible, in rows of as many and of one more; and more than one wave."""
    for m, n, k in ((260, 1792, 80), (140, 3611, 40), (9000, 1800, 8)):
        a = draw(m, m, k, torch.bfloat16, transpose_a)
        b = draw(n + 1, n, k, torch.bfloat16, transpose_b)
        whole, most = tile.count(m, n), tile.rows(m) * (n // tile.narrow)
        for out_dtype in (torch.bfloat16, torch.float32):
            expected = twin.gemm(a, b, None, out_dtype)
            for cut in sorted({whole, whole + 1, (whole + most) // 2, most}):
                memory = torch.full((m * n + 256,), -77.0, dtype=out_dtype, device="cuda")
                out = memory[128 : 128 + m * n].view(m, n)
                gemm_tiled(on_gpu(a), on_gpu(b), None, out_dtype, tile, out, cut=cut)
                assert_same_bits(out, expected, f"{tile}, {(m, n, k)}, {cut} of {whole} to {most}")
                assert bool((memory[:128] == -77).all()), f"{(m, n, k)}, {cut}: written before the output"
                assert bool((memory[128 + m * n :] == -77).all()), f"{(m, n, k)}, {cut}: written after the output"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(33, 48, 80), (21, 37, 45)])
def test_outputs_and_bias(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    a, b = draw(1, m, k, dtype), draw(2, n, k, dtype)
    generator = torch.Generator().manual_seed(3)
    for out_dtype, bias_dtype in itertools.product(OUTPUTS, (None, *OUTPUTS)):
        bias = None if bias_dtype is None else torch.randn(n, generator=generator).to(bias_dtype)
        ours = twin.gemm(a.cuda(), b.cuda(), None if bias is None else bias.cuda(), out_dtype)
        assert_same_bits(ours, twin.gemm(a, b, bias, out_dtype), f"{out_dtype}, bias {bias_dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: torch.dtype) -> None:
    """All words at random (every kind of number in every sum), then rows of one kind."""
    m, n, k = 24, 40, 48
    generator = torch.Generator().manual_seed(4)
    words = [torch.randint(-(2**15), 2**15, (r, k), generator=generator, dtype=torch.int16) for r in (m, n)]
    a, b = draw(6, m, k, dtype), draw(7, n, k, dtype)
    least = torch.tensor(1, dtype=torch.int16).view(dtype).item()
    a[0], a[1], a[2], a[3, 5], a[4, 40], a[5, 3] = 0, -0.0, least, float("nan"), float("inf"), float("-inf")
    b[0], b[1, 40] = 0, float("inf")
    for x, y in ((words[0].view(dtype), words[1].view(dtype)), (a, b)):
        for out_dtype in (torch.float32, dtype):
            ours = twin.gemm(x.cuda(), y.cuda(), None, out_dtype)
            assert_same_bits(ours, twin.gemm(x, y, None, out_dtype), f"{out_dtype}")


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 200),
    n=st.integers(0, 300),
    k=st.integers(0, 300),
    tile=st.sampled_from(TILES),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_random_problems(
    m: int, n: int, k: int, tile: Tile, layout: tuple[bool, bool], dtype: torch.dtype, seed: int
) -> None:
    a, b = draw(seed, m, k, dtype, layout[0]), draw(seed + 1, n, k, dtype, layout[1])
    bias = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    ours = gemm_tiled(on_gpu(a), on_gpu(b), bias.cuda(), dtype, tile)
    assert_same_bits(ours, twin.gemm(a, b, bias, dtype), f"{tile}")


@pytest.mark.gpu
@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS)
def test_cublas_agrees(transpose_a: bool, transpose_b: bool) -> None:
    """torch.mm, where cuBLAS does not split K."""
    a = on_gpu(draw(1, 2048, 1024, torch.bfloat16, transpose_a))
    b = on_gpu(draw(2, 4096, 1024, torch.bfloat16, transpose_b))
    assert_same_bits(twin.gemm(a, b, None, torch.bfloat16), a @ b.t(), "torch.mm")


@pytest.mark.gpu
def test_views_of_larger_matrices() -> None:
    """Rows that lie further apart than they are long, and a slice that does not start at 16 bytes."""
    memory = draw(1, 50, 256, torch.bfloat16)
    b = draw(2, 40, 64, torch.bfloat16)
    for start in (0, 64, 3):
        a = memory[:, start : start + 64]
        ours = twin.gemm(memory.cuda()[:, start : start + 64], b.cuda(), None, torch.float32)
        assert_same_bits(ours, twin.gemm(a, b, None, torch.float32), f"columns from {start}")


@pytest.mark.gpu
def test_two_runs_and_a_graph_give_the_same_bits() -> None:
    a, b = draw(1, 1111, 2056, torch.bfloat16).cuda(), draw(2, 1032, 2056, torch.bfloat16).cuda()
    first = twin.gemm(a, b, None, torch.bfloat16)
    assert_same_bits(twin.gemm(a, b, None, torch.bfloat16), first, "second run")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = twin.gemm(a, b, None, torch.bfloat16)
    captured.fill_(7)
    graph.replay()
    assert_same_bits(captured, first, "graph replay")


@pytest.mark.gpu
def test_the_padded_copy_says_so_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reference.support.notice._said", set())
    a = draw(1, 5, 7, torch.bfloat16).cuda()
    with caplog.at_level(logging.WARNING):
        twin.gemm(a, a, None, torch.bfloat16)
        twin.gemm(a, a, None, torch.bfloat16)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "twin::gemm got a matrix whose rows do not start at multiples of 16 bytes"
    ]
