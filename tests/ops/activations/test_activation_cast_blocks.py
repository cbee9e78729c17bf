"""twin::activation_cast_blocks_transpose and its backward: the ops that they stand for, one by one, and refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.bits import assert_same_bits

from reference.ops.activations.activation import GATED, KINDS
from reference.ops.casts.cast_blocks import DIALECTS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin
FORWARD, BACKWARD = "activation_cast_blocks_transpose", "activation_backward_cast_blocks_transpose_dbias"


@given(
    st.integers(0, 140),
    st.integers(1, 9),
    st.sampled_from(KINDS),
    st.sampled_from([BF16, FP16, FP32]),
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from(DIALECTS),
    st.integers(0, 1 << 30),
)
def test_what_is_cast_is_rounded_first(
    rows: int, columns: int, kind: str, wide: torch.dtype, dtype: torch.dtype, dialect: str, seed: int
) -> None:
    draw, cols = torch.Generator().manual_seed(seed), 16 * columns
    x = torch.randn(rows, cols * (2 if kind in GATED else 1), generator=draw).to(wide)
    grad = torch.randn(rows, cols, generator=draw).to(wide)
    how = (dtype, dialect, 0.0)
    y, dx = twin.activation(x, kind), twin.activation_backward(grad, x, kind)
    wanted = twin.cast_blocks_transpose(y, dtype, False, dialect, 0.0)
    for found, one in zip(twin.activation_cast_blocks_transpose(x, kind, *how), wanted, strict=True):
        assert_same_bits(found, one)
    *codes, dbias = twin.activation_backward_cast_blocks_transpose_dbias(grad, x, kind, *how)
    wanted = twin.cast_blocks_transpose(dx, dtype, False, dialect, 0.0)
    for found, one in zip(codes, wanted, strict=True):
        assert_same_bits(found, one)
    assert_same_bits(dbias, twin.dbias(dx))


X = torch.zeros(4, 32)


@pytest.mark.parametrize(
    ("op", "arguments", "sentence"),
    [
        (FORWARD, (X, "gleu"), "kind must be one of"),
        (FORWARD, (X[:, :24].contiguous(), "gelu"), "a multiple of 16, .* got 24"),
        (FORWARD, (X, "gelu", BF16), "dtype must be"),
        (FORWARD, (X, "gelu", E4M3, "tall"), "dialect='tall'"),
        (BACKWARD, (X, X, "swiglu"), r"grad must be contiguous .* \[4, 16\]"),
        (BACKWARD, (X[:, :20].contiguous(), X[:, :20].contiguous(), "gelu"), "multiple of 8 columns"),
        (BACKWARD, (X[:, :24].contiguous(), X[:, :24].contiguous(), "gelu"), "a multiple of 16, .* got 24"),
        (BACKWARD, (X, X, "gelu", E4M3, "fp32", float("inf")), "epsilon=inf"),
    ],
)
def test_refusals(op: str, arguments: tuple[Any, ...], sentence: str) -> None:
    usual = (E4M3, "power_of_two", 0.0)
    given_ones = len(arguments) - (2 if op == FORWARD else 3)
    with pytest.raises(ValueError, match=f"^twin::{op}: .*{sentence}"):
        getattr(twin, op)(*arguments, *usual[given_ones:])
