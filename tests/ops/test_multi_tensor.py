"""Tables of many tensors: rows as the kernels' structs lie, and what each launch gets of a list."""

import numpy as np
import pytest

from optimized.ops.multi_tensor import entries, tables


@pytest.mark.parametrize("numbers", range(4))
@pytest.mark.parametrize("pointers", range(1, 10))
def test_a_row_has_whole_words_and_no_gap(pointers: int, numbers: int) -> None:
    row = entries([f"p{i}" for i in range(pointers)], [f"n{i}" for i in range(numbers)])
    named = 8 * pointers + 8 + 4 + 4 * numbers + 4
    assert row.itemsize == named + named % 8
    ends = [offset + kind.itemsize for kind, offset in row.fields.values()]  # type: ignore[union-attr]
    assert [0, *ends[:-1]] == [offset for _, offset in row.fields.values()]  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_launches_have_each_tensor_once_and_a_block_for_each_part(count: int) -> None:
    row = entries(("p", "q"), ("number",))
    found = [((32 * i, 16 + 8 * (i % 2)), 10 * i, (100 + i,)) for i in range(count)]
    seen, blocks = [], []
    for capacity, launched, (table, length) in tables(row, found, (1, 3), 10):
        held = table.storage.view(row)
        assert len(held) == capacity >= length
        assert capacity == (1 if length == 1 else 3)
        for one in held[:length]:
            assert int(one["aligned"]) == ((one["p"] | one["q"]) % 16 == 0)
            seen.append(((int(one["p"]), int(one["q"])), int(one["count"]), (int(one["number"]),)))
        assert list(held["first_block"][:length]) == list(
            np.cumsum([0, *(one["count"] // 10 for one in held)])[:length]
        )
        blocks.append(launched)
    assert seen == found
    assert sum(blocks) == sum(i for i in range(count))
