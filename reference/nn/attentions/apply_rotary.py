"""q or k rotated by angles, differentiable: `twin::rotary` in the layouts of attention."""

from typing import NamedTuple

import torch

from reference.nn.attentions.heads import dense_rows
from reference.nn.attentions.inference_step import Cached, StepTensors, turned
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.context import BlockContext
from reference.ops.library import twin
from reference.support.nested import Tensors


class RotaryPlan(NamedTuple):
    """Whether the gradient is wanted, and whether neighbours are paired."""

    needs: tuple[bool, ...]
    interleaved: bool


def rotary_forward(plan: RotaryPlan, context: BlockContext, x: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
    """x `[s, b, h, d]` rotated by the context's angles `[s, d]`."""
    return twin.rotary(x, context.reads[0], plan.interleaved, False), ()


def rotary_backward(plan: RotaryPlan, context: BlockContext, saved: tuple[()], grad: torch.Tensor) -> Tensors:
    """The gradient, rotated back."""
    return (twin.rotary(dense_rows(grad), context.reads[0], plan.interleaved, True),)


def turn(
    x: torch.Tensor,
    angles: torch.Tensor,
    interleaved: bool,
    layout: str,
    backward: bool,
    step: tuple[Cached, StepTensors] | None = None,
) -> torch.Tensor:
    """x `[s, b, h, d]`, `[b, s, h, d]` or `[t, h, d]` rotated by angles `[s, d]` or `[t, d]`; not differentiable.

    `step`: of a cache; a token's angle is that of its position there.
    """
    if layout == "thd":
        return twin.rotary(dense_rows(x)[:, None], angles, interleaved, backward)[:, 0]
    x = dense_rows(x)
    x = x.transpose(0, 1) if layout == "bshd" else x
    out = twin.rotary(x, angles, interleaved, backward) if step is None else turned(*step, x, angles, interleaved)
    return out.transpose(0, 1) if layout == "bshd" else out


def angles_of(freqs: torch.Tensor) -> torch.Tensor:
    """Angles `[s, 1, 1, d]` as `[s, d]`, the op's form."""
    return freqs.reshape(freqs.shape[0], freqs.shape[1:].numel()).contiguous()


def _turn(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    plan, context = RotaryPlan(wanted(x), interleaved), BlockContext(reads=(angles,))
    return differentiable(rotary_forward, rotary_backward, plan, context, x)


def rotated_at(x: torch.Tensor, freqs: torch.Tensor, interleaved: bool, positions: torch.Tensor) -> torch.Tensor:
    """x `[.., h, d]` rotated, each token by its row of `freqs [s, 1, 1, d]`; positions int64, as x without `h, d`.

    x has any strides; the result is contiguous.
    """
    rows = dense_rows(x.reshape(-1, 1, *x.shape[-2:]))
    out = _turn(rows, angles_of(freqs).index_select(0, positions.reshape(-1)), interleaved)
    return out.contiguous().view(x.shape)


def rotated(
    x: torch.Tensor,
    freqs: torch.Tensor,
    interleaved: bool,
    qkv_format: str,
    positions: torch.Tensor | None = None,
    step: tuple[Cached, StepTensors] | None = None,
) -> torch.Tensor:
    """x `[s, b, h, d]`, `[b, s, h, d]` or `[t, h, d]` rotated by the angles `freqs [s, 1, 1, d]`.

    `positions`: of "thd"; a token's is that in its sequence. `step`: of `InferenceParams`; a token's position is
    that in its cache. x has any strides; the result is contiguous.
    """
    angles, x = angles_of(freqs), x.contiguous()
    if positions is not None:
        x, angles = x[:, None], angles[positions]
    x = x.transpose(0, 1) if qkv_format == "bshd" else x
    out = _turn(x, angles, interleaved) if step is None else turned(*step, x, angles, interleaved)
    return out[:, 0] if positions is not None else out.transpose(0, 1) if qkv_format == "bshd" else out
