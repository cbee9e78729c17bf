"""`twin::dbias`: the gradient of a bias, the sum of the rows of the output's gradient.

    dbias[c] = round(Σ_r fp32(grad[r, c]))    fp32 additions in the order below, one rounding to grad.dtype

The order depends on the number of rows alone. Rows are taken in blocks of 64, rows beyond the end being
+0.0, and a block in four runs of 16. In a run a halving tree adds, for h in (8, 4, 2, 1), row r + h to row r
for r < h; over the four runs' sums the same tree, for h in (2, 1). The blocks' sums are added in order,
starting from that of block 0. No rows give +0.

Why runs of 16: they are what one thread of the cast kernel owns, and what one warp holds of a tensor core's
64-row result, so that a block's sum needs few exchanges between threads in either.
"""

import numpy as np
import torch

from reference import formats
from reference.ops.checks import check_input
from reference.ops.library import define

BLOCK = 64
RUN = 16

# Elements added at a time, about: 1 MiB of fp32, which stays in the cache from level to level of the tree.
_CHUNK = 1 << 18


def sum_rows(grad: torch.Tensor) -> torch.Tensor:
    """The sum over the rows of `grad` `[rows, cols]` in the written order, before its rounding: fp32 `[cols]`."""
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
