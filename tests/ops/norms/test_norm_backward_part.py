"""`twin::norm_backward_part` and `twin::norm_total`: rows that are cut between blocks have the words of all of them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.bits import assert_same_bits

from reference.ops.library import twin
from reference.ops.norms.norm import KINDS, block_rows


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_parts_have_the_words_of_the_whole(kind: str, data: st.DataObject) -> None:
    rows, hidden = data.draw(st.integers(1, 700)), data.draw(st.sampled_from((1, 17, 1032, 2064)))
    count = block_rows(rows)
    blocks = -(-rows // count)
    cuts = sorted({0, blocks, *(data.draw(st.lists(st.integers(0, blocks), max_size=3)))})
    g = torch.Generator().manual_seed(rows)
    grad, x, more = (torch.randn(rows, hidden, generator=g).to(torch.bfloat16) for _ in range(3))
    weight = torch.randn(hidden, generator=g).to(torch.bfloat16)
    mean = torch.randn(rows if kind == "layernorm" else 0, generator=g)
    rstd = torch.rand(rows, generator=g) + 0.5
    whole = twin.norm_backward(grad, x, weight, mean, rstd, True, kind, more)
    dx, sums = [], []
    for first, end in itertools.pairwise(cuts):
        part = slice(first * count, end * count)
        of_part = (grad[part], x[part], weight, mean[part], rstd[part], True, kind, more[part], count)
        one, its_sums = twin.norm_backward_part(*of_part)
        dx.append(one)
        sums.append(its_sums)
    assert_same_bits(torch.cat(dx), whole[0])
    for one, wanted in zip(torch.cat(sums, 1), whole[1:], strict=False):
        assert_same_bits(twin.norm_total(one.contiguous(), torch.bfloat16), wanted)


@pytest.mark.parametrize(
    ("rows", "count", "message"),
    [(10, 0, "count=0; rows of a block, 1 or more, is accepted"), (600, 2, "gives 300 blocks; 256 at most")],
)
def test_blocks_that_are_none_are_refused(rows: int, count: int, message: str) -> None:
    x, weight = torch.zeros(rows, 16), torch.zeros(16)
    with pytest.raises(ValueError, match=message):
        twin.norm_backward_part(x, x, weight, torch.zeros(0), torch.zeros(rows), False, "rmsnorm", None, count)


@pytest.mark.parametrize("blocks", [torch.zeros(3, 4).half(), torch.zeros(4), torch.zeros(300, 2)])
def test_sums_that_are_none_are_refused(blocks: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"twin::norm_total: blocks is .*, of at most 256 blocks, is accepted"):
        twin.norm_total(blocks, torch.float32)
