"""`twin::hadamard`: the contract written out, what the transform is for, any size."""

import pytest
import torch
from shared.bits import assert_same_bits

from reference.numbers import formats
from reference.ops.casts import hadamard

twin = torch.ops.twin


def test_the_matrix_is_orthogonal_and_of_quarters() -> None:
    h = hadamard.matrix()
    assert torch.equal(h @ h.t(), torch.eye(16))
    assert set(h.abs().unique().tolist()) == {0.25}


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("cols", [16, 48, 50])
def test_the_contract(dtype: torch.dtype, cols: int) -> None:
    x = torch.randn(5, cols, generator=torch.Generator().manual_seed(1)).to(dtype)
    padded = torch.nn.functional.pad(x, (0, -cols % 16)).float()
    expected = torch.zeros_like(padded)
    for row in range(5):
        for j in range(padded.shape[1]):
            total = torch.zeros(())
            for i in range(16):
                sign = hadamard.SIGNS[i] * (-1) ** (i & j % 16).bit_count()
                total = total + padded[row, j // 16 * 16 + i] * torch.tensor(sign / 4)
            expected[row, j] = total
    assert_same_bits(twin.hadamard(x), expected.to(dtype))


def test_products_keep_their_value_and_outliers_spread() -> None:
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(8, 32, generator=g), torch.randn(4, 32, generator=g)
    torch.testing.assert_close(twin.hadamard(a) @ twin.hadamard(b).t(), a @ b.t())
    outlier = torch.zeros(1, 16)
    outlier[0, 3] = 100.0
    assert set(twin.hadamard(outlier).abs().flatten().tolist()) == {25.0}


def test_nothing_and_no_matrix() -> None:
    assert twin.hadamard(torch.empty(0, 16)).shape == (0, 16)
    with pytest.raises(ValueError, match=r"^twin::hadamard: x must be 2-D"):
        twin.hadamard(torch.ones(16))
