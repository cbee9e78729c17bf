"""`twin::cast_mxfp8`: Transformer Engine's words, the contract written out, sizes without whole blocks, refusals."""

import pytest
import torch
from shared.bits import assert_same_bits
from shared.block_vectors import VECTORS, Vector, made, recorded

from reference.numbers import block_formats, formats
from reference.ops import library

twin = torch.ops.twin
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("vector", VECTORS, ids=str)
@pytest.mark.parametrize("kind", ["rows", "square"])
def test_words_are_those_of_transformer_engine(kind: str, vector: Vector) -> None:
    words, x = recorded(), made(vector)
    codes, scales = twin.cast_mxfp8(x, E4M3, kind == "square")
    assert torch.equal(codes.view(torch.uint8), words[f"mxfp8 {vector} {kind} codes"])
    assert torch.equal(scales, words[f"mxfp8 {vector} {kind} scales"])


def slow(x: torch.Tensor, fp8: torch.dtype, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract, a block at a time."""
    rows, cols = x.shape
    count = -(-cols // 32)
    codes, scales = torch.zeros(rows, 32 * count, dtype=torch.uint8), torch.zeros(rows, count, dtype=torch.uint8)
    fmt = formats.format_of(fp8)
    for r in range(rows):
        for b in range(count):
            top = r // 32 * 32 if square else r
            block = x[top : top + 32 if square else r + 1, 32 * b : 32 * (b + 1)].float()
            numbers = block[~block.isnan()].abs()
            amax = numbers.max() if numbers.numel() else torch.zeros(())
            scales[r, b] = block_formats.e8m0_above(torch.div(amax, torch.tensor(fmt.largest)))
            factor = 2.0 ** (127 - int(scales[r, b]))
            mine = x[r, 32 * b : 32 * (b + 1)].double() * factor
            mine = torch.where(mine.isinf(), torch.nan, mine).float()
            codes[r, 32 * b : 32 * b + len(mine)] = formats.encode_by_integers(mine, fmt)
    return codes, scales


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("shape", [(33, 48), (5, 7), (1, 32), (64, 100)])
def test_the_contract_at_any_size(shape: tuple[int, int], dtype: torch.dtype, fp8: torch.dtype, square: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    x = (x * torch.exp2(torch.arange(shape[0]) % 30 - 15.0)[:, None]).to(dtype)
    x[0, 0], x[0, 3], x[shape[0] // 2, 5] = torch.nan, torch.inf, -torch.inf
    codes, scales = twin.cast_mxfp8(x, fp8, square)
    expected = slow(x, fp8, square)
    assert torch.equal(codes.view(torch.uint8), expected[0])
    assert torch.equal(scales, expected[1])


def test_square_blocks_of_the_transpose_are_the_transpose() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    codes, scales = twin.cast_mxfp8(x, E4M3, True)
    codes_t, scales_t = twin.cast_mxfp8(x.t().contiguous(), E4M3, True)
    assert_same_bits(codes, codes_t.t().contiguous())
    blocks = scales[::32]
    assert torch.equal(blocks, scales_t[::32].t())
    assert torch.equal(scales, blocks.repeat_interleave(32, 0))


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_division_and_reciprocal_give_one_power(largest: float) -> None:
    """Transformer Engine's kernels multiply by fp32(1 / fp8_max); for every fp32 amax of these exponents."""
    top = torch.tensor(largest)
    for exponent in (0, 1, 120, 127, 135, 254):
        amax = (torch.arange(0, 1 << 23, 7, dtype=torch.int32) | exponent << 23).view(torch.float32)
        one, other = (
            block_formats.e8m0_above(x) for x in (torch.div(amax, top), amax * torch.div(torch.ones(()), top))
        )
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0)])
def test_nothing(shape: tuple[int, int]) -> None:
    codes, scales = twin.cast_mxfp8(torch.empty(shape), E4M3, True)
    assert (tuple(codes.shape), tuple(scales.shape)) == (shape, (shape[0], shape[1] // 32))


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^twin::cast_mxfp8: dtype must be .*; got torch\.bfloat16"):
        twin.cast_mxfp8(torch.ones(2, 32), torch.bfloat16, False)
    with pytest.raises(ValueError, match=r"^twin::cast_mxfp8: x must be contiguous"):
        twin.cast_mxfp8(torch.ones(32, 2).t(), E4M3, False)
    sentence = library.no_implementation("cast_mxfp8", {torch.device("cuda:0")})
    assert sentence.startswith(
        "twin::cast_mxfp8 got tensors on cuda:0; it runs on 'cpu' alone: MXFP8 and NVFP4 need Bl"
    )
