"""Parallel halves of a transformer layer, `parallel_attention_mlp`: both read x, and their sum is added to it once.

    y = T( x + dropout( T( attention(norm(x))·wᵀ + b + act(norm(x)·w1ᵀ + b1)·w2ᵀ + b2 ) ) )

Each half has a norm of its own. The sum is of both halves' results in T. It is one pair of functions. Where PyTorch
differentiates attention (`reference.nn.attentions.multihead_around_torch`) it is two, with attention between them:

    q, k, v of x, and the MLP's y          `into_forward`: all that reads x, so that its gradients are added in T first
    T( x + dropout( T( attention + y ) ) ) `out_forward`
"""

from typing import Any, NamedTuple

import torch

from reference.memory.recompute import Run
from reference.nn.attentions import multihead_around_torch, multihead_pair
from reference.nn.attentions.attention_extras import Extras
from reference.nn.attentions.dot_product_plan import Call
from reference.nn.attentions.exact_attention import Mask
from reference.nn.attentions.multihead_around_torch import by_torch
from reference.nn.attentions.multihead_pair import Given, whole
from reference.nn.attentions.multihead_plan import Dropout, prepared
from reference.nn.attentions.no_grad_inputs import NoGradInputs
from reference.nn.attentions.torch_attention import attend_by_torch
from reference.nn.core.autograd import differentiable, rounded_gradient, wanted
from reference.nn.core.checks import Window
from reference.nn.core.compiled import before
from reference.nn.core.context import BlockContext
from reference.nn.core.dropout import DropPath, before_dropped
from reference.nn.layers import layernorm_mlp
from reference.nn.transformer import halves
from reference.nn.transformer.halves import MLPPlan, of_halves, prepared_mlp
from reference.ops.library import twin
from reference.ops.random.dropout import state_or_none
from reference.recipes.quantized import rows_of
from reference.support.nested import Tensors


class Plan(NamedTuple):
    """Which gradients are wanted, the plans of both halves, which have no residual, and dropout's probability."""

    needs: tuple[bool, ...]
    attention: multihead_pair.Plan
    mlp: MLPPlan
    p: float


class Saved(NamedTuple):
    """What backward reads of both halves, and the random state from before the dropout after them."""

    attention: multihead_pair.Saved
    mlp: layernorm_mlp.Saved
    dropped: torch.Tensor | None


def _undropped(context: BlockContext) -> BlockContext:
    """The context of parallel attention: what stochastic depth drops is the sum of both halves."""
    reads: Any = context.reads
    return context._replace(reads=reads._replace(kept=None)) if reads else context


def forward(
    plan: Plan, context: BlockContext, x: torch.Tensor, *weights: torch.Tensor | None
) -> tuple[torch.Tensor, Saved]:
    """y of two halves that read x: T( x + dropout( T( attention + mlp ) ) )."""
    first, second = of_halves(context)
    state, kept, rows = second.random[0], NoGradInputs.of(context.reads).kept, rows_of(x)
    dropped = before(state)
    own: Any = weights
    count = len(plan.attention.needs) - 1  # without x
    h, saved_attention = multihead_pair.forward(plan.attention, _undropped(first), x, *own[:count])
    y, saved_mlp = layernorm_mlp.forward(plan.mlp.mlp, second.modules[0], rows, *own[count:])
    both = twin.bias_dropout_add(y, None, rows_of(h), 0.0, state_or_none(None, rows))
    out = twin.bias_dropout_add(both, None, rows, plan.p, state_or_none(state, rows), kept)
    return whole(out, x.shape), Saved(saved_attention, saved_mlp, dropped)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    first, second = of_halves(context)
    shape, grad = grad.shape, rows_of(grad)
    kept = NoGradInputs.of(context.reads).kept
    inner = before_dropped(grad, plan.p, saved.dropped, kept)
    dx_mlp, *mlp_grads = layernorm_mlp.backward(plan.mlp.mlp, second.modules[0], saved.mlp, inner)
    dx, *grads = multihead_pair.backward(plan.attention, _undropped(first), saved.attention, whole(inner, shape))
    if dx is not None and dx_mlp is not None:
        dx = twin.bias_dropout_add(rows_of(dx), None, dx_mlp, 0.0, state_or_none(None, dx_mlp))
        dx = whole(twin.bias_dropout_add(dx, None, grad, 0.0, state_or_none(None, grad)), shape)
    return dx, *grads, *mlp_grads


class IntoSaved(NamedTuple):
    """What the backward of the pair before PyTorch's attention reads, of parallel halves."""

    attention: Any
    mlp: layernorm_mlp.Saved


def into_forward(plan: Plan, context: BlockContext, *tensors: Any) -> tuple[Any, IntoSaved]:
    """q, k and v `[.., .., heads, channels]` and the MLP's y `[..., hidden]`, of x; then its weights."""
    (*of_attention, mlp), count = context.modules, len(plan.attention.needs)
    first = context._replace(modules=tuple(of_attention))
    qkv, saved = multihead_around_torch.into_forward(plan.attention, first, *tensors[:count])
    y: Any
    y, saved_mlp = layernorm_mlp.forward(plan.mlp.mlp, mlp, rows_of(tensors[0]), *tensors[count:])
    return (*qkv, whole(y, plan.mlp.shape)), IntoSaved(saved, saved_mlp)


def into_backward(plan: Plan, context: BlockContext, saved: IntoSaved, *grads: torch.Tensor) -> Tensors:
    """The gradients of x, T( of attention + of the MLP ), and of the weights."""
    (*of_attention, mlp), (*of_qkv, of_y) = context.modules, grads
    first = context._replace(modules=tuple(of_attention))
    mlp_grads: Any = (None,) * len(plan.mlp.needs)
    found: Any = (None,) * len(plan.attention.needs)
    if any(plan.mlp.needs):
        mlp_grads = layernorm_mlp.backward(plan.mlp.mlp, mlp, saved.mlp, rows_of(of_y.contiguous()))
    if any(plan.attention.needs):
        found = multihead_around_torch.into_backward(plan.attention, first, saved.attention, *of_qkv)
    (dx, *others), (dx_mlp, *others_mlp) = found, mlp_grads
    if dx is not None and dx_mlp is not None:
        both = twin.bias_dropout_add(rows_of(dx), None, dx_mlp, 0.0, state_or_none(None, dx_mlp))
        dx = whole(both, plan.mlp.shape)
    return dx, *others, *others_mlp


class OutWants(NamedTuple):
    """Which gradients of `out_forward`'s tensors are wanted."""

    out: bool
    weight: bool
    bias: bool
    y: bool
    x: bool


def out_forward(
    plan: Plan, context: BlockContext, out: torch.Tensor, w: Any, bias: Any, y: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """T( x + dropout( T( attention + y ) ) ) of attention's result `[.., .., heads·channels]`."""
    (state,), kept, rows = context.random, NoGradInputs.of(context.reads).kept, rows_of(x)
    dropped, inner = before(state), _undropped(context)._replace(random=(None,))
    h, saved = multihead_around_torch.out_forward(plan.attention, inner, out, w, bias, None)
    both = twin.bias_dropout_add(rows_of(y), None, rows_of(h), 0.0, state_or_none(None, rows))
    result = twin.bias_dropout_add(both, None, rows, plan.p, state_or_none(state, rows), kept)
    return whole(result, x.shape), saved._replace(dropped=dropped)


def out_backward(plan: Plan, context: BlockContext, saved: Any, grad: torch.Tensor) -> Tensors:
    """The gradients of attention's result, of w and b, of y and of x where it is the residual."""
    inner = before_dropped(rows_of(grad), plan.p, saved.dropped, NoGradInputs.of(context.reads).kept)
    sums, own = whole(inner, grad.shape), saved._replace(dropped=None)
    *found, _ = multihead_around_torch.out_backward(plan.attention, _undropped(context), own, sums)
    wants = OutWants(*plan.needs)
    return *found, sums if wants.y else None, grad if wants.x else None


def attend_and_mlp(
    layer: Any,
    x: torch.Tensor,
    mask: Mask,
    mask_type: str,
    dropout: Dropout,
    is_first_microbatch: bool | None,
    angles: Any,
    recomputes: bool,
    window: Window,
    extras: Extras,
    run: Run,
) -> torch.Tensor:
    """x + dropout(attention(norm(x)) + mlp(norm(x))): as a pair of functions, or module by module."""
    more = (angles, recomputes, window, extras)
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    if halves.is_attention_block(attention, False) and halves.is_mlp_block(mlp, False):
        drop_path = layer.drop_path if layer.training else None
        first = (mask, mask_type, dropout, is_first_microbatch)
        return run_parallel(attention, mlp, x, *first, *more, drop_path, run)
    read = rounded_gradient(x)
    both = halves.run_module(attention, read, mask, mask_type, is_first_microbatch, None, *more) + mlp(
        read, is_first_microbatch
    )
    return halves.add_residual(layer, (both, None), x, dropout, normed=True)


def run_parallel(
    module: Any,
    mlp: Any,
    x: torch.Tensor,
    mask: Any,
    mask_type: str,
    dropout: Dropout,
    is_first: bool | None,
    angles: Any,
    recomputes: bool,
    window: Any,
    extras: Extras,
    drop_path: DropPath | None,
    run: Run,
) -> torch.Tensor:
    """y of parallel halves."""
    given = (x, mask, mask_type, None, is_first, None, angles, recomputes, window, extras, drop_path, run)
    plan, context, tensors = prepared(module, x.dtype, *given)
    second, of_mlp, (_, *weights) = prepared_mlp(mlp, x, dropout, is_first, None, run)
    if by_torch(module, x.dtype, recomputes):
        of_both = (Plan((), plan, second, dropout[0]), context, of_mlp, Given(*tensors), weights)
        return _run_around_torch(*of_both, recomputes)
    both = BlockContext(context.modules + of_mlp.modules, context.random + of_mlp.random, context.reads)
    whole_plan = Plan((*plan.needs, *second.needs[1:]), plan, second, dropout[0])
    return differentiable(forward, backward, whole_plan, both, *tensors, *weights)


def _run_around_torch(
    plan: Plan, context: BlockContext, of_mlp: BlockContext, given: Given, weights: Any, recomputes: bool
) -> torch.Tensor:
    """y of parallel halves whose attention PyTorch differentiates."""
    (first, proj), reads = context.modules, context.reads
    of_first = given._replace(proj_weight=None, proj_bias=None, added=None)
    needs = wanted(*of_first)
    into_plan = plan._replace(needs=(*needs, *plan.mlp.needs[1:]), attention=plan.attention._replace(needs=needs))
    into = BlockContext((first, *of_mlp.modules), (), reads)
    found = differentiable(into_forward, into_backward, into_plan, into, *of_first, *weights)
    *qkv, y = found
    if not any(needs):  # they have a graph because of the MLP alone
        qkv = [one.detach() for one in qkv]
    call = Call(plan.attention.core.equation, NoGradInputs.of(reads), given.added)
    of_core = plan.attention.core
    out = attend_by_torch(call, of_core.cached, of_core.layout, recomputes, *qkv)
    rest = (out, given.proj_weight, given.proj_bias, y, given.x)
    wants = OutWants(*wanted(*rest))
    of_attention = multihead_around_torch.OutWants(wants.out, wants.weight, wants.bias, residual=False)
    out_plan = plan._replace(needs=wants, attention=plan.attention._replace(needs=of_attention))
    after = BlockContext((proj,), of_mlp.random, reads)
    result: torch.Tensor = differentiable(out_forward, out_backward, out_plan, after, *rest)
    return result
