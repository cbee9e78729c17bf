"""`twin::sgd`: one step of SGD, with momentum or without, for a list of tensors.

Each operation rounds once to fp32, in the order of the brackets. g is the widened gradient, p the widened parameter, b
the widened momentum buffer; every scalar is rounded to fp32 first, and 1 − dampening is computed in fp32:

    g = g + (decay · p)                                    where decay is not 0, unless it comes after the momentum
    b = g                                                  in a buffer's first step
    b = (b · momentum) + ((1 − dampening) · g)             in every other one
    g = b, or with Nesterov's momentum g + (momentum · b)  both lines only where momentum is not 0
    g = g + (decay · p)                                    where decay is not 0 and comes after the momentum
    p = p − (lr · g)

p is rounded once to the parameter's dtype, and so is b; the step goes on with the b that is not rounded. No operation
is fused with another. NaN and infinities propagate as in IEEE arithmetic.

Source: Transformer Engine's `common/multi_tensor/sgd.cu`, whose compiler may fuse multiplications with additions.
"""

from collections.abc import Sequence

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_each, check_lengths
from reference.ops.library import define

OP = "twin::sgd"


def outputs(
    grads: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    lr: float,
    momentum: float,
    *scalars: float,
) -> None:
    """Refuse what `twin::sgd` does not accept; any scalars are accepted."""
    if bool(len(buffers)) != bool(momentum and len(grads)):
        raise ValueError(f"{OP}: momentum={momentum!r} with {len(buffers)} buffers; buffers belong to a momentum.")
    check_lengths(OP, "grads", len(grads), {"params": params} | ({"buffers": buffers} if len(buffers) else {}))
    if not len(grads):
        return
    wide, dtype = grads[0].dtype, params[0].dtype
    if wide not in formats.WIDE_DTYPES:
        raise TypeError(f"{OP}: grads[0] is {wide}; float32, bfloat16 and float16 are accepted.")
    if dtype not in (torch.float32, wide):
        raise TypeError(f"{OP}: params[0] is {dtype}; {wide} and float32 are accepted.")
    shapes, device = [grad.shape for grad in grads], grads[0].device
    for name, expected, tensors in (("grads", wide, grads), ("params", dtype, params), ("buffers", dtype, buffers)):
        if len(tensors):
            check_each(OP, name, tensors, expected, shapes, device)


@define(outputs, mutates=("params", "buffers"))
def sgd(
    grads: list[torch.Tensor],
    params: list[torch.Tensor],
    buffers: list[torch.Tensor],
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
) -> None:
    """Change `params` and `buffers` in place. All lists have the gradients' shapes.

    Args:
        grads: of one dtype, fp32, bf16 or fp16.
        params: of the gradients' dtype, or fp32.
        buffers: of the parameters' dtype; empty without momentum.
        lr, momentum, dampening, weight_decay: SGD's.
        nesterov: Nesterov's momentum.
        first_run: the buffers hold no numbers yet.
        wd_after_momentum: add the weight decay after the momentum.
    """
    outputs(grads, params, buffers, lr, momentum)
    rate, mu, damping, decay = (np.float32(x) for x in (lr, momentum, dampening, weight_decay))
    rest = np.float32(1) - damping
    for i, grad in enumerate(grads):
        g, p = (formats.widen(x.detach()).numpy() for x in (grad, params[i]))
        with np.errstate(all="ignore"):
            if decay and not wd_after_momentum:
                g = g + decay * p
            if buffers:
                b = g if first_run else formats.widen(buffers[i]).numpy() * mu + rest * g
                buffers[i].copy_(torch.from_numpy(np.asarray(b)))
                g = g + mu * b if nesterov else b
            if decay and wd_after_momentum:
                g = g + decay * p
            params[i].copy_(torch.from_numpy(np.asarray(p - rate * g)))
