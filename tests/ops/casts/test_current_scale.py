"""`twin::current_scale` and of several matrices: the formula in NumPy's divisions, its exceptions, and refusals."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared import cast_values
from shared.bits import assert_same_bits

from reference.numbers import formats

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


def by_formula(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float) -> torch.Tensor:
    there = [abs(one) for one in x.float().flatten().tolist() if not math.isnan(one)]
    amax = np.float32(max([*there, np.float32(epsilon)]))
    if amax == 0 or np.isinf(amax):
        return torch.ones(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(formats.format_of(dtype).largest) / amax, np.finfo(np.float32).max)
    if power_of_two:
        scale = np.float32(math.ldexp(1.0, math.frexp(float(scale))[1] - 1))
    return torch.tensor([scale])


@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([BF16, FP16, FP32]),
    st.sampled_from([E4M3, E5M2]),
    st.booleans(),
    st.sampled_from([0.0, 1e-4, 3.0]),
    st.integers(-40, 30),
    st.integers(0, 1 << 30),
)
def test_it_is_what_the_formula_says(
    rows: int,
    cols: int,
    wide: torch.dtype,
    dtype: torch.dtype,
    power_of_two: bool,
    epsilon: float,
    exponent: int,
    seed: int,
) -> None:
    x = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).to(wide)
    found = twin.current_scale(x, dtype, power_of_two, epsilon)
    assert_same_bits(found, by_formula(x, dtype, power_of_two, epsilon))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    "values", [[0.0, -0.0], [1.0, math.inf], [math.nan, 3.0], [math.nan] * 2, [1e-44, 0.0], [1e-40, 1e-42], [3e38, 0.0]]
)
def test_special_tensors(values: list[float], power_of_two: bool) -> None:
    for dtype in (E4M3, E5M2):
        how = (torch.tensor([values]), dtype, power_of_two, 0.0)
        assert_same_bits(twin.current_scale(*how), by_formula(*how))


def test_a_scale_that_is_no_number_of_fp32_is_its_largest() -> None:
    tiny = torch.full((1, 16), 1e-44)
    assert twin.current_scale(tiny, E4M3, False, 0.0) == torch.finfo(FP32).max
    assert twin.current_scale(tiny, E4M3, True, 0.0) == 2.0**127
    assert twin.current_scale(tiny, E4M3, False, 448.0) == 1
    assert twin.current_scale(torch.full((1, 16), math.inf), E4M3, True, 448.0) == 1


SPECIAL = (0.0, math.inf, math.nan, 1e-44, 1e-40)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    st.sampled_from([BF16, FP16, FP32]),
    st.sampled_from([E4M3, E5M2]),
    st.booleans(),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([1.0, *SPECIAL]),
    st.integers(0, 1 << 30),
)
def test_several_are_each_as_alone_or_as_the_matrix_they_make(
    shapes: list[tuple[int, int]],
    wide: torch.dtype,
    dtype: torch.dtype,
    power_of_two: bool,
    epsilon: float,
    factor: float,
    seed: int,
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    xs = [(torch.randn(shape, generator=drawn) * 2.0 ** (3 * i)).to(wide) for i, shape in enumerate(shapes)]
    xs[-1] = (xs[-1].float() * factor).to(wide)
    how = (dtype, power_of_two, epsilon)
    each = torch.cat([twin.current_scale(x, *how) for x in xs])
    assert_same_bits(twin.multi_current_scale(xs, False, *how), each)
    together = torch.cat([x.flatten() for x in xs])[None]
    assert_same_bits(twin.multi_current_scale(xs, True, *how), twin.current_scale(together, *how))


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("wide", [BF16, FP16, FP32])
@pytest.mark.parametrize("joined", [False, True])
def test_several_on_both_sides(joined: bool, wide: torch.dtype) -> None:
    """Of sizes that differ, of nothing, of more than one launch takes, and off the 16-byte boundary."""
    lists = [[cast_values.numbers(rows, 51, wide, rows) for rows in (1, 700, 0)]]
    lists.append([torch.full((2, 16), factor, dtype=wide) for factor in (1.0, *SPECIAL)])
    lists.append([torch.where(x.isfinite(), x, 0.0) for x in lists[0]])
    for xs in lists:
        for how in ((E4M3, False, 0.0), (E5M2, True, 1e-3)):
            there = [torch.cat([x.new_zeros(1), x.flatten()]).cuda()[1:].view(x.shape) for x in xs]
            expected = twin.multi_current_scale(xs, joined, *how)
            assert_same_bits(twin.multi_current_scale([x.cuda() for x in xs], joined, *how), expected)
            assert_same_bits(twin.multi_current_scale(there, joined, *how), expected)


@pytest.mark.parametrize(
    ("xs", "sentence"),
    [
        ([torch.zeros(2, 16), torch.zeros(16)], r"xs\[1\] must be 2-D, \[rows, cols\]; got shape \(16,\)"),
        (
            [torch.zeros(2, 16), torch.zeros(2, 16).half()],
            r"xs\[1\] is torch.float16 on cpu, xs\[0\] torch.float32 on cpu",
        ),
    ],
)
def test_lists_that_are_refused(xs: list[torch.Tensor], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^twin::multi_current_scale: {sentence}"):
        twin.multi_current_scale(xs, True, E4M3, False, 0.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"x": torch.zeros(16)}, r"x must be 2-D, \[rows, cols\]; got shape \(16,\)"),
        ({"x": torch.zeros(16, 4).t()}, "x must be contiguous"),
        ({"x": torch.zeros(4, 16, dtype=torch.float64)}, "got torch.float64"),
        ({"dtype": torch.int8}, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.int8"),
        ({"epsilon": -1.0}, r"epsilon=-1\.0; a finite number of fp32, from 0 on, is accepted"),
        ({"epsilon": 1e39}, r"epsilon=1e\+39; a finite number of fp32"),
        ({"epsilon": math.nan}, r"epsilon=nan; a finite number of fp32"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    given = {"x": torch.zeros(4, 16), "dtype": E4M3, "power_of_two": False, "epsilon": 0.0} | arguments
    with pytest.raises(ValueError, match=f"^twin::current_scale: .*{sentence}"):
        twin.current_scale(*given.values())
    x, *rest = given.values()
    if "x" not in arguments:
        with pytest.raises(ValueError, match=f"^twin::multi_current_scale: .*{sentence}"):
            twin.multi_current_scale([x], False, *rest)
        with pytest.raises(ValueError, match=f"^twin::activation_scale: .*{sentence}"):
            twin.activation_scale(x, "gelu", *rest)
