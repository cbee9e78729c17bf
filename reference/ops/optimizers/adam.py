"""`twin::adam`: one step of Adam (or AdamW) for a list of tensors, with moments and master weights in fp32.

Each operation rounds once to fp32, in the order of the brackets. g is the widened gradient, p the widened parameter;
every scalar is rounded to fp32 first, and 1 − β is computed in fp32:

    g = g + (decay · p)                                    only where the decay is not decoupled
    m = (β1 · m) + ((1 − β1) · g)
    v = (β2 · v) + (((1 − β2) · g) · g)
    u = (m / c1) / (sqrt(v / c2) + eps)                    IEEE division and square root; c1, c2: `correction`
    u = u + (decay · p)                                    only where the decay is decoupled: AdamW
    p = p − (lr · u)

p is rounded once to the parameter's dtype; the copy of a master is another rounding of the same fp32 p. No operation
is fused with another. NaN and infinities propagate as in IEEE arithmetic.

Source: Transformer Engine's `common/multi_tensor/adam.cu`, whose compiler may fuse multiplications with additions.
"""

from collections.abc import Sequence

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.checks import check_each, check_lengths
from reference.ops.library import define

OP = "twin::adam"


def correction(beta: float, step: int) -> float:
    """1 − beta^step, the divisor of a moment after `step` steps: in float64, by squarings and products, no `pow`."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"{OP}: step={step!r}; an int >= 0 is accepted.")
    power, base = 1.0, float(beta)
    while step:
        power *= base if step & 1 else 1.0
        base *= base
        step >>= 1
    return 1.0 - power


def update(
    g: np.ndarray, p: np.ndarray, m: np.ndarray, v: np.ndarray, scalars: Sequence[float], decoupled: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The new p, m and v, all fp32; `scalars` are lr, β1, β2, eps, decay, c1, c2."""
    rate, b1, b2, epsilon, decay, c1, c2 = (np.float32(x) for x in scalars)
    one = np.float32(1)
    with np.errstate(all="ignore"):
        if not decoupled:
            g = g + decay * p
        m = b1 * m + (one - b1) * g
        v = b2 * v + ((one - b2) * g) * g
        u = (m / c1) / (np.sqrt(v / c2) + epsilon)
        if decoupled:
            u = u + decay * p
        return np.asarray(p - rate * u), np.asarray(m), np.asarray(v)


def outputs(
    grads: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    rounded: Sequence[torch.Tensor],
    *scalars: float,
) -> None:
    """Refuse what `twin::adam` does not accept; any scalars are accepted."""
    lists = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists |= {"rounded": rounded} if len(rounded) else {}
    check_lengths(OP, "grads", len(grads), lists)
    if not len(grads):
        return
    wide = grads[0].dtype
    if wide not in formats.WIDE_DTYPES:
        raise TypeError(f"{OP}: grads[0] is {wide}; float32, bfloat16 and float16 are accepted.")
    if params[0].dtype not in (torch.float32, wide) or (len(rounded) and params[0].dtype != torch.float32):
        masters = "masters in float32" if len(rounded) else f"{wide} and float32"
        raise TypeError(f"{OP}: params[0] is {params[0].dtype}; {masters} are accepted.")
    dtypes = {"params": params[0].dtype, "exp_avgs": torch.float32, "exp_avg_sqs": torch.float32, "rounded": wide}
    shapes, device = [grad.shape for grad in grads], grads[0].device
    for name, tensors in ({"grads": grads} | lists).items():
        check_each(OP, name, tensors, dtypes.get(name, wide), shapes, device)


@define(outputs, mutates=("params", "exp_avgs", "exp_avg_sqs", "rounded"))
def adam(
    grads: list[torch.Tensor],
    params: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    rounded: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    correction1: float,
    correction2: float,
    decoupled: bool,
) -> None:
    """Change `params`, `exp_avgs`, `exp_avg_sqs` and `rounded` in place. All lists have the gradients' shapes.

    Args:
        grads: of one dtype, fp32, bf16 or fp16.
        params: of the gradients' dtype, or fp32.
        exp_avgs, exp_avg_sqs: fp32, m and v.
        rounded: empty, or for each fp32 parameter a tensor of the gradients' dtype that receives its rounded copy.
        lr, beta1, beta2, eps, weight_decay: Adam's.
        correction1, correction2: c1 and c2; 1 without bias correction.
        decoupled: AdamW's weight decay.
    """
    outputs(grads, params, exp_avgs, exp_avg_sqs, rounded)
    scalars = (lr, beta1, beta2, eps, weight_decay, correction1, correction2)
    for i, grad in enumerate(grads):
        g, p = (formats.widen(x.detach()).numpy() for x in (grad, params[i]))
        found = update(g, p, exp_avgs[i].numpy(), exp_avg_sqs[i].numpy(), scalars, decoupled)
        new, m, v = (torch.from_numpy(x) for x in found)
        exp_avgs[i].copy_(m)
        exp_avg_sqs[i].copy_(v)
        params[i].copy_(new)
        if rounded:
            rounded[i].copy_(new)
