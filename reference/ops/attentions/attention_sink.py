"""`twin::attention_sink_backward`: sinks of attention's softmax, and their gradient.

A head's sink is a score that belongs to no key: it takes a part of the weights with it. With l and m as in
`reference.ops.attentions.attention`, only the sum of a row changes:

    z = sink · log2 e                              fp32, both rounded
    inv = 1 / (l + 2^(z - m))                      2^ on the grid of 2^-15; m does not depend on the sink

A sink of zero is the softmax that is off by one, exp / (1 + Σ exp). Where a row's scores are below the sink by a factor
of 2^128, inv is 0. The backward of q, k and v needs nothing else, as it reads inv and out.

    a = 2^(z - m) · inv                            the sink's weight; +0 where inv is 0
    dsink = -Σ a · D                               D of `reference.ops.attentions.attention_backward`; over batches and
    queries

Lane l = 0..255 owns the rows batch · sq + i that are l modulo 256 and computes t = fma(a, D, t) from +0, in order. Then
a halving tree adds the lanes, for h in (128, 64, .., 1): t[l] = t[l] + t[l + h], l < h.

Source: Transformer Engine's `softmax_type` "off-by-one" and "learnable"; gpt-oss.
"""

import numpy as np
import torch

from reference.numbers import elementary
from reference.numbers.elementary import LOG2E, ZERO, exp2_grid_scalar
from reference.ops.attentions.attention_backward import row_dots
from reference.ops.attentions.attention_packed import by_heads, check_one_side, maps_of, to_sequences
from reference.ops.checks import check_like
from reference.ops.library import define
from reference.support.numba_jit import fma, jit

LANES = 256


@jit
def _sink_gradient(
    m: np.ndarray, inv: np.ndarray, dots: np.ndarray, sink: np.float32, lanes: np.ndarray, powers: np.ndarray
) -> np.float32:
    """-dsink of a head's rows m, inv and dots `[rows]`; lanes `[256]` are zeros."""
    z = sink * LOG2E
    for row in range(m.shape[0]):
        weight = ZERO
        if inv[row] != ZERO:
            weight = exp2_grid_scalar(z - m[row], powers) * inv[row]
        lanes[row % LANES] = fma(weight, dots[row], lanes[row % LANES])
    h = LANES // 2
    while h > 0:
        for lane in range(h):
            lanes[lane] = lanes[lane] + lanes[lane + h]
        h //= 2
    return lanes[0]


def outputs(
    grad: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    sinks: torch.Tensor,
    q_lengths: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    op = "twin::attention_sink_backward"
    rows: tuple[int, ...] = grad.shape[:3]
    if q_starts is not None or q_lengths is not None:
        rows = check_one_side(op, grad, m, q_lengths, q_starts)
        grad, out = (by_heads(x) if x.dim() == 3 else x for x in (grad, out))
    if grad.dim() != 4 or grad.dtype not in (torch.bfloat16, torch.float16) or grad.shape[3] % 8 or grad.shape[3] > 256:
        raise ValueError(
            f"{op}: grad must be torch.bfloat16 or torch.float16 [b, h, sq, d], d a multiple of 8 up to 256; got "
            f"{grad.dtype} {list(grad.shape)}."
        )
    if out.shape != grad.shape or out.dtype != grad.dtype or out.device != grad.device:
        raise ValueError(f"{op}: out must be like grad, {grad.dtype} {list(grad.shape)} on {grad.device}.")
    for name, x in (("grad", grad), ("out", out)):
        if x.stride(3) != 1 and x.numel():
            raise ValueError(f"{op}: {name} must be contiguous in its last dimension; got strides {x.stride()}.")
    for name, x, shape in (("m", m, rows), ("inv", inv, rows), ("sinks", sinks, grad.shape[1:2])):
        check_like(op, name, x, torch.float32, shape, grad.device)
    return torch.empty_like(sinks)


@define(outputs)
def attention_sink_backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    sinks: torch.Tensor,
    q_lengths: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """-> dsinks fp32 `[h]`.

    Args:
        grad: the gradient of out, `[b, h, sq, d]` bf16 or fp16.
        out, m, inv: the forward's results; m and inv fp32 `[b, h, sq]`.
        sinks: fp32 `[h]`, those of the forward.
        q_lengths, q_starts: where grad and out are packed, `[tokens, h, d]`:
        `reference.ops.attentions.attention_packed`.
    """
    dsinks = outputs(grad, out, m, inv, sinks, q_lengths, q_starts)
    if q_starts is not None and q_lengths is not None:
        maps = maps_of(q_lengths, q_starts, m.shape[2], grad.shape[0])
        grad, out = (to_sequences(x, maps).transpose(1, 2) for x in (grad, out))
    if not grad.numel():
        return dsinks.zero_()  # the loop's sum of nothing would be -0
    for head in range(grad.shape[1]):
        rows = [x[:, head].float().flatten(0, 1).contiguous().numpy() for x in (grad, out)]
        dots = np.empty(rows[0].shape[0], np.float32)
        row_dots(*rows, dots)
        stats = [x[:, head].reshape(-1).contiguous().numpy() for x in (m, inv)]
        lanes = np.zeros(LANES, np.float32)
        sink = np.float32(sinks[head].item())
        dsinks[head] = -float(_sink_gradient(*stats, dots, sink, lanes, elementary.powers_of_two()))
    return dsinks
