"""twin::cat_cast_blocks_transpose_dbias: the ops that it stands for, one by one, and refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.bits import assert_same_bits

from reference.ops.casts.cast_blocks import DIALECTS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


@given(
    st.integers(0, 140),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([BF16, FP16, FP32]),
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from(DIALECTS),
    st.integers(0, 1 << 30),
)
def test_columns_of_each_group_lie_side_by_side(
    rows: int, widths: list[int], groups: int, wide: torch.dtype, dtype: torch.dtype, dialect: str, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    widths = [8 * width for width in widths]
    if sum(widths) * groups % 16:
        widths[0] += 8
    xs = [torch.randn(rows, groups * width, generator=draw).to(wide) for width in widths]
    parts = [
        x[:, group * width : (group + 1) * width]
        for group in range(groups)
        for x, width in zip(xs, widths, strict=True)
    ]
    x = torch.cat(parts, 1).contiguous()
    *codes, dbias = twin.cat_cast_blocks_transpose_dbias(xs, groups, dtype, dialect, 1e-4)
    for found, wanted in zip(codes, twin.cast_blocks_transpose(x, dtype, False, dialect, 1e-4), strict=True):
        assert_same_bits(found, wanted)
    assert_same_bits(dbias, twin.dbias(x))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([torch.zeros(4, 16)] * 4, 1), "xs must be 1 to 3 matrices; got 4"),
        (([torch.zeros(4, 16), torch.zeros(5, 16)], 1), r"xs\[1\] must have 4 rows"),
        (([torch.zeros(4, 24), torch.zeros(4, 16)], 1), "together must be a multiple of 16; got 40"),
        (([torch.zeros(4, 16)], 3), "a multiple of 8 · groups, groups=3"),
        (([torch.zeros(4, 16), torch.zeros(4, 16, dtype=BF16)], 1), r"xs\[1\] is torch.bfloat16"),
        (([torch.zeros(4, 16)], 1, BF16), "dtype must be torch.float8_e4m3fn or torch.float8_e5m2"),
        (([torch.zeros(4, 16)], 1, E4M3, "tall"), "dialect='tall'"),
        (([torch.zeros(4, 16)], 1, E4M3, "fp32", -1.0), "epsilon=-1.0"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], sentence: str) -> None:
    usual = (E4M3, "power_of_two", 0.0)
    with pytest.raises(ValueError, match=f"^twin::cat_cast_blocks_transpose_dbias: .*{sentence}"):
        twin.cat_cast_blocks_transpose_dbias(*arguments, *usual[len(arguments) - 2 :])
