"""`twin::activation_cast_blocks_transpose` and its backward: an activation, rounded, and cast in blocks of a row.

x `[rows, n]`, grad `[rows, m]` and the kinds are those of `reference.ops.activations.activation`.

    activation_cast_blocks_transpose                 y = `twin::activation` of x, in x's dtype
                                                     q, q_t, scale_inv, scale_inv_t: `twin::cast_blocks_transpose` of y
    activation_backward_cast_blocks_transpose_dbias  dx = `twin::activation_backward` of grad and x, in x's dtype
                                                     q, ..., scale_inv_t: `twin::cast_blocks_transpose` of dx
                                                     dbias: `twin::dbias` of dx

each bit for bit, with blocks of 128 columns of a row. The rounding to x's dtype comes before a block's amax, as in
Transformer Engine, which casts in a kernel of its own. Only here y and dx are never in memory.
"""

import torch

from reference.ops.activations.activation import (
    activation,
    activation_backward,
    check_activation,
    check_grad,
    width,
)
from reference.ops.casts.cast_blocks import Five, Four, cast_blocks_transpose, check_cast_blocks, new_four
from reference.ops.casts.dbias import dbias
from reference.ops.library import define

FORWARD = "twin::activation_cast_blocks_transpose"
BACKWARD = "twin::activation_backward_cast_blocks_transpose_dbias"


def forward_outputs(x: torch.Tensor, kind: str, dtype: torch.dtype, dialect: str, epsilon: float) -> Four:
    check_activation(FORWARD, x, kind)
    cols = width(kind, x.shape[1])
    check_cast_blocks(FORWARD, cols, dtype, dialect, epsilon)
    return new_four(x, cols, dtype, False)


def backward_outputs(
    grad: torch.Tensor, x: torch.Tensor, kind: str, dtype: torch.dtype, dialect: str, epsilon: float
) -> Five:
    check_activation(BACKWARD, x, kind)
    check_grad(BACKWARD, grad, x, kind)
    if width(kind, x.shape[1]) % 8:
        raise ValueError(
            f"{BACKWARD}: grad must have a multiple of 8 columns, so that both halves of dx begin at a vector; "
            f"got {grad.shape[1]} (kind {kind!r})."
        )
    check_cast_blocks(BACKWARD, x.shape[1], dtype, dialect, epsilon)
    return *new_four(x, x.shape[1], dtype, False), x.new_empty(x.shape[1])


@define(forward_outputs)
def activation_cast_blocks_transpose(
    x: torch.Tensor, kind: str, dtype: torch.dtype, dialect: str, epsilon: float
) -> Four:
    """`x` `[rows, n]` -> (q `[rows, m]`, q_t `[m, ceil16(rows)]` of `dtype`, scale_inv, scale_inv_t fp32)."""
    forward_outputs(x, kind, dtype, dialect, epsilon)
    return cast_blocks_transpose(activation(x, kind), dtype, False, dialect, epsilon)


@define(backward_outputs)
def activation_backward_cast_blocks_transpose_dbias(
    grad: torch.Tensor, x: torch.Tensor, kind: str, dtype: torch.dtype, dialect: str, epsilon: float
) -> Five:
    """`grad` `[rows, m]`, `x` `[rows, n]` -> (q `[rows, n]`, q_t `[n, ceil16(rows)]`, scale_inv, scale_inv_t, dbias
    `[n]`).
    """
    backward_outputs(grad, x, kind, dtype, dialect, epsilon)
    dx = activation_backward(grad, x, kind)
    return *cast_blocks_transpose(dx, dtype, False, dialect, epsilon), dbias(dx)
