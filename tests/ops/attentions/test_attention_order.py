"""The order in which attention's backward adds to dq."""

import functools

import numpy as np
import torch
from shared.attention_cases import Case, inputs, run
from shared.bits import assert_same_bits

from reference.numbers import tensor_core
from reference.ops.attentions.attention import blocks, factor
from reference.ops.attentions.attention_backward import Tiles


def test_dq_adds_key_blocks_from_the_last_to_the_first() -> None:
    case = Case(sq=100, skv=1000, d=32, dtype=torch.float16, seed=1)
    given = inputs(case)
    found = run(case, given)
    head = Tiles(
        {name: (given | found)[name][0] for name in ("q", "k", "v", "grad", "out", "m", "inv")},
        factor(case.softmax_scale),
        0.0,
        None,
    )
    shares = []
    for keys in blocks(case.skv):
        _, ds = head.tile(slice(0, case.sq), keys, np.zeros((case.sq, keys.stop - keys.start), np.bool_))
        shares.append(tensor_core.gemm(ds[0], given["k"][0, 0, keys].t()))

    def added(order: list[torch.Tensor]) -> torch.Tensor:
        return (functools.reduce(torch.add, order) * torch.tensor(case.softmax_scale)).to(case.dtype)

    assert_same_bits(found["dq"][0, 0], added(shares[::-1]), "dq")
    assert not torch.equal(found["dq"][0, 0], added(shares))
