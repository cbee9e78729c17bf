"""`twin::tree_mean`: the contract number by number, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.bits import assert_same_bits

from reference.ops.library import twin
from reference.parallel.gradient_tree import additions

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@given(st.integers(1, 12), st.data())
def test_each_number_is_a_tree_of_fp32_additions(groups: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, groups))
    dtype = data.draw(st.sampled_from([BF16, F16, F32]))
    order = additions(groups, ranks)
    draw = torch.Generator().manual_seed(groups)
    nodes = [torch.randn(9, generator=draw).mul(2.0 ** (2 * i - 9)).to(dtype) for i in range(len(order))]
    out = nodes[data.draw(st.integers(0, len(nodes) - 1))] if data.draw(st.booleans()) else torch.empty(9, dtype=dtype)
    kept = [node.clone() for node in nodes]
    twin.tree_mean(nodes, order, 1 / groups, out)
    wanted = torch.empty(9)
    for column in range(9):
        stack: list[Any] = []
        for node, count in zip(kept, order, strict=True):
            stack.append(np.float32(node[column].item()))
            for _ in range(count):
                right = stack.pop()
                stack.append(np.float32(stack[-1] + right))
                del stack[-2]
        wanted[column] = float(np.float32(stack[0] * np.float32(1 / groups)))
    assert_same_bits(out, wanted.to(dtype))


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("own", [0, 1])
def test_the_result_may_take_the_place_of_a_node(own: int, device: torch.device) -> None:
    nodes = [torch.randn(2049 * 3, generator=torch.Generator().manual_seed(i)).to(BF16) for i in range(2)]
    here = torch.empty_like(nodes[0])
    twin.tree_mean(nodes, [0, 1], 0.5, here)
    there = [node.to(device) for node in nodes]
    twin.tree_mean(there, [0, 1], 0.5, there[own])
    assert_same_bits(there[own], here)
    assert_same_bits(there[1 - own], nodes[1 - own])


TWO = [torch.zeros(4, dtype=BF16)] * 2


@pytest.mark.parametrize(
    ("nodes", "order", "dtype", "sentence"),
    [
        (
            TWO,
            [0, 1],
            F16,
            r"nodes are torch\.bfloat16 and out is torch\.float16; nodes of its dtype or of torch\.float32",
        ),
        (TWO, [0, 1], torch.int32, "out must be torch.float32, torch.bfloat16 or torch.float16"),
        ([TWO[0], torch.zeros(5, dtype=BF16)], [0, 1], BF16, r"nodes\[1\] must be contiguous"),
        ([TWO[0][:3]] * 2, [0, 1], BF16, r"out must be contiguous torch\.bfloat16 \[3\]"),
        (TWO, [0], BF16, r"additions=\[0\] of 2 nodes"),
        (TWO, [0, 0], BF16, r"additions=\[0, 0\] of 2 nodes"),
        (TWO, [1, 0], BF16, r"additions=\[1, 0\] of 2 nodes"),
        (TWO, [-1, 2], BF16, r"additions=\[-1, 2\] of 2 nodes"),
    ],
)
def test_what_is_refused(nodes: list[torch.Tensor], order: list[int], dtype: torch.dtype, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^twin::tree_mean: {sentence}"):
        twin.tree_mean(nodes, order, 0.5, torch.empty(4, dtype=dtype))
