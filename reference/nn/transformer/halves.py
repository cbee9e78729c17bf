"""The halves of a transformer layer as pairs of functions, and the conditions for them.

    h = r + dropout(attention(norm(x))·wᵀ + b)        y = r + dropout(act(norm(h)·w1ᵀ + b1)·w2ᵀ + b2)

r is x (or h), or with `apply_residual_connection_post_layernorm` its norm. The first half is in
`reference.nn.attentions.multihead_pair`, the second here. `TransformerLayer`, which checks all arguments first, runs
the modules one by one instead where a part is observed or replaced (`uses_default_forward`).

In fp32 attention is PyTorch's own, outside the bit contract and differentiated by PyTorch. So the first half is two
pairs of functions there, before attention and after it (`reference.nn.attentions.multihead_around_torch`). So it is
with cuDNN's attention where its heads are grouped or it is recomputed. Parallel halves: `parallel_halves.py`.

A small layer runs both halves as one pair (`is_small`). That halves the host's calls, which such a layer waits for, but
what the first half saves then lives until the second is through.
"""

from typing import Any, NamedTuple

import torch

from reference.memory.recompute import Run
from reference.nn.attentions import multihead_pair
from reference.nn.attentions.attention_extras import Extras
from reference.nn.attentions.multihead_attention import MultiheadAttention
from reference.nn.attentions.multihead_pair import whole
from reference.nn.attentions.multihead_plan import Dropout, is_block, prepared, run_block, uses_default_forward
from reference.nn.attentions.no_grad_inputs import NO_INPUTS, NoGradInputs
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.compiled import before
from reference.nn.core.context import BlockContext
from reference.nn.core.dropout import DropPath, before_dropped, bias_dropout_add
from reference.nn.core.parameters import named
from reference.nn.layers import layernorm_mlp
from reference.nn.layers.layernorm_mlp import LayerNormMLP, mlp_plan
from reference.recipes import quantized
from reference.recipes.quantized import fprop_residual, rows_of
from reference.support.nested import Tensors

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
    dropped, kept = before(state), NoGradInputs.of(context.reads).mlp_kept
    tensors = (rows, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight)
    a, w2, normed, saved = layernorm_mlp.hidden_forward(plan.mlp, mlp, *tensors)
    residual = normed if plan.mlp.returns_norm else rows
    drop = quantized.Dropout(plan.p, state, kept)
    y = fprop_residual(a, w2, fc2_bias, residual, drop, plan.mlp.dtype, mlp.gemms["fc2"].how)
    return whole(y, plan.shape), MLPSaved(saved, dropped)


def mlp_backward(plan: MLPPlan, context: BlockContext, saved: MLPSaved, grad: torch.Tensor) -> Tensors:
    grad = rows_of(grad)
    kept = NoGradInputs.of(context.reads).mlp_kept
    inner = before_dropped(grad, plan.p, saved.dropped, kept)
    # If the residual is the norm's output, its gradient is added to that of the norm's output.
    norm_grad = (grad,) if plan.mlp.returns_norm else ()
    residual_grad = grad if plan.mlp.wants.x and not plan.mlp.returns_norm else None
    grads = (inner, *norm_grad)
    found = layernorm_mlp.backward(plan.mlp, context.modules[0], saved.mlp, *grads, residual_grad=residual_grad)
    dh, *others = found
    return None if dh is None else whole(dh, plan.shape), *others


class LayerPlan(NamedTuple):
    """Which gradients are wanted, and both halves' plans."""

    needs: tuple[bool, ...]
    attention: multihead_pair.Plan
    mlp: MLPPlan


class LayerSaved(NamedTuple):
    """What backward reads of both halves."""

    attention: multihead_pair.Saved
    mlp: MLPSaved


def of_halves(context: BlockContext) -> tuple[BlockContext, BlockContext]:
    """The contexts of attention and of the MLP."""
    modules, random = context.modules, context.random
    (*of_attention, mlp), (*of_both, of_mlp) = modules, random
    first = BlockContext(tuple(of_attention), tuple(of_both), context.reads)
    return first, BlockContext((mlp,), (of_mlp,), context.reads)


def layer_forward(
    plan: LayerPlan, context: BlockContext, x: torch.Tensor, *weights: torch.Tensor | None
) -> tuple[torch.Tensor, LayerSaved]:
    """y `[..., hidden]` of x `[..., hidden]`; `weights` are the first half's, then the second's."""
    first, second = of_halves(context)
    own: Any = weights
    count = len(plan.attention.needs) - 1  # without x
    h, of_attention = multihead_pair.forward(plan.attention, first, x, *own[:count])
    y, of_mlp = mlp_forward(plan.mlp, second, h, *own[count:])
    return y, LayerSaved(of_attention, of_mlp)


def layer_backward(plan: LayerPlan, context: BlockContext, saved: LayerSaved, grad: torch.Tensor) -> Tensors:
    first, second = of_halves(context)
    dh, *mlp_grads = mlp_backward(plan.mlp, second, saved.mlp, grad)
    if dh is None:
        return (*[None] * len(plan.attention.needs), *mlp_grads)
    return (*multihead_pair.backward(plan.attention, first, saved.attention, dh), *mlp_grads)


def is_mlp_block(mlp: Any, residual_is_norm: bool) -> bool:
    """Whether `mlp_block` can run it."""
    return (
        uses_default_forward(mlp, LayerNormMLP)
        and mlp.return_layernorm_output == residual_is_norm
        and not mlp.checkpoint  # which its own forward does
        and mlp.tp_size == 1
        and mlp.cp_name is None
    )


def is_attention_block(module: Any, residual_is_norm: bool) -> bool:
    """Whether the attention half of a layer runs as a block, with its residual."""
    return (
        uses_default_forward(module, MultiheadAttention)
        and module.return_layernorm_output == residual_is_norm
        and is_block(module)
    )


def is_small(parameters: int, x: torch.Tensor, run: Run) -> bool:
    """Whether both halves should run as one pair, because the host's calls take longer than the kernels.

    Not where it is recomputed: a random state is recorded when a half's context is made, so the halves take turns.
    """
    return not (run.compiling or run.recomputed) and parameters + 30 * x.numel() <= SMALL


def prepared_mlp(
    mlp: Any,
    h: torch.Tensor,
    dropout: Dropout,
    is_first_microbatch: bool | None,
    drop_path: DropPath | None = None,
    run: Run | None = None,
    trains: bool | None = None,
) -> tuple[MLPPlan, BlockContext, tuple[Any, ...]]:
    """The plan, the context and the tensors of the MLP's half.

    With `trains`, which says whether h's gradient is wanted, `h` only stands for attention's result.
    """
    names = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    tensors = (h, *named(mlp, names))
    needs, context = wanted(*tensors), mlp.context(h.dtype, is_first_microbatch, run)
    needs = needs if trains is None else (trains, *needs[1:])
    p, generator = dropout
    state = generator.take() if p > 0 else None
    reads: Any = () if drop_path is None else NO_INPUTS._replace(mlp_kept=drop_path.kept(h.shape[0], h.device))
    plan = MLPPlan(needs, mlp_plan(mlp, context, h.dtype, needs), h.shape, p)
    return plan, BlockContext((context,), (state,), reads), tensors


def mlp_block(
    mlp: Any, h: torch.Tensor, dropout: Dropout, is_first_microbatch: bool | None, drop_path: DropPath | None, run: Run
) -> torch.Tensor:
    """y of h `[..., hidden]`."""
    plan, context, tensors = prepared_mlp(mlp, h, dropout, is_first_microbatch, drop_path, run)
    return differentiable(mlp_forward, mlp_backward, plan, context, *tensors)


def run_attention(module: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """h of x `[s, b, hidden]`, `[b, s, hidden]` or `[t, hidden]`; `arguments` are those of `prepared` after x."""
    h: torch.Tensor = run_block(module, x.dtype, x, *arguments)
    return h


def run_layer(
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
    """y of x: `mlp_block` of `run_attention`, for self-attention."""
    given = (x, mask, mask_type, dropout, is_first, None, angles, recomputes, window, extras, drop_path, run)
    plan, context, tensors = prepared(module, x.dtype, *given)
    second, of_mlp, (_, *weights) = prepared_mlp(mlp, x, dropout, is_first, drop_path, run, any(plan.needs))
    reads: Any = context.reads
    if of_mlp.reads:
        reads = NoGradInputs.of(reads)._replace(mlp_kept=NoGradInputs.of(of_mlp.reads).mlp_kept)
    both = BlockContext(context.modules + of_mlp.modules, context.random + of_mlp.random, reads)
    whole_plan = LayerPlan((*plan.needs, *second.needs[1:]), plan, second)
    return differentiable(layer_forward, layer_backward, whole_plan, both, *tensors, *weights)


def run_module(
    attention: Any,
    x: torch.Tensor,
    mask: Any,
    mask_type: str,
    is_first_microbatch: bool | None,
    source: torch.Tensor | None,
    angles: Any,
    recomputes: bool,
    window: Any,
    extras: Extras,
) -> Any:
    """The results of an attention as a module."""
    shared: dict[str, Any] = {"is_first_microbatch": is_first_microbatch, "checkpoint_core_attention": recomputes}
    if angles is not None:  # an attention of the user's own may take none
        shared["rotary_pos_emb"] = angles
    if window is not None:
        shared["window_size"] = window
    shared |= extras.arguments()
    return attention(x, mask, *([] if source is None else [source]), attn_mask_type=mask_type, **shared)


def add_residual(
    layer: Any, results: Any, residual: torch.Tensor, dropout: Dropout, normed: bool, drops_path: bool = True
) -> torch.Tensor:
    """residual + drop_path(dropout(y + bias)) of a module's results `(y, bias[, norm's output])`."""
    y, bias, *norm = results
    if layer.apply_residual_connection_post_layernorm and normed:
        residual = norm[0]
    drop_path = layer.drop_path if drops_path and layer.training else None
    kept = None if drop_path is None else drop_path.kept(y.shape[0], y.device)
    group = layer.tp_name if layer.sequence_parallel else None
    return bias_dropout_add(y, bias, residual, *dropout, kept, group, layer.tokens)
