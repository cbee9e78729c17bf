"""`twin::cast_nvfp4`: Transformer Engine's words, its random bytes, the mean of stochastic rounding, refusals."""

import pytest
import torch
from shared.block_vectors import NOT_FINITE, VECTORS, Vector, canonical, made, recorded

from reference.numbers import block_formats, formats, philox

twin = torch.ops.twin


def numbers(codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """What is kept, in float64."""
    wide = (
        block_formats.decode_e2m1(codes).double().view(*scales.shape, 16) * formats.decode(scales).double()[..., None]
    )
    return wide.flatten(1) * (amax.double() / 2688)


# The transform was recorded in bf16, the one dtype of Transformer Engine's kernel.
KINDS = [
    (kind, vector)
    for kind in ("rows", "square", "hadamard")
    for vector in VECTORS + NOT_FINITE
    if kind != "hadamard" or vector.dtype == torch.bfloat16
]


@pytest.mark.parametrize(("kind", "vector"), KINDS, ids=str)
def test_words_are_those_of_transformer_engine(kind: str, vector: Vector) -> None:
    """Those of x, and of its transpose, which it transforms first in the last kind."""
    words, x = recorded(), made(vector)
    other = x.t().contiguous()
    for ending, one in (("", x), ("_t", twin.hadamard(other) if kind == "hadamard" else other)):
        codes, scales, amax = twin.cast_nvfp4(one, kind == "square", None)
        expected = [words[f"nvfp4 {kind} {vector} {name}{ending}"] for name in ("codes", "scales", "amax")]
        assert torch.equal(codes, expected[0])
        assert torch.equal(scales.view(torch.uint8), expected[1])
        assert torch.equal(amax, expected[2]) or bool(amax.isnan() & expected[2].isnan())


@pytest.mark.parametrize("shape", [(33, 40), (5, 7), (20, 16)])
def test_any_size_is_whole_blocks_with_zeros(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for square in (False, True):
        padded = torch.zeros(-(-shape[0] // 16) * 16, -(-shape[1] // 16) * 16)
        padded[: shape[0], : shape[1]] = x
        codes, scales, amax = twin.cast_nvfp4(x, square, None)
        expected = twin.cast_nvfp4(padded, square, None)
        assert torch.equal(codes, expected[0][: shape[0]])
        assert torch.equal(canonical(scales), canonical(expected[1])[: shape[0]])
        assert torch.equal(amax, expected[2])


def test_square_blocks_of_the_transpose_are_the_transpose() -> None:
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    codes, scales, _ = twin.cast_nvfp4(x, True, None)
    codes_t, scales_t, _ = twin.cast_nvfp4(x.t().contiguous(), True, None)
    assert torch.equal(block_formats.unpack(codes), block_formats.unpack(codes_t).t())
    assert torch.equal(canonical(scales)[::16], canonical(scales_t)[::16].t())


def test_random_bytes_are_those_of_the_contract() -> None:
    """A counter for each block of 16, a byte for each of its numbers; the scales do not change."""
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    state = torch.tensor([1 << 40 | 77, 5])
    codes, scales, amax = twin.cast_nvfp4(x, False, state)
    assert state.tolist() == [1 << 40 | 77, 6], "one step further"
    nearest = twin.cast_nvfp4(x, False, None)
    assert torch.equal(canonical(scales), canonical(nearest[1]))
    assert torch.equal(amax, nearest[2])
    found = block_formats.unpack(codes)
    encode = torch.div(torch.tensor(2688.0), amax)
    decode = torch.div(torch.ones(1), encode)
    for row in range(7):
        for block in range(3):
            words = philox.philox4x32((row * 3 + block, 0, 5, 0), (77, 1 << 8))
            factor = torch.div(torch.ones(1), formats.decode(scales[row, block]) * decode)
            for i in range(16):
                at = block * 16 + i
                byte = int(words[i // 4]) >> 8 * (i % 4) & 0xFF
                value = x[row, at : at + 1] * factor if at < 40 else torch.zeros(1)
                expected = block_formats.encode_e2m1_stochastic(value, torch.tensor([byte], dtype=torch.uint8))
                assert found[row, at] == expected


def test_the_mean_of_random_rounding_is_the_number() -> None:
    """That is what it is for: rounding to nearest moves each number to the same side every time."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    state, draws = philox.new_state(), 400
    mean = sum(numbers(*twin.cast_nvfp4(x, False, state)) for _ in range(draws)) / draws
    off = (numbers(*twin.cast_nvfp4(x, False, None)) - x).norm()
    # A draw's error is of the size of a step; that of a mean of 400 is a twentieth of it. The largest number of a
    # block may be beyond 6, where it saturates, as its scale is rounded: hence not less.
    assert (mean - x).norm() < off / 5


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0, 0)])
def test_nothing(shape: tuple[int, int]) -> None:
    for state in (None, philox.new_state()):
        codes, scales, amax = twin.cast_nvfp4(torch.empty(shape), True, state)
        assert (tuple(codes.shape), tuple(scales.shape)) == ((shape[0], shape[1] // 2), (shape[0], shape[1] // 16))
        assert amax == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^twin::cast_nvfp4: rng_state must be an int64 \[2\] tensor"):
        twin.cast_nvfp4(torch.ones(2, 16), False, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^twin::cast_nvfp4: x must be 2-D"):
        twin.cast_nvfp4(torch.ones(16), False, None)
