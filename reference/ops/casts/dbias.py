"""`twin::dbias`: the gradient of a bias, the sum of the rows of the output's gradient.

    dbias[c] = round(Σ_r fp32(grad[r, c]))    fp32 additions in the order below, one rounding to grad.dtype

The order depends on the number of rows alone. Rows form blocks of 64, the last one padded with +0.0, and each block
four runs of 16. In a run a halving tree adds, for h in (8, 4, 2, 1), row r + h to row r for r < h; the same tree, for
h in (2, 1), adds the sums of the four runs. The sums of the blocks are added in order, starting from block 0's. No
rows give +0.

Runs have 16 rows because one thread of the cast kernel owns 16, and one warp holds 16 of a tensor core's 64-row
result: in either, a block's sum needs few exchanges between threads.
"""

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_input
from reference.ops.library import define

BLOCK = 64
RUN = 16

# Elements added at a time, roughly: 1 MiB of fp32, which stays in the cache from level to level of the tree.
_CHUNK = 1 << 18


def sum_rows(grad: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of `grad` `[rows, cols]` in that order, before its rounding: fp32 `[cols]`."""
    grad = grad.detach()
    rows, cols = grad.shape
    total = np.zeros(cols, dtype=np.float32)
    # Whole blocks at a time, by elementwise additions: any library's sum has an order of its own.
    at_once = max(1, _CHUNK // (BLOCK * max(cols, 1))) * BLOCK
    for start in range(0, rows, at_once):
        part = grad[start : start + at_once]
        missing = -part.shape[0] % BLOCK
        if missing:
            part = torch.cat([part, part.new_zeros(missing, cols)])
        v = formats.widen(part).numpy().reshape(part.shape[0] // BLOCK, BLOCK // RUN, RUN, cols)
        with np.errstate(over="ignore", invalid="ignore"):
            for h in (8, 4, 2, 1):
                v = v[:, :, :h] + v[:, :, h:]
            v = v[:, :, 0]
            for h in (2, 1):
                v = v[:, :h] + v[:, h:]
            for number, block in enumerate(v[:, 0], start // BLOCK):
                # Not 0 + block, which would lose the sign of a zero.
                total = total + block if number else block
    return torch.from_numpy(total)


def outputs(grad: torch.Tensor) -> torch.Tensor:
    check_input("twin::dbias", "grad", grad)
    return grad.new_empty(grad.shape[1])


@define(outputs)
def dbias(grad: torch.Tensor) -> torch.Tensor:
    """`grad` `[rows, cols]` -> `[cols]`, both of the same dtype: fp32, bf16 or fp16."""
    return outputs(grad).copy_(sum_rows(grad))
