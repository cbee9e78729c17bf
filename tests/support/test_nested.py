"""Nested tuples of tensors: flat and back; and what a backward saves by name."""

from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import reference as te
from reference.recipes import quantized
from reference.recipes.quantized import Accumulation, Operand, Products, Quantized
from reference.support import nested


class Pair(NamedTuple):
    first: Any
    second: Any


LEAVES = st.one_of(st.none(), st.builds(lambda n: torch.full((1,), n), st.integers(0, 9)), st.sampled_from(["a", "b"]))
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4).map(tuple), st.builds(Pair, inner, inner)),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a is b or (isinstance(a, str) and a == b)


@given(NESTED)
def test_nested_tuples_come_back_as_they_were(x: Any) -> None:
    tensors, form = nested.flatten(x)
    assert all(t is None or isinstance(t, torch.Tensor) for t in tensors)
    assert same(nested.rebuild(form, tensors), x)
    assert nested.tensors_of(x) == [t for t in tensors if t is not None]


@given(NESTED, NESTED)
def test_a_form_says_everything_but_tensors(x: Any, y: Any) -> None:
    """Tapes and plans compare forms: those of two nests are equal just where they differ in tensors alone."""
    (tensors, form), (others, other) = nested.flatten(x), nested.flatten(y)
    if form == other:
        assert hash(form) == hash(other)
        assert len(tensors) == len(others)
        assert same(nested.rebuild(form, others), y)
    assert nested.flatten(nested.rebuild(form, [None] * len(tensors)))[1] == form


def test_a_layout_brings_its_own_gemms(monkeypatch: Any) -> None:
    """A recipe's file adds an entry; Linear's three GEMMs then run it, whatever its operands are made of."""
    powers = torch.tensor([2.0, 4.0])  # factors of the codes' rows, in turn

    def wide(x: Operand) -> Operand:
        assert x.scales is not None
        return Operand((x.codes.float() * x.scales.view(-1, 1)).bfloat16())

    def multiply(a: Operand, b: Operand, bias: Any, out_dtype: torch.dtype, accumulate: str) -> torch.Tensor:
        return quantized.gemm(wide(a), wide(b), bias, out_dtype, accumulate)

    def add(a: Operand, b: Operand, out: torch.Tensor) -> None:
        quantized.PRODUCTS["plain", "plain"].add(wide(a), wide(b), out)

    def by_row(x: torch.Tensor) -> Operand:
        scales = powers.repeat(len(x))[: len(x)]
        return Operand((x.float() / scales.view(-1, 1)).bfloat16(), scales, "by row")

    monkeypatch.setitem(quantized.PRODUCTS, ("by row", "by row"), Products(multiply, add, torch.bfloat16))
    torch.manual_seed(0)
    x, w, g = (torch.randn(shape).bfloat16() for shape in ((6, 16), (8, 16), (6, 8)))
    bias, how, bf16 = torch.randn(8).bfloat16(), Accumulation(), torch.bfloat16
    plain = [Quantized(Operand(t), Operand(t.t().contiguous())) for t in (x, w, g)]
    toy = [Quantized(by_row(t), by_row(t.t().contiguous())) for t in (x, w, g)]
    found, expected = (
        (
            quantized.fprop(a, b, bias, bf16, how),
            quantized.dgrad(c, b.column, bf16, how),
            quantized.wgrad(c, a.column, bf16, how, None),
        )
        for a, b, c in (toy, plain)
    )
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)
    sums = [torch.ones(8, 16), torch.ones(8, 16)]
    for one, (a, _, c) in zip(sums, (toy, plain), strict=True):
        assert quantized.wgrad(c, a.column, bf16, how, one) is None
    assert_same_bits(*sums)
    residual = torch.randn(6, 8).bfloat16()
    assert_same_bits(
        *(quantized.fprop_residual(a, b, bias, residual, quantized.Dropout(), bf16, how) for a, b, _ in (toy, plain))
    )


def test_what_a_backward_reads_is_what_autograd_keeps() -> None:
    """Every tensor that a layer saves goes through autograd's own hooks, in FP8 with its codes."""
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    kept: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), te.autocast(recipe=te.DelayedScaling()):
        layer(x)
    codes = [tuple(t.shape) for t in kept if t.dtype == torch.float8_e4m3fn]
    assert codes == [(32, 16), (32, 16)]  # the transposes: of x, padded to 16 tokens, and of w
