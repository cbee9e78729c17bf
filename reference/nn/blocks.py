"""The halves of a transformer layer as pairs of functions, and the conditions for them.

    h = r + dropout(attention(norm(x))·wᵀ + b)        y = r + dropout(act(norm(h)·w1ᵀ + b1)·w2ᵀ + b2)

r is x (or h), or with `apply_residual_connection_post_layernorm` its norm. The first half is in
`reference.nn.attention_block`, the second here. `TransformerLayer`, which checks all arguments first, runs the modules
one by one instead where a part is observed or replaced (`uses_default_forward`), and in fp32.

A small layer runs both halves as one pair (`is_small`). That halves the host's calls, which such a layer waits for, but
what the first half saves then lives until the second is through.
"""

import functools
from typing import Any, NamedTuple

import torch

from reference import recompute
from reference.compiled import before
from reference.nested import Tensors
from reference.nn import attention_block, layernorm_mlp
from reference.nn.attention_block import before_dropout, whole
from reference.nn.attention_prepared import Dropout, is_block, prepared, uses_default_forward
from reference.nn.autograd import differentiable, wanted
from reference.nn.context import BlockContext
from reference.nn.layernorm_mlp import LayerNormMLP, mlp_plan
from reference.nn.multihead_attention import MultiheadAttention
from reference.nn.parameters import named
from reference.quantized import fprop_residual, rows_of

SMALL = 1 << 27  # elements of parameters and activations together, about 30 for each element of x


class MLPSaved(NamedTuple):
    """What backward reads: of the MLP, and the random state from before the dropout after it."""

    mlp: layernorm_mlp.Saved
    dropped: torch.Tensor | None


class MLPPlan(NamedTuple):
    """Which gradients are wanted, the plan of the MLP, the shape of h, dropout's probability."""

    needs: tuple[bool, ...]
    mlp: layernorm_mlp.Plan
    shape: torch.Size
    p: float


def mlp_forward(
    plan: MLPPlan,
    context: BlockContext,
    h: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, MLPSaved]:
    """y `[..., hidden]` of h `[..., hidden]`."""
    (mlp,), (state,), rows = context.modules, context.random, rows_of(h)
    dropped = before(state)
    tensors = (rows, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight)
    a, w2, normed, saved = layernorm_mlp.hidden_forward(plan.mlp, mlp, *tensors)
    residual = normed if plan.mlp.returns_norm else rows
    y = fprop_residual(a, w2, fc2_bias, residual, (plan.p, state), plan.mlp.dtype, mlp.gemms[1].how)
    return whole(y, plan.shape), MLPSaved(saved, dropped)


def mlp_backward(plan: MLPPlan, context: BlockContext, saved: MLPSaved, grad: torch.Tensor) -> Tensors:
    grad = rows_of(grad)
    inner = before_dropout(grad, plan.p, saved.dropped)
    # If the residual is the norm's output, its gradient is added to that of the norm's output.
    norm_grad = (grad,) if plan.mlp.returns_norm else ()
    residual_grad = grad if plan.needs[0] and not plan.mlp.returns_norm else None
    grads = (inner, *norm_grad)
    found = layernorm_mlp.backward(plan.mlp, context.modules[0], saved.mlp, *grads, residual_grad=residual_grad)
    dh, *others = found
    return None if dh is None else whole(dh, plan.shape), *others


class LayerPlan(NamedTuple):
    """Which gradients are wanted, and both halves' plans."""

    needs: tuple[bool, ...]
    attention: attention_block.Plan
    mlp: MLPPlan


class LayerSaved(NamedTuple):
    """What backward reads of both halves."""

    attention: attention_block.Saved
    mlp: MLPSaved


def _halves(context: BlockContext) -> tuple[BlockContext, BlockContext]:
    modules, random = context.modules, context.random
    return BlockContext(modules[:-1], random[:-1], context.reads), BlockContext(modules[-1:], random[-1:])


def layer_forward(
    plan: LayerPlan, context: BlockContext, x: torch.Tensor, *weights: torch.Tensor | None
) -> tuple[torch.Tensor, LayerSaved]:
    """y `[..., hidden]` of x `[..., hidden]`; `weights` are the first half's, then the second's."""
    first, second = _halves(context)
    own: Any = weights
    count = len(plan.attention.needs) - 1  # without x
    h, of_attention = attention_block.forward(plan.attention, first, x, *own[:count])
    y, of_mlp = mlp_forward(plan.mlp, second, h, *own[count:])
    return y, LayerSaved(of_attention, of_mlp)


def layer_backward(plan: LayerPlan, context: BlockContext, saved: LayerSaved, grad: torch.Tensor) -> Tensors:
    first, second = _halves(context)
    dh, *mlp_grads = mlp_backward(plan.mlp, second, saved.mlp, grad)
    if dh is None:
        return (*[None] * len(plan.attention.needs), *mlp_grads)
    return (*attention_block.backward(plan.attention, first, saved.attention, dh), *mlp_grads)


def is_mlp_block(mlp: Any, residual_is_norm: bool) -> bool:
    """Whether `mlp_block` can run it."""
    return (
        uses_default_forward(mlp, LayerNormMLP)
        and mlp.return_layernorm_output == residual_is_norm
        and not mlp.checkpoint  # which its own forward does
    )


def is_attention_block(module: Any, residual_is_norm: bool, recomputes: bool) -> bool:
    """Whether the attention half of a layer in 16 bits runs as a block, with its residual."""
    return (
        uses_default_forward(module, MultiheadAttention)
        and module.return_layernorm_output == residual_is_norm
        and is_block(module, torch.bfloat16, recomputes)
    )


def is_small(parameters: int, x: torch.Tensor) -> bool:
    """Whether both halves should run as one pair, because the host's calls take longer than the kernels.

    Not in a checkpoint, which records a random state when a half's context is made, so the halves must take turns.
    """
    return not torch.compiler.is_compiling() and not recompute.active() and parameters + 30 * x.numel() <= SMALL


def _prepared_mlp(
    mlp: Any, h: torch.Tensor, dropout: Dropout, is_first_microbatch: bool | None, trains: bool | None = None
) -> tuple[MLPPlan, BlockContext, tuple[Any, ...]]:
    """The plan, the context and the tensors of the MLP's half.

    With `trains`, which says whether h's gradient is wanted, `h` only stands for attention's result.
    """
    names = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    tensors = (h, *named(mlp, names))
    needs, context = wanted(*tensors), mlp.context(h.dtype, is_first_microbatch)
    needs = needs if trains is None else (trains, *needs[1:])
    p, generator = dropout
    state = generator.take() if p > 0 else None
    plan = MLPPlan(needs, mlp_plan(mlp, context, h.dtype, needs), h.shape, p)
    return plan, BlockContext((context,), (state,)), tensors


def mlp_block(mlp: Any, h: torch.Tensor, dropout: Dropout, is_first_microbatch: bool | None) -> torch.Tensor:
    """y of h `[..., hidden]`."""
    plan, context, tensors = _prepared_mlp(mlp, h, dropout, is_first_microbatch)
    return differentiable(mlp_forward, mlp_backward, plan, context, *tensors)


def run_attention(module: Any, x: torch.Tensor, *arguments: Any, mlp: Any = None) -> torch.Tensor:
    """h of x `[s, b, hidden]`, `[b, s, hidden]` or `[t, hidden]`; `arguments` are those of `prepared` after x.

    `mlp`, if given, is what `mlp_block` runs next: on a GPU its kernels are compiled together with this half's.
    """
    plan, context, tensors = prepared(module, x.dtype, x, *arguments)
    if mlp is not None and not torch.compiler.is_compiling():
        context = context._replace(following=functools.partial(_following, mlp, x, arguments[2:4], plan.needs))
    return differentiable(attention_block.forward, attention_block.backward, plan, context, *tensors)


def _following(mlp: Any, x: torch.Tensor, arguments: Any, needs: tuple[bool, ...]) -> Any:
    """The MLP's pair with x as its input; None in a checkpoint, which would record the additional call."""
    if recompute.active():
        return None
    with torch.set_grad_enabled(any(needs)):
        plan, context, (_, *weights) = _prepared_mlp(mlp, x, arguments[0], arguments[1], any(needs))
    unwrapped = [context.unwrap_weight(t, any(plan.needs)) for t in weights]
    return mlp_forward, mlp_backward, plan, context, (x, *unwrapped)


def run_layer(module: Any, mlp: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """y of x: `mlp_block` of `run_attention`, for self-attention."""
    plan, context, tensors = prepared(module, x.dtype, x, *arguments)
    second, more, (_, *weights) = _prepared_mlp(mlp, x, arguments[2], arguments[3], any(plan.needs))
    both = BlockContext(context.modules + more.modules, context.random + more.random, context.reads)
    whole_plan = LayerPlan((*plan.needs, *second.needs[1:]), plan, second)
    return differentiable(layer_forward, layer_backward, whole_plan, both, *tensors, *weights)
