"""`twin::softmax` and `twin::softmax_backward`: the softmax of whole rows of scores, scaled and masked.

    s = x · scale              fp32; -inf where a pair is hidden
    e = exp(s - max s)         `reference.numbers.elementary.exp`; 0 where hidden
    y = round(e · (1 / Σ e))   one rounding to x's dtype; +0 in a row that is hidden altogether

    dx = round(scale · (y · (grad - Σ y · grad)))

Each operation is one of fp32. The order of both sums: element 8 (32 i + lane) + j of a row belongs to accumulator
[lane][j], lane < 32, j < 8, which adds in order of i from +0 (in the backward by fma). Then a halving tree over
j, for h in (4, 2, 1): [lane][j] + [lane][j + h], j < h; then one over the lanes, for h in (16, 8, 4, 2, 1).

The maximum ignores NaN, and counts as 0 where no score is above -inf. A NaN or a score of +inf makes its row NaN.
`twin::attention` does not use this op. It is for attention in separate steps (Transformer Engine's scaled masked
softmax).
"""

import numpy as np
import torch

from reference.numbers import elementary
from reference.numbers.elementary import ZERO, exp_scalar
from reference.ops.attentions.attention import causal_shift, check_mask, check_scale
from reference.ops.checks import check_like, check_wide
from reference.ops.library import define
from reference.support.numba_jit import fma, jit

_INFINITY = np.float32(np.inf)
_ONE = np.float32(1.0)


def check_scores(op: str, name: str, x: torch.Tensor, scale: float) -> None:
    """Refuse scores that are not contiguous `[b, h, sq, skv]` in fp32, bf16 or fp16, and a bad scale."""
    if x.dim() != 4 or not x.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous [b, h, sq, skv]; got {list(x.shape)}, strides {x.stride()}.")
    check_wide(op, name, x.dtype)
    check_scale(op, scale)


def softmax_outputs(x: torch.Tensor, scale: float, mask_type: str, mask: torch.Tensor | None) -> torch.Tensor:
    check_scores("twin::softmax", "x", x, scale)
    check_mask("twin::softmax", tuple(x.shape), x.device, mask_type, mask)
    return torch.empty_like(x)


def softmax_backward_outputs(grad: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    check_scores("twin::softmax_backward", "y", y, scale)
    check_like("twin::softmax_backward", "grad", grad, y.dtype, y.shape, y.device)
    return torch.empty_like(y)


@jit
def tree(sums: np.ndarray) -> np.float32:
    """The sum of accumulators `[32, 8]` in that order; overwrites them."""
    h = 4
    while h > 0:
        for lane in range(32):
            for j in range(h):
                sums[lane, j] = sums[lane, j] + sums[lane, j + h]
        h //= 2
    h = 16
    while h > 0:
        for lane in range(h):
            sums[lane, 0] = sums[lane, 0] + sums[lane + h, 0]
        h //= 2
    return sums[0, 0]


@jit
def softmax_rows(x: np.ndarray, hidden: np.ndarray, scale: np.float32, y: np.ndarray, powers: np.ndarray) -> None:
    """x to y, fp32 `[rows, cols]`, before the last rounding."""
    rows, cols = x.shape
    sums = np.zeros((32, 8), np.float32)
    for row in range(rows):
        top = -_INFINITY
        for c in range(cols):
            if not hidden[row, c] and x[row, c] * scale > top:  # false for NaN
                top = x[row, c] * scale
        if top == -_INFINITY:
            top = ZERO
        sums[:] = ZERO
        for c in range(cols):
            y[row, c] = ZERO if hidden[row, c] else exp_scalar(x[row, c] * scale - top, powers)
            sums[c // 8 % 32, c % 8] += y[row, c]
        total = tree(sums)
        inverse = ZERO if total == ZERO else _ONE / total
        for c in range(cols):
            y[row, c] = y[row, c] * inverse


@jit
def softmax_backward_rows(grad: np.ndarray, y: np.ndarray, scale: np.float32, dx: np.ndarray) -> None:
    """The gradient, fp32 `[rows, cols]`, before the last rounding."""
    rows, cols = y.shape
    sums = np.zeros((32, 8), np.float32)
    for row in range(rows):
        sums[:] = ZERO
        for c in range(cols):
            sums[c // 8 % 32, c % 8] = fma(y[row, c], grad[row, c], sums[c // 8 % 32, c % 8])
        total = tree(sums)
        for c in range(cols):
            dx[row, c] = scale * (y[row, c] * (grad[row, c] - total))


def _fp32(x: torch.Tensor) -> np.ndarray:
    return x.float().reshape(-1, x.shape[-1]).numpy()


@define(softmax_outputs)
def softmax(x: torch.Tensor, scale: float, mask_type: str, mask: torch.Tensor | None) -> torch.Tensor:
    """`x` `[b, h, sq, skv]` -> y of x's dtype and shape.

    Args:
        x: scores, contiguous; fp32, bf16 or fp16.
        scale: positive.
        mask_type: "none", "causal" or "causal_bottom_right", as in `twin::attention`.
        mask: bool, broadcastable to x, True where a pair is hidden.
    """
    out = softmax_outputs(x, scale, mask_type, mask)
    if not x.numel():
        return out
    sq, skv = x.shape[2:]
    shift = causal_shift(mask_type, sq, skv)
    hidden = torch.zeros(sq, skv, dtype=torch.bool, device="cpu")
    if shift is not None:
        hidden = torch.arange(skv, device="cpu")[None, :] > torch.arange(sq, device="cpu")[:, None] + shift
    hidden = (hidden if mask is None else hidden | mask).expand(x.shape)
    values = _fp32(x)
    y = np.empty_like(values)
    rows = np.ascontiguousarray(hidden.reshape(-1, skv).numpy())
    softmax_rows(values, rows, np.float32(scale), y, elementary.powers_of_two())
    return out.copy_(torch.from_numpy(y).view(x.shape))


@define(softmax_backward_outputs)
def softmax_backward(grad: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of x from the gradient of y and y; all `[b, h, sq, skv]` of one dtype."""
    out = softmax_backward_outputs(grad, y, scale)
    if not y.numel():
        return out
    values = _fp32(y)
    dx = np.empty_like(values)
    softmax_backward_rows(_fp32(grad), values, np.float32(scale), dx)
    return out.copy_(torch.from_numpy(dx).view(y.shape))
