"""The attention block where PyTorch differentiates attention itself: two pairs of functions, attention between them.

    q, k, v = norm(x)·w_qkvᵀ + b_qkv, normalised, rotated        `into_forward`
    a = attention(q, k, v)                                       PyTorch's own, under its autograd
    h = r + dropout(a·wᵀ + b)                                    `out_forward`

So it is in fp32, and on cuDNN with grouped heads or recomputed (`by_torch`). Plan, context and tensors are those of
`reference.nn.attentions.multihead_pair`, whose functions these are: all bits around attention are the block's.
"""

from typing import Any, NamedTuple

import torch

from reference.nn.attentions.dot_product_plan import Call
from reference.nn.attentions.multihead_pair import (
    Given,
    Plan,
    SavedIn,
    project_in,
    project_in_backward,
    project_out,
    wants_input,
    whole,
)
from reference.nn.attentions.no_grad_inputs import NoGradInputs
from reference.nn.attentions.torch_attention import attend_by_torch
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.context import BlockContext, WeightRequest, quantize_weights
from reference.nn.core.dropout import before_dropped
from reference.nn.layers import linear
from reference.recipes.quantized import rows_of
from reference.support.nested import Tensors


def by_torch(module: Any, dtype: torch.dtype, recomputes: bool) -> bool:
    """Whether PyTorch differentiates the attention of a `MultiheadAttention`."""
    if module._modules["core_attention"].attention_backend != "cudnn":
        return dtype == torch.float32
    return recomputes or module.num_gqa_groups != module.num_attention_heads


class OutWants(NamedTuple):
    """Which gradients of the second pair's tensors are wanted."""

    out: bool
    weight: bool
    bias: bool
    residual: bool


class OutSaved(NamedTuple):
    """What the second pair's backward reads; as in `multihead_pair.Saved`."""

    proj: linear.Saved
    dropped: torch.Tensor | None


def into_forward(plan: Plan, context: BlockContext, *tensors: Any) -> tuple[Any, Any]:
    """q, k and v `[.., .., heads, channels]`, with `returns_norm` also norm(x) in x's shape; of `Given`."""
    given, (first, *others) = Given(*tensors), context.modules
    requests = [WeightRequest(first, first.gemm, given.weight, wants_input(plan.first))]
    if plan.key_value is not None:
        requests.append(WeightRequest(others[0], others[0].gemm, given.key_value_weight, plan.key_value.wants.x))
    w, *more = quantize_weights(*requests)
    of_kv = (others[0], more[0]) if more else None
    qkv, residual, saved = project_in(plan, first, of_kv, NoGradInputs.of(context.reads), given, w)
    results = tuple([whole(x.contiguous(), x.shape) for x in qkv])
    if plan.returns_norm:
        results = (*results, whole(residual, plan.shape))
    return results, () if plan.core.cached is not None else saved._replace(mixed=None, joined=None)


def into_backward(plan: Plan, context: BlockContext, saved: SavedIn, *grads: torch.Tensor) -> Tensors:
    """The gradients of `Given`. PyTorch's attention may give expanded ones, such as zeros where there is no query."""
    (first, *others), (dq, dk, dv, *of_norm) = context.modules, [grad.contiguous() for grad in grads]
    of_norm = [rows_of(grad) for grad in of_norm]
    of_kv = others[0] if others else None
    return project_in_backward(plan, first, of_kv, NoGradInputs.of(context.reads), saved, (dq, dk, dv), None, of_norm)


def out_forward(
    plan: Plan, context: BlockContext, out: torch.Tensor, w: Any, bias: torch.Tensor | None, residual: Any
) -> tuple[torch.Tensor, OutSaved]:
    """h of attention's result `[.., .., heads·channels]`; the residual is in h's shape, None where it is not added."""
    (proj,), (state,), reads = context.modules, context.random, NoGradInputs.of(context.reads)
    (proj_w,) = quantize_weights(WeightRequest(proj, proj.gemm, w, plan.proj.wants.x))
    rows = None if residual is None else rows_of(residual)
    h, saved, dropped = project_out(plan, proj, state, reads, out[..., None, :], proj_w, bias, rows)
    return h, OutSaved(saved, dropped)


def out_backward(plan: Plan, context: BlockContext, saved: OutSaved, grad: torch.Tensor) -> Tensors:
    """The gradients of attention's result, of w and b, and of the residual."""
    inner = before_dropped(rows_of(grad), plan.p, saved.dropped, NoGradInputs.of(context.reads).kept)
    dout, *of_proj = linear.backward(plan.proj, context.modules[0], saved.proj, inner)
    if dout is not None:
        dout = whole(dout, torch.Size((*plan.shape[:-1], dout.shape[-1])))
    return dout, *of_proj, grad if OutWants(*plan.needs).residual else None


def run(plan: Plan, context: BlockContext, tensors: tuple[Any, ...], recomputes: bool) -> Any:
    """The results of `multihead_pair.forward`; the norm's output, if it is returned, is in x's shape."""
    given, (first, proj, *others), reads = Given(*tensors), context.modules, NoGradInputs.of(context.reads)
    of_first = given._replace(proj_weight=None, proj_bias=None, added=None)
    into = BlockContext((first, *others), (), context.reads)
    q, k, v, *normed = differentiable(
        into_forward, into_backward, plan._replace(needs=wanted(*of_first)), into, *of_first
    )
    call = Call(plan.core.equation, reads, given.added)
    out = attend_by_torch(call, plan.core.cached, plan.core.layout, recomputes, q, k, v)
    residual = (normed[0] if normed else given.x) if plan.adds else None
    rest = (out, given.proj_weight, given.proj_bias, residual)
    after = BlockContext((proj,), context.random[:1], context.reads)
    h = differentiable(out_forward, out_backward, plan._replace(needs=wanted(*rest)), after, *rest)
    return h if plan.adds or not normed else (h, *normed)
