"""Calls of `norm_cast`: rows of every width at which another kernel begins. `norm_cast_transpose` has its words."""

from itertools import product

import torch

from optimized.recordings.calls import BF16, FP16, FP32, Calls, Inputs, ahead
from optimized.recordings.case import FP8, WIDE
from optimized.recordings.cases.norm_cast_transpose import casting
from reference.ops.norms.norm import KINDS

twin = torch.ops.twin


def calls(c: Inputs) -> Calls:
    for kind, dtype, q in product(KINDS, WIDE, FP8):
        yield casting(c, twin.norm_cast, kind, 65, 80, dtype, q)
    for kind, dtype in product(KINDS, WIDE):
        for hidden in (1024, 2560) if dtype == FP16 else (208, 1024, 1040, 2064, 3088, 4096, 5120, 6128, 8192, 12272):
            yield casting(c, twin.norm_cast, kind, 17, hidden, dtype)
        if dtype != FP16:
            for hidden in (16384, 16400):
                yield casting(c, twin.norm_cast, kind, 3, hidden, dtype)
    for rows in (0, 1, 64):
        yield casting(c, twin.norm_cast, "layernorm", rows, 64)
    yield casting(c, twin.norm_cast, "layernorm", 4, 64, start=1)
    yield casting(c, twin.norm_cast, "rmsnorm", 4, 64, weights=FP32)
    yield casting(c, twin.norm_cast, "rmsnorm", 2, 4096)._replace(chosen=ahead(twin.norm_cast))


def large(c: Inputs) -> Calls:
    for kind, dtype, hidden in product(KINDS, WIDE, (1024, 1040, 2560, 4096, 16384, 16400)):
        yield casting(c, twin.norm_cast, kind, 9000, hidden, dtype)


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for kind, dtype in product(KINDS, (BF16, FP32)):
        yield casting(c, twin.norm_cast, kind, rows, cols, dtype)
