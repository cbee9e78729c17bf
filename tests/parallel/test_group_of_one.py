"""In a group of one rank, what ranks exchange is what that rank has: the words are those without a group."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits

from reference.parallel import vocabulary
from reference.parallel.tensor import Gathered
from reference.parallel.tokens import Tokens
from reference.recipes import quantized
from reference.recipes.current_scaling import Current
from reference.recipes.quantized import Accumulation, Operand, Quantized
from reference.support import groups

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def group() -> Iterator[str]:
    """The name of a group whose only rank is this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield groups.name_of(None)
    dist.destroy_process_group()


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def assert_same_operands(found: Operand | None, expected: Operand | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.layout == expected.layout
    assert_same_bits(found.codes, expected.codes)
    assert (found.scales is None) == (expected.scales is None)
    if found.scales is not None and expected.scales is not None:
        assert_same_bits(found.scales, expected.scales)


@pytest.mark.parametrize("rows", [1, 16, 24])
def test_rows_of_all_ranks_are_cast_and_transposed(rows: int, group: str) -> None:
    """Also where the transpose is filled up with zeros."""
    x, inner = numbers(1, rows, 32), Current(torch.float8_e4m3fn, False, 0.0)
    found, expected = Gathered(inner, group).quantize(x, True), inner.quantize(x, True)
    assert_same_operands(found.row, expected.row)
    assert_same_operands(found.column, expected.column)


def operands(fp8: bool) -> tuple[Quantized, Operand]:
    """An output's gradient and an input of 256 tokens, transposed."""
    g, x = numbers(2, 256, 208), numbers(3, 256, 32)
    if not fp8:
        return Quantized(Operand(g), Operand(g.t())), Operand(x.t())
    column = Current(torch.float8_e4m3fn, False, 0.0).quantize(x, True).column
    assert column is not None
    return Current(torch.float8_e5m2, False, 0.0).quantize(g, True), column


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_weights_gradient_of_the_tokens_of_all_ranks(fp8: bool, accumulates: bool, group: str) -> None:
    (g, x), tokens = operands(fp8), Tokens(group)
    assert_same_operands(tokens.columns(x), x)
    sums, found = (numbers(4, 208, 32).float() if accumulates else None for _ in range(2))
    expected = quantized.wgrad(g, x, BF16, Accumulation(), sums)
    result = quantized.wgrad(g, x, BF16, Accumulation(tokens=tokens), found)
    if accumulates:
        assert result is None
        result, expected = found, sums
    assert result is not None
    assert expected is not None
    assert_same_bits(result, expected)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_of_all_columns_and_back(rows: int, dtype: torch.dtype, group: str) -> None:
    logits, shard = numbers(5, rows, 20).to(dtype), vocabulary.Shard(group, 20)
    whole = vocabulary.whole_rows(shard, logits)
    assert_same_bits(whole, logits)
    assert_same_bits(vocabulary.columns(shard, whole, rows), logits)
