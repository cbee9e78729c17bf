"""`twin::attention_amax` and `twin::attention_backward_amax`: attention, and the amax by which its results are cast.

    attention_amax             out, m, inv   `twin::attention`              amax = max |out|
    attention_backward_amax    dq, dk, dv    `twin::attention_backward`     amax = the largest |x| of all three

The amax, fp32 `[1, 1]`, is that of the results, which have been rounded to q's dtype; infinity counts, NaN does not,
and it is 0 where there is no other number. `twin::current_scale` makes the scale of it: current scaling casts out as
the next projection's input, and dq, dk and dv side by side as the gradient of the projection before. The kernels have
each number in a register when they store it.
"""

import torch

from reference.numbers import formats
from reference.ops.attentions import attention as forward
from reference.ops.attentions import attention_backward as backward
from reference.ops.attentions.attention_options import Options
from reference.ops.library import define

Tensor = torch.Tensor | None
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def in_passing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> bool:
    """Whether kernels find the amax: of heads up to 128 channels, without a bias, sinks, lengths or segments.

    Where they do not, the results are read for it.
    """
    if options.biased or options.has_lengths or options.packed or options.sinks is not None:
        return False
    in_a_whole = options.rng_state is not None and len(options.rng_state) != 2  # dropout draws in a larger tensor
    segmented = options.key_segment is not None and k.shape[2] > options.key_segment
    return not (in_a_whole or segmented) and max(q.shape[3], v.shape[3]) <= 128 and min(q.numel(), k.numel()) > 0


def largest(xs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
    """The amax of all numbers of several tensors, written to `out`, fp32 of one element."""
    return out.copy_(torch.stack([formats.amax(x).view(()) for x in xs]).amax())


def outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> Four:
    return *forward.outputs(q, k, v, *options), q.new_empty((1, 1), dtype=torch.float32)


def backward_outputs(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    *options: object,
) -> Four:
    return *backward.outputs(grad, q, k, v, out, m, inv, *options), q.new_empty((1, 1), dtype=torch.float32)


@define(outputs, mutates=("rng_state",))
def attention_amax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask_type: str,
    left: int,
    right: int,
    mask: Tensor,
    dropout: float,
    rng_state: Tensor,
    bias: Tensor = None,
    slopes: Tensor = None,
    sinks: Tensor = None,
    q_lengths: Tensor = None,
    kv_lengths: Tensor = None,
    q_starts: Tensor = None,
    kv_starts: Tensor = None,
    longest_q: int | None = None,
    longest_kv: int | None = None,
    key_segment: int | None = None,
) -> Four:
    """-> (out, m, inv, amax of out, fp32 `[1, 1]`); arguments as in `twin::attention`."""
    first = (scale, mask_type, left, right, mask, dropout, rng_state, bias, slopes, sinks, q_lengths, kv_lengths)
    options = (*first, q_starts, kv_starts, longest_q, longest_kv, key_segment)
    out, m, inv = forward.attention(q, k, v, *options)
    return out, m, inv, largest((out,), outputs(q, k, v, *options)[3])


@define(backward_outputs)
def attention_backward_amax(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    scale: float,
    mask_type: str,
    left: int,
    right: int,
    mask: Tensor,
    dropout: float,
    rng_state: Tensor,
    bias: Tensor = None,
    slopes: Tensor = None,
    sinks: Tensor = None,
    q_lengths: Tensor = None,
    kv_lengths: Tensor = None,
    q_starts: Tensor = None,
    kv_starts: Tensor = None,
    longest_q: int | None = None,
    longest_kv: int | None = None,
    key_segment: int | None = None,
) -> Four:
    """-> (dq, dk, dv, amax of all three, fp32 `[1, 1]`); arguments as in `twin::attention_backward`."""
    first = (scale, mask_type, left, right, mask, dropout, rng_state, bias, slopes, sinks, q_lengths, kv_lengths)
    options = (*first, q_starts, kv_starts, longest_q, longest_kv, key_segment)
    grads = backward.attention_backward(grad, q, k, v, out, m, inv, *options)
    return *grads, largest(grads, backward_outputs(grad, q, k, v, out, m, inv, *options)[3])
