"""Calls of `gemm_fp8` with K cut into parts; `gemm_fp8` has its recorded cases."""

from collections.abc import Callable
from itertools import product

import torch

from optimized.ops.gemms.gemm_fp8_split_k import gemm_fp8_split_k
from optimized.recordings.calls import BF16, FP32, Call, Calls, Inputs
from optimized.recordings.case import FP8, WIDE
from optimized.recordings.cases.gemm_fp8 import operands

twin = torch.ops.twin


def _cut(*args: object) -> torch.Tensor:
    """With "split" accumulation, which has the same bits."""
    function: Callable[..., torch.Tensor] = gemm_fp8_split_k
    return function(*args[:-1])


def calls(c: Inputs) -> Calls:
    """One part and several, one k-block in a part and several; edges in every direction; each output, with a bias."""
    for shape, out in product(((1, 16, 16), (70, 80, 1168), (130, 272, 4112)), WIDE):
        yield Call(twin.gemm_fp8, (*operands(c, *shape), c.x(shape[1], dtype=FP32), out, "split"), _cut)
    for a, b in product(FP8, FP8):
        yield Call(twin.gemm_fp8, (*operands(c, 64, 64, 1040, a, b), None, BF16, "split"), _cut)
    yield Call(twin.gemm_fp8, (*operands(c, 40, 48, 100 * 128 + 16), c.x(48, start=1), BF16, "split"), _cut)


def large(c: Inputs) -> Calls:
    for a, b, out in product(FP8, FP8, WIDE):
        yield Call(twin.gemm_fp8, (*operands(c, 64, 64, 65536, a, b), None, out, "split"))
    for m, n, k in ((1, 16, 32768), (300, 272, 16384), (130, 528, 30000 * 16)):
        yield Call(twin.gemm_fp8, (*operands(c, m, n, k), c.x(n, start=1), BF16, "split"), _cut)
