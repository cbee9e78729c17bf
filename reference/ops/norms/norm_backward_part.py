"""A norm's backward of some of the rows: `twin::norm_backward_part`, and then `twin::norm_total`.

The column sums of `twin::norm_backward` (`reference.ops.norms.norm`) are sums of blocks of rows, and then of blocks in
order. So rows may be cut between blocks:

    norm_backward_part     dx, and the sum of each block of `count` rows in fp32
    norm_total             those of all rows, one part's after the other, added in order; rounded once

With `count` as of all rows, ceil(rows / 256), the result has the words of `twin::norm_backward` of all of them. The
parts may be other processes': that is how ranks that have some of the tokens each share these sums.
"""

import torch

from reference.ops.checks import check_wide
from reference.ops.library import define
from reference.ops.norms.norm import MAX_HIDDEN, ROW_BLOCKS, backward_sums, norm_backward_outputs, sum_of_blocks

Parts = tuple[torch.Tensor, torch.Tensor]


def outputs(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    kind: str,
    residual_grad: torch.Tensor | None,
    count: int,
) -> Parts:
    dx, _, dbias = norm_backward_outputs(grad, x, weight, mean, rstd, zero_centered, kind, residual_grad)
    if count < 1:
        raise ValueError(f"twin::norm_backward_part: count={count!r}; rows of a block, 1 or more, is accepted.")
    blocks, hidden = -(-x.shape[0] // count), x.shape[1]
    if blocks > ROW_BLOCKS:
        raise ValueError(
            f"twin::norm_backward_part: count={count!r} of {x.shape[0]} rows gives {blocks} blocks; {ROW_BLOCKS} at "
            f"most are accepted."
        )
    return dx, x.new_empty((2 if dbias.numel() else 1, blocks, hidden), dtype=torch.float32)


def total_outputs(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    op = "twin::norm_total"
    if blocks.dtype != torch.float32 or blocks.dim() != 2 or not blocks.is_contiguous() or len(blocks) > ROW_BLOCKS:
        raise ValueError(
            f"{op}: blocks is {blocks.dtype} {tuple(blocks.shape)}, strides {blocks.stride()}; contiguous float32 "
            f"[blocks, hidden], of at most {ROW_BLOCKS} blocks, is accepted."
        )
    if not 1 <= blocks.shape[1] <= MAX_HIDDEN:
        raise ValueError(f"{op}: blocks has shape {tuple(blocks.shape)}; 1 to {MAX_HIDDEN} columns are accepted.")
    check_wide(op, "dtype", dtype)
    return blocks.new_empty(blocks.shape[1], dtype=dtype)


@define(outputs)
def norm_backward_part(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    kind: str,
    residual_grad: torch.Tensor | None,
    count: int,
) -> Parts:
    """Arguments as of `twin::norm_backward` -> (dx, fp32 sums `[1 or 2, blocks, hidden]`).

    The first sums are dweight's, the second, of layernorm, dbias's. `count`: rows of a block, at most 256 blocks.
    """
    given = (grad, x, weight, mean, rstd, zero_centered, kind, residual_grad)
    dx, sums = outputs(*given, count)
    for one, found in zip(sums, backward_sums(dx, *given, count), strict=True):
        one.copy_(torch.from_numpy(found))
    return dx, sums


@define(total_outputs)
def norm_total(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums of at most 256 blocks, fp32 `[blocks, hidden]`, in order -> their sum `[hidden]` of a dtype."""
    out = total_outputs(blocks, dtype)
    return out.copy_(torch.from_numpy(sum_of_blocks(blocks.numpy())))
