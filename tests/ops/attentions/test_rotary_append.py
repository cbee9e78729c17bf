"""`twin::rotary_append`: `twin::rotary` and copies into a cache, one after the other; what it refuses."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

twin = torch.ops.twin


def arguments(
    t: int, g: int, p: int, d: int, e: int, d2: int, dtype: torch.dtype = torch.bfloat16, interleaved: bool = False
) -> list[Any]:
    draw = torch.Generator().manual_seed(t + 7 * d)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    q, k, v = (numbers(*shape).to(dtype) for shape in ((t, g, p, d), (t, g, d), (t, g, e)))
    positions = torch.randint(0, 9, (t,), generator=draw, dtype=torch.int32)
    rows = torch.randperm(5 * 4, generator=draw)[:t]
    keys, values = (numbers(5, 4, g, size).to(dtype) for size in (d, e))
    return [q, k, v, 9 * numbers(9, d2), positions, rows, keys, values, interleaved]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (6, 3, 4, 20, 20))),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    interleaved=st.booleans(),
    data=st.data(),
)
def test_one_op_after_the_other(sizes: Any, dtype: torch.dtype, interleaved: bool, data: st.DataObject) -> None:
    d2 = 2 * data.draw(st.integers(0, sizes[3] // 2))
    q, k, v, freqs, positions, rows, keys, values, _ = every = arguments(*sizes, d2, dtype, interleaved)
    expected_keys, expected_values = keys.clone(), values.clone()
    out = twin.rotary_append(*every)
    for n, (position, row) in enumerate(zip(positions.tolist(), rows.tolist(), strict=True)):
        angles = freqs[position : position + 1]
        expected_keys.view(20, *k.shape[1:])[row] = twin.rotary(k[n, None, None], angles, interleaved, False)[0, 0]
        expected_values.view(20, *v.shape[1:])[row] = v[n]
        turned = twin.rotary(q[n].flatten(0, 1)[None, None], angles, interleaved, False).view(q.shape[1:])
        assert_same_bits(out[n], turned.transpose(0, 1).contiguous(), f"token {n}")
    assert_same_bits(keys, expected_keys, "keys")
    assert_same_bits(values, expected_values, "values")


@pytest.mark.parametrize(
    ("place", "wrong", "sentence"),
    [
        (
            0,
            torch.zeros(3, 2, 16, dtype=torch.bfloat16),
            "q must be 4-D, [t, groups, queries of a group, d], and conti",
        ),
        (
            0,
            torch.zeros(3, 2, 4, 16, dtype=torch.float64),
            "q must be torch.float32, torch.bfloat16 or torch.float16; ",
        ),
        (
            1,
            torch.zeros(3, 4, 16, dtype=torch.bfloat16),
            "k must be torch.bfloat16 [3, 2, 16] on cpu, contiguous in its",
        ),
        (2, torch.zeros(3, 2, 16), "v must be torch.bfloat16 [3, 2, 16] on cpu, contiguous in its last dimension; got"),
        (
            3,
            torch.zeros(9, 18),
            "freqs must have a position at least and an even number of dimensions up to 16; got [9",
        ),
        (
            3,
            torch.zeros(9, 16, dtype=torch.float64),
            "freqs must be contiguous torch.float32 [positions, dimensions] on",
        ),
        (
            4,
            torch.zeros(3, dtype=torch.int64),
            "positions must be contiguous torch.int32 [3] on cpu; got torch.int64 [3",
        ),
        (4, torch.full((3,), 9, dtype=torch.int32), "positions[0] is 9; 0 to 8 are accepted."),
        (5, torch.zeros(2, dtype=torch.int64), "rows must be contiguous torch.int64 [3] on cpu; got torch.int64 [2]"),
        (5, torch.tensor([0, -1, 3], dtype=torch.int64), "rows[1] is -1; 0 to 19 are accepted."),
        (
            6,
            torch.zeros(5, 4, 2, 8, dtype=torch.bfloat16),
            "keys must be contiguous torch.bfloat16 [pages, page_size, 2",
        ),
        (
            7,
            torch.zeros(5, 3, 2, 16, dtype=torch.bfloat16),
            "values must be contiguous torch.bfloat16 [pages, page_size",
        ),
    ],
)
def test_what_is_refused(place: int, wrong: torch.Tensor, sentence: str) -> None:
    given = arguments(3, 2, 4, 16, 16, 16)
    given[place] = wrong
    before = [x.clone() for x in given[6:8]]
    with pytest.raises((ValueError, TypeError, IndexError), match="^twin::rotary_append: " + re.escape(sentence)):
        twin.rotary_append(*given)
    for one, other in zip(before, given[6:8], strict=True):
        assert_same_bits(one, other)
