"""`twin::hadamard`: the random Hadamard transform of 16 neighbouring numbers of a row.

    y[r, 16·b + j] = round( Σ_i x[r, 16·b + i] · (s_i · H_ij / 4) )        i = 0, 1, ..., 15 in order, from +0

H is Sylvester's 16×16 matrix of ±1, H_ij = (−1)^(number of ones in the bits of i & j); s are signs drawn once and for
all. Each addition is one of fp32, as each product; `round` rounds once to x's dtype. K = cols is padded with zeros to
whole sixteens.

H · diag(s) / 4 is orthogonal. So a·bᵀ keeps its value if both operands are transformed along K, while an outlier of one
number is spread over sixteen, whose common scale of NVFP4 it would otherwise set. The transform and its signs are
Transformer Engine 2.20's (`NVFP4QuantizerRef._apply_rht`, `get_wgrad_sign_vector`), which multiplies by matrices in x's
dtype: bf16 products are then summed in fp32, in an order of its own.
"""

import torch

from reference.numbers import block_formats
from reference.ops.checks import check_input
from reference.ops.library import define

BLOCK = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def matrix() -> torch.Tensor:
    """s_i · H_ij / 4, fp32 `[16, 16]`."""
    rows = [[sign * (-1) ** (i & j).bit_count() / 4 for j in range(BLOCK)] for i, sign in enumerate(SIGNS)]
    return torch.tensor(rows, dtype=torch.float32, device="cpu")


def outputs(x: torch.Tensor) -> torch.Tensor:
    check_input("twin::hadamard", "x", x)
    return x.new_empty((x.shape[0], BLOCK * block_formats.blocks(x.shape[1], BLOCK)))


@define(outputs, cpu_only=block_formats.CPU_ONLY)
def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x `[rows, K]` -> `[rows, ceil16(K)]` of x's dtype."""
    out = outputs(x)
    wide = block_formats.whole(x, BLOCK).float().view(-1, BLOCK)
    total = torch.zeros_like(wide)
    for column, row in zip(wide.t(), matrix(), strict=True):
        total += column[:, None] * row
    return out.copy_(total.view(out.shape))
