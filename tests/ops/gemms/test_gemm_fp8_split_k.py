"""Split accumulation spread over K: it equals the definition of twin::gemm_fp8 in every bit, and runs where it pays."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.determinism import assert_same_again
from shared.gemm_codes import E4M3, E5M2, FORMATS, OUTPUTS, draw, normal, on_gpu, one, random_codes

import optimized.ops  # noqa: F401  (registers the ops)
from optimized.cuda import launch
from optimized.ops.gemms.gemm_fp8_split_k import RESIDENT, gemm_fp8_split_k, is_faster, partition
from optimized.tapes import Tape

twin = torch.ops.twin


def compare(
    m: int, n: int, k: int, formats: tuple[torch.dtype, torch.dtype], out: torch.dtype, bias: torch.Tensor | None
) -> None:
    args = (draw(m, m, k, formats[0]), draw(n + 1, n, k, formats[1]), one(0.37), one(1.7), bias)
    ours = gemm_fp8_split_k(*on_gpu(*args), out)  # type: ignore[arg-type]
    assert_same_bits(ours, twin.gemm_fp8(*args, out, "split"), f"{(m, n, k)}, {formats}, {out}")


@pytest.mark.gpu
@pytest.mark.parametrize(("a_format", "b_format"), list(itertools.product(FORMATS, FORMATS)))
def test_formats_outputs_and_bias(a_format: torch.dtype, b_format: torch.dtype) -> None:
    for out in OUTPUTS:
        for bias in (None, *(normal(3, 80).to(dtype) for dtype in OUTPUTS)):
            compare(37, 80, 1168, (a_format, b_format), out, bias)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 16, 16), (1, 16, 40000), (16, 64, 16384), (65, 80, 4112), (129, 144, 2064), (7, 1040, 8192)]
)
def test_edges_of_every_dimension(shape: tuple[int, int, int]) -> None:
    """One k-block; more slabs than a block of the second kernel holds at once; rows and columns that do not exist."""
    compare(*shape, (E4M3, E4M3), torch.float32, None)


@pytest.mark.gpu
def test_special_values() -> None:
    """NaN in most sums; then NaN, infinities and zeros in few rows, which reach their own outputs alone."""
    dense = random_codes(4, 40, 1168, E4M3), random_codes(5, 32, 1168, E5M2)
    a, b = draw(1, 20, 1024, E4M3), draw(2, 48, 1024, E5M2)
    a.view(torch.uint8)[3, 5] = 0x7F  # NaN
    a.view(torch.uint8)[4] = 0x80  # -0
    b.view(torch.uint8)[7, 900] = 0x7C  # infinity
    for x, y in (dense, (a, b)):
        args = (x, y, one(1.0), one(2.0**-20), None)
        ours = gemm_fp8_split_k(*on_gpu(*args), torch.float32)  # type: ignore[arg-type]
        assert_same_bits(ours, twin.gemm_fp8(*args, torch.float32, "split"))


@pytest.mark.gpu
@settings(max_examples=30, deadline=None)
@given(
    m=st.integers(1, 200),
    n=st.integers(1, 16).map(lambda i: 16 * i),
    k=st.integers(1, 200).map(lambda i: 16 * i),
    out=st.sampled_from(OUTPUTS),
)
def test_random_problems(m: int, n: int, k: int, out: torch.dtype) -> None:
    compare(m, n, k, (E5M2, E4M3), out, normal(m, n))


@pytest.mark.gpu
def test_the_op_takes_this_way_and_captures_it() -> None:
    """Two runs, two streams at once, a graph, and its launches made again."""
    args = on_gpu(draw(1, 30, 16384, E4M3), draw(2, 96, 16384, E4M3), one(0.5), one(0.3), None)
    assert is_faster(30, 96, 16384, 132)

    def product() -> torch.Tensor:
        return twin.gemm_fp8(*args, torch.bfloat16, "split")

    first = assert_same_again(product)
    tape = Tape()
    with launch.recording(tape):
        recorded = product()
    recorded.fill_(7)
    tape.play(0)
    assert_same_bits(recorded, first, "launches made again")


def test_every_k_block_has_one_block() -> None:
    for m, n, k in itertools.product((1, 64, 65, 1000), (16, 4096), (16, 128, 16384, 40000)):
        tiles, parts, count = partition(m, n, k, 132)
        k_blocks = -(-k // 128)
        assert (parts - 1) * count < k_blocks <= parts * count, (m, n, k)
        assert tiles * parts <= RESIDENT * 132 or parts == 1


def test_it_is_chosen_for_few_tiles_and_a_long_k() -> None:
    for m, n, k in ((1, 2048, 32768), (7, 48, 32768), (128, 16, 16384), (64, 64, 8192)):
        assert is_faster(m, n, k, 132), (m, n, k)
    for m, n, k in ((8192, 4096, 16384), (4096, 4096, 4096), (64, 64, 512), (16, 16384, 4096), (4, 8192, 32768)):
        assert not is_faster(m, n, k, 132), (m, n, k)
