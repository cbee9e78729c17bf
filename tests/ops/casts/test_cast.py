"""`twin::cast` and `twin::amax` on the CPU: results, the state they write, and what they refuse.

Which code a number gets is tests/numbers/test_formats.py's subject; here the op around it.
"""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference.ops.casts.cast
import reference.ops.checks
from reference.numbers import formats

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


def numbers(rows, cols, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    return x.to(dtype)


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
@pytest.mark.parametrize("out", [E4M3, E5M2])
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 70),
    cols=st.integers(0, 9).map(lambda n: 16 * n),
    column=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_cast_of_any_shape(dtype, out, rows, cols, column, seed):
    x = numbers(rows, cols, dtype, seed)
    scale = torch.tensor([0.37, 56.0, 1e3])
    history = torch.zeros(4, 3)
    q, scale_inv = twin.cast(x, scale, history, column, out)
    assert (q.shape, q.dtype) == ((rows, cols), out)
    products = torch.from_numpy(x.float().numpy() * scale[column].numpy())
    expected = formats.encode_by_integers(products, formats.format_of(out))
    assert torch.equal(q.view(torch.uint8), expected)
    assert (scale_inv.shape, scale_inv.dtype) == ((1,), torch.float32)
    assert scale_inv.numpy()[0] == np.float32(1) / scale[column].numpy()
    expected_history = np.zeros((4, 3), dtype=np.float32)
    expected_history[0, column] = np.abs(x.float().numpy()).max(initial=0)
    assert np.array_equal(history.numpy(), expected_history)


def test_scale_inv_is_the_correctly_rounded_quotient_and_its_own_tensor():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0x00800000, 0x7F000000, (300,), generator=generator, dtype=torch.int32)
    scale = words.view(torch.float32)
    x = torch.zeros(1, 16)
    for column in range(scale.numel()):
        _, scale_inv = twin.cast(x, scale, None, column, E4M3)
        # The double quotient of two fp32 numbers, rounded again, is their fp32 quotient (Figueroa).
        assert scale_inv.item() == np.float32(1.0 / float(scale[column]))
    scale.fill_(1.0)
    assert scale_inv.item() != 1.0


def test_amax_is_of_the_unscaled_value_and_only_grows():
    scale, history = torch.tensor([1e4, 1.0]), torch.zeros(3, 2)
    for peak, expected in ((2.5, 2.5), (-7.0, 7.0), (1.0, 7.0), (math.nan, 7.0), (-math.inf, math.inf)):
        x = torch.zeros(2, 16)
        x[1, 3] = peak
        twin.cast(x, scale, history, 0, E4M3)
        assert history[0, 0].item() == expected
    assert not history[1:].any()
    assert not history[:, 1].any()


def test_amax_is_taken_before_any_rounding_to_16_bits():
    x = torch.full((1, 16), 1.0 + 2.0**-23)
    history = torch.zeros(1, 1)
    twin.cast(x, torch.ones(1), history, 0, E4M3)
    assert history.item() == 1.0 + 2.0**-23


@pytest.mark.parametrize("dtype", formats.WIDE_DTYPES)
def test_amax_op_writes_what_the_cast_writes(dtype):
    x = numbers(33, 48, dtype)
    x[5, 7] = math.nan
    ours, casts = torch.zeros(3, 2), torch.zeros(3, 2)
    assert twin.amax(x, ours, 1) is None
    twin.cast(x, torch.ones(2), casts, 1, E5M2)
    assert torch.equal(ours, casts)
    assert ours[0, 1] == x.float().nan_to_num(0.0).abs().max()
    twin.amax(x[:0], ours, 0)
    assert ours[0, 0] == 0
    twin.amax(numbers(3, 5), ours, 0)  # calibration takes any number of columns


def test_without_a_history_nothing_is_written_and_the_codes_are_the_same():
    x, scale = numbers(20, 32), torch.tensor([3.0])
    q, scale_inv = twin.cast(x, scale, None, 0, E4M3)
    with_history, inverse = twin.cast(x, scale, torch.zeros(2, 1), 0, E4M3)
    assert torch.equal(q.view(torch.uint8), with_history.view(torch.uint8))
    assert torch.equal(scale_inv, inverse)
    assert scale.item() == 3.0


def test_the_historys_version_is_bumped_and_the_others_are_not():
    x, scale, history = numbers(4, 16), torch.ones(1), torch.zeros(2, 1)
    versions = x._version, scale._version, history._version
    twin.cast(x, scale, history, 0, E4M3)
    twin.amax(x, history, 0)
    assert (x._version, scale._version) == versions[:2]
    assert history._version >= versions[2] + 2


def test_a_history_that_is_a_strided_view_is_written_in_place():
    storage = torch.zeros(4, 6)
    twin.amax(numbers(3, 16), storage[:, ::2], 1)
    assert storage[0, 2] > 0
    assert storage.count_nonzero() == 1


def test_opcheck():
    x, history = numbers(7, 32), torch.zeros(3, 2)
    for dtype in (E4M3, E5M2):
        for amax_history in (history, None):
            torch.library.opcheck(twin.cast.default, (x, torch.ones(2), amax_history, 1, dtype))
    torch.library.opcheck(twin.amax.default, (x, history, 1))


def test_cast_where_a_gradient_would_be_recorded_is_refused():
    x = numbers(4, 16).requires_grad_()
    with pytest.raises(RuntimeError, match=r"twin::cast has no derivative of its own"):
        twin.cast(x, torch.ones(1), None, 0, E4M3)
    with torch.no_grad():
        twin.cast(x, torch.ones(1), None, 0, E4M3)


GOOD = {
    "x": torch.zeros(4, 32),
    "scale": torch.ones(3),
    "amax_history": torch.zeros(5, 3),
    "column": 1,
    "dtype": E4M3,
}
REFUSED = {
    "x of one dimension": (
        {"x": torch.zeros(32)},
        "x must be 2-D, [rows, cols]; got shape (32,).",
    ),
    "x of integers": (
        {"x": torch.zeros(4, 32, dtype=torch.int32)},
        "x must be torch.float32, torch.bfloat16 or torch.float16; got torch.int32.",
    ),
    "x transposed": (
        {"x": torch.zeros(32, 16).t()},
        "x must be contiguous (row-major); got strides (1, 16) for shape (16, 32): call .contiguous() first.",
    ),
    "odd columns": (
        {"x": torch.zeros(4, 24)},
        "the columns of x must be a multiple of 16, which FP8 tensor cores need; got 24 (shape (4, 24)).",
    ),
    "dtype": (
        {"dtype": torch.float16},
        "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float16.",
    ),
    "another float8": (
        {"dtype": torch.float8_e4m3fnuz},
        "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float8_e4m3fnuz.",
    ),
    "scale of no dimension": (
        {"scale": torch.tensor(1.0)},
        "scale must be 1-D, [columns]; got shape ().",
    ),
    "scale in float64": (
        {"scale": torch.ones(3, dtype=torch.float64)},
        "scale must be torch.float32; got torch.float64.",
    ),
    "column of the scale": (
        {"column": 3},
        "column must be from 0 to 2, the columns of scale; got 3.",
    ),
    "negative column": (
        {"column": -1},
        "column must be from 0 to 2, the columns of scale; got -1.",
    ),
    "history of one dimension": (
        {"amax_history": torch.zeros(5)},
        "amax_history must be [length >= 1, columns]; got shape (5,).",
    ),
    "history without rows": (
        {"amax_history": torch.zeros(0, 3)},
        "amax_history must be [length >= 1, columns]; got shape (0, 3).",
    ),
    "history in bf16": (
        {"amax_history": torch.zeros(5, 3, dtype=torch.bfloat16)},
        "amax_history must be torch.float32; got torch.bfloat16.",
    ),
    "column of the history": (
        {"amax_history": torch.zeros(5, 1)},
        "column must be from 0 to 0, the columns of amax_history; got 1.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    wrong, sentence = REFUSED[case]
    arguments = {**GOOD, **wrong}
    before = arguments["amax_history"].clone()
    with pytest.raises(ValueError, match=re.escape("twin::cast: " + sentence)):
        twin.cast(*arguments.values())
    assert torch.equal(arguments["amax_history"], before)


def test_amax_refusals():
    for wrong, sentence in (
        ((torch.zeros(4), torch.zeros(5, 3), 1), "x must be 2-D"),
        ((torch.zeros(4, 4, dtype=torch.float64), torch.zeros(5, 3), 1), "x must be torch.float32"),
        ((torch.zeros(4, 4), torch.zeros(5, 3), 3), "column must be from 0 to 2"),
        ((torch.zeros(4, 4), torch.zeros(5), 0), "amax_history must be [length >= 1"),
    ):
        with pytest.raises(ValueError, match=re.escape("twin::amax: " + sentence)):
            twin.amax(*wrong)


def test_another_device_is_named():
    # The meta device stands for any other: no data, but a device to disagree about.
    with pytest.raises(ValueError, match=r"twin::cast: scale is on meta, the data on cpu"):
        reference.ops.casts.cast.check_cast("twin::cast", GOOD["x"], torch.ones(3, device="meta"), None, 0, E4M3)
    with pytest.raises(ValueError, match=r"twin::amax: amax_history is on meta, the data on cpu"):
        reference.ops.checks.check_history("twin::amax", GOOD["x"], torch.zeros(2, 3, device="meta"), 0)
