"""`twin::dbias` on the CPU: the written order of summation, against a loop over scalars."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits, torch_threads

import reference.ops.casts.dbias
from reference.numbers import formats

twin = torch.ops.twin


def in_the_written_order(column: np.ndarray) -> np.float32:
    """The sum of one column (fp32 `[rows]`), one scalar addition after the other."""
    total = None
    for start in range(0, len(column), 64):
        block = [np.float32(0)] * 64
        block[: len(column[start : start + 64])] = list(column[start : start + 64])
        for run in (0, 16, 32, 48):
            for h in (8, 4, 2, 1):
                for r in range(run, run + h):
                    block[r] = np.float32(block[r] + block[r + h])
        for h in (32, 16):
            for run in range(0, h, 16):
                block[run] = np.float32(block[run] + block[run + h])
        total = block[0] if total is None else np.float32(total + block[0])
    return np.float32(0) if total is None else total


def gradient(rows, cols, dtype=torch.float32, seed=0):
    """Numbers of very different sizes, so that another order gives another sum."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    return (x * (torch.randn(rows, cols, generator=generator) * 2).exp()).to(dtype)


def expected(grad):
    sums = [in_the_written_order(grad[:, c].float().numpy()) for c in range(grad.shape[1])]
    return torch.from_numpy(np.array(sums, dtype=np.float32)).to(grad.dtype)


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 63, 64, 65, 100, 128, 129, 300])
def test_the_order_is_the_written_one(dtype, rows):
    grad = gradient(rows, 7, dtype, seed=rows)
    assert_same_bits(twin.dbias(grad), expected(grad), f"{rows} rows")


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 260), cols=st.integers(0, 20), seed=st.integers(0, 1000))
def test_any_shape(rows, cols, seed):
    grad = gradient(rows, cols, seed=seed)
    assert_same_bits(twin.dbias(grad), expected(grad))


def test_another_order_would_be_noticed():
    grad = gradient(300, 64)
    one_after_the_other = torch.zeros(64)
    for row in grad:
        one_after_the_other = one_after_the_other + row
    assert not torch.equal(twin.dbias(grad), one_after_the_other)
    assert torch.allclose(twin.dbias(grad).double(), grad.double().sum(0), rtol=1e-4, atol=1e-3)


def test_it_does_not_depend_on_threads_or_on_how_the_work_is_cut(monkeypatch):
    grad = gradient(2000, 1200, torch.bfloat16)
    whole = twin.dbias(grad)
    with torch_threads(1):
        assert_same_bits(twin.dbias(grad), whole, "one thread")
    assert_same_bits(twin.dbias(grad[:, :5].contiguous()), whole[:5], "fewer columns")
    for elements in (1, 64 * 1200 * 3):
        monkeypatch.setattr(reference.ops.casts.dbias, "_CHUNK", elements)
        assert_same_bits(twin.dbias(grad), whole, f"{elements} elements at a time")


def test_sign_of_zero_and_special_values():
    # The rows beyond the end are +0, so a lone -0 becomes +0; 64 of them keep their sign.
    assert not torch.signbit(twin.dbias(torch.full((1, 4), -0.0))).any()
    assert torch.signbit(twin.dbias(torch.full((64, 4), -0.0))).all()
    assert not torch.signbit(twin.dbias(torch.empty(0, 4))).any()
    inf, nan = float("inf"), float("nan")
    sums = twin.dbias(torch.tensor([[inf, inf, nan, -inf], [1.0, -inf, 1.0, 2.0]]))
    assert sums[0] == inf
    assert sums[1:3].isnan().all()
    assert sums[3] == -inf


def test_one_rounding_to_16_bits_at_the_end():
    # In bf16 all along, 1 + 2^-8 would be 1 each time.
    grad = torch.full((65, 1), 2.0**-8, dtype=torch.bfloat16)
    grad[0] = 1.0
    assert twin.dbias(grad).item() == 1.0 + 2.0**-2
    # fp32 sums beyond fp16's range become infinity only there.
    assert twin.dbias(torch.full((2, 1), 60000.0, dtype=torch.float16)).item() == float("inf")


def test_the_result_is_a_tensor_of_its_own():
    grad = gradient(64, 8)
    before = grad.clone()
    twin.dbias(grad).fill_(0)
    assert torch.equal(grad, before)


def test_a_gradient_that_itself_requires_one_is_summed_under_no_grad():
    with torch.no_grad():
        assert not twin.dbias(torch.ones(3, 16, requires_grad=True)).requires_grad


def test_refusals():
    for wrong, sentence in (
        (torch.zeros(4), "grad must be 2-D, [rows, cols]; got shape (4,)."),
        (torch.zeros(4, 4, dtype=torch.float64), "grad must be torch.float32, torch.bfloat16 or"),
        (torch.zeros(4, 8).t(), "grad must be contiguous (row-major); got strides (1, 8)"),
    ):
        with pytest.raises(ValueError, match=re.escape("twin::dbias: " + sentence)):
            twin.dbias(wrong)
    with pytest.raises(RuntimeError, match=r"twin::dbias has no derivative of its own"):
        twin.dbias(torch.zeros(4, 4, requires_grad=True))
