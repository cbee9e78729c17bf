"""The attention half of a transformer layer, with its norm and its residual, as one pair of functions.

    h = r + dropout(attention(q, k, v)·wᵀ + b)      q, k, v = norm(x)·w_qkvᵀ + b_qkv, q and k rotated by angles, if any;
                                                    r = x, or norm(x)

For cross-attention q is projected from norm(x), k and v from an encoder's output. Each step is the function of the
corresponding module, so the bits are those of the modules one after the other. Several things happen at once:

    all weights are cast in one launch                            FP8, unless they are cached
    bias, dropout and residual are fused into the last GEMM       FP8
    the norm's backward adds the residual's gradient              two roundings, as in two modules
    the cast of proj's gradient computes its db                   where `dbias` would read the gradient once more
    the gradients of q, k, v are cast from where they are         FP8 with a bias; otherwise they are joined first
"""

from typing import Any, NamedTuple

import torch

from reference.arguments import MASK_TYPES
from reference.compiled import before
from reference.nested import Tensors
from reference.nn import attention_of_torch, core_attention, layernorm_linear, linear
from reference.nn.attention_lengths import lengths_mask, lengths_of_masks
from reference.nn.autograd import wanted
from reference.nn.cached import Cached, StepTensors, entered, turned
from reference.nn.checks import Window
from reference.nn.context import BlockContext, ModuleContext, WeightRequest, quantize_weights
from reference.nn.core_attention import CorePlan, Mask, full_mask
from reference.nn.dropout import Generator
from reference.nn.heads import Heads, dense_rows
from reference.nn.inference import InferenceParams
from reference.nn.layernorm import norm_plan
from reference.nn.parameters import named
from reference.nn.rotated import angles_of
from reference.ops.library import twin
from reference.quantized import Weight, fprop_residual, rows_of
from reference.recompute import Run

Dropout = tuple[float, Generator]
Angles = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class Plan(NamedTuple):
    """Everything but tensors that the attention half's launches depend on.

    Attributes:
        needs: which gradients are wanted, in the order of `forward`'s tensors.
        first: of the norm and the projection of q, k and v; for cross-attention of q.
        key_value: of the projection of k and v for cross-attention, or None.
        core, proj: of attention, and of the projection after it.
        heads: layout of q, k and v (or k and v) in their projection.
        shape, source_shape: of x, and of the encoder's output (None for self-attention).
        sequence_first: whether both are `[s, b, hidden]`.
        p: probability of dropping an element after proj.
        rotary: None without angles, else whether neighbours are paired.
        recomputes: whether backward runs attention again instead of keeping its results.
        cached: None, or how keys and values go through a cache; then there is no backward.
    """

    needs: tuple[bool, ...]
    first: layernorm_linear.Plan
    key_value: linear.Plan | None
    core: CorePlan
    proj: linear.Plan
    heads: Heads
    shape: torch.Size
    source_shape: torch.Size | None
    sequence_first: bool
    p: float
    rotary: bool | None
    recomputes: bool
    cached: Cached | None = None

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """`[b, heads, s, channels]` of a tensor in x's order of sequence and batch."""
        return x.permute(1, 2, 0, 3) if self.sequence_first else x.permute(0, 2, 1, 3)

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `heads_first`."""
        return x.permute(2, 0, 1, 3) if self.sequence_first else x.permute(0, 2, 1, 3)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads·channels]` of `[b, heads, s, channels]`."""
        return self.in_order(x).reshape(-1, x.shape[1] * x.shape[3])

    def turned(self, x: torch.Tensor, angles: torch.Tensor | None, backward: bool) -> torch.Tensor:
        """q or k `[b, heads, s, channels]` (or its gradient) rotated by the angles `[s, channels]`."""
        if self.rotary is None or angles is None:
            return x
        return twin.rotary(dense_rows(x).permute(2, 0, 1, 3), angles, self.rotary, backward).permute(1, 2, 0, 3)


class Saved(NamedTuple):
    """What backward reads.

    Attributes:
        first, proj: of the norm with its projection, and of the projection after attention.
        dropped: the random state from before the last dropout.
        mixed: the first projection's output, of which q, k and v are views (for cross-attention q).
        joined: for cross-attention the output of the other one, of which k and v are views.
        q, k: rotated ones; None without angles.
        key_value: for cross-attention of the projection of k and v.
        attended: attention's results; with `Plan.recomputes` the random state from before it.
    """

    first: layernorm_linear.Saved
    proj: linear.Saved
    dropped: torch.Tensor | None
    mixed: torch.Tensor
    joined: torch.Tensor | None
    q: torch.Tensor | None
    k: torch.Tensor | None
    key_value: linear.Saved | None
    attended: Any


def whole(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`[tokens, hidden]` in the input's shape; not a view, which a function must not return."""
    return torch.ops.aten._unsafe_view(rows, shape)


def before_dropout(grad: torch.Tensor, p: float, state: torch.Tensor | None) -> torch.Tensor:
    """The gradient of the input of a dropout that drew from `state`."""
    return twin.dropout_backward(grad, p, state) if p > 0 else grad


def _attend(plan: Plan, mask: Any, state: Any, qkv: Any) -> tuple[torch.Tensor, Any]:
    if plan.core.backend == "cudnn":
        return attention_of_torch.cudnn_attend(plan.core, plan.proj.needs[0], *qkv)
    return core_attention.attend(plan.core.options(mask, state), *qkv)


def _attend_from_cache(
    plan: Plan, step: StepTensors, angles: Any, state: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attention's result [b, heads, s, channels]; q and k, not rotated yet, and v are of the new tokens."""
    assert plan.cached is not None
    if plan.rotary is not None:
        q, k = (
            turned(plan.cached, step, t.permute(2, 0, 1, 3), one, plan.rotary).permute(1, 2, 0, 3)
            for t, one in zip((q, k), angles, strict=True)
        )
    core, hidden, qkv = entered(plan.cached, step, plan.core, q, k, v)
    return core_attention.attend(core.options(hidden, state), *qkv)[0].reshape(q.shape)


def forward(
    plan: Plan,
    context: BlockContext,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor | Weight,
    bias: torch.Tensor | None,
    proj_weight: torch.Tensor | Weight,
    proj_bias: torch.Tensor | None,
    source: torch.Tensor | None = None,
    *key_value: Any,
) -> tuple[torch.Tensor, Any]:
    """h `[..., hidden]` of x `[..., hidden]`; `source` is the encoder's output."""
    (first, proj, *others), (state, core_state), (mask, *reads) = context
    angles, step = reads[:2], reads[2:]
    rows, proj_gemm = rows_of(x), proj.gemm
    requests = [
        WeightRequest(first, first.gemm, weight, any(plan.first.needs[:3])),
        WeightRequest(proj, proj_gemm, proj_weight, plan.proj.needs[0]),
    ]
    if plan.key_value is not None:
        requests.append(WeightRequest(others[0], others[0].gemm, key_value[0], plan.key_value.needs[0]))
    w, proj_w, *more = quantize_weights(*requests)
    mixed: Any
    mixed, saved_first = layernorm_linear.forward(plan.first, first, rows, norm_weight, norm_bias, w, bias)
    mixed, residual = mixed if plan.first.returns_norm else (mixed, rows)
    joined: Any = None
    saved_kv: linear.Saved | None = None
    if plan.key_value is not None:
        assert source is not None
        joined, saved_kv = linear.forward(plan.key_value, others[0], rows_of(source), more[0], key_value[1])
    q, k, v = split(plan, mixed, joined)
    attended: Any = None
    if plan.cached is None:
        q, k = (plan.turned(t, one, False) for t, one in zip((q, k), angles, strict=True))
        out, attended = _attend(plan, mask, core_state, (q, k, v))
    else:
        out = _attend_from_cache(plan, StepTensors(*step), angles, core_state, q, k, v)  # type: ignore[arg-type]
    dropped = before(state)
    operand = proj_gemm.input.quantize(plan.tokens(out), transpose=plan.proj.needs[1])
    h = fprop_residual(operand, proj_w, proj_bias, residual, (plan.p, state), plan.proj.dtype, proj_gemm.how)
    if plan.cached is not None:
        return whole(h, plan.shape), ()
    saved_proj = linear.Saved(operand.column, proj_w.column)
    kept_q, kept_k = (q, k) if plan.rotary is not None else (None, None)
    # To attend again, backward needs only the random state from before.
    attended = attended.state if plan.recomputes else attended
    saved = Saved(saved_first, saved_proj, dropped, mixed, joined, kept_q, kept_k, saved_kv, attended)
    return whole(h, plan.shape), saved


def split(plan: Plan, mixed: Any, joined: Any) -> tuple[torch.Tensor, ...]:
    """q, k and v `[b, heads, s, channels]`, views of the projections."""
    mixed = mixed.view(*plan.shape[:-1], mixed.shape[-1])
    if joined is None:
        return tuple([plan.heads_first(piece) for piece in plan.heads.split(mixed)])
    assert plan.source_shape is not None
    queries = mixed.unflatten(-1, (-1, plan.heads.channels))
    pieces = (queries, *plan.heads.split(joined.view(*plan.source_shape[:-1], joined.shape[-1])))
    return tuple([plan.heads_first(piece) for piece in pieces])


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    (_, proj, *others), _, (mask, *angles) = context
    grad = rows_of(grad)
    inner = before_dropout(grad, plan.p, saved.dropped)
    context_grad, *proj_grads = linear.backward(plan.proj, proj, saved.proj, inner)
    crosses = plan.key_value is not None
    if context_grad is None:
        return (*[None] * 5, *proj_grads, *[None] * (3 if crosses else 0))
    q, k, v = split(plan, saved.mixed, saved.joined)
    qkv = (q if saved.q is None else saved.q, k if saved.k is None else saved.k, v)
    attended = saved.attended
    if plan.recomputes:
        _, attended = _attend(plan, mask, None if attended is None else attended.clone(), qkv)
    channels = plan.heads.channels
    by_head = plan.heads_first(context_grad.view(*plan.shape[:-1], context_grad.shape[-1] // channels, channels))
    if plan.core.backend == "cudnn":
        found: Any = attention_of_torch.cudnn_attend_backward(plan.core, qkv, attended, by_head)
    else:
        found = core_attention.attend_backward(plan.core.options(mask, attended.state), qkv, attended, by_head)
    dq, dk, dv = found
    turned = (plan.turned(t, one, True) for t, one in zip((dq, dk), angles, strict=True))
    pieces = [plan.tokens(t) for t in (*turned, dv)]
    if plan.key_value is None:
        return _joined_grads(plan, context, saved.first, pieces, grad, tuple(proj_grads))
    assert saved.key_value is not None
    kv_grads = _key_value_grads(plan.key_value, plan, others[0], saved.key_value, pieces[1:])
    return (*_joined_grads(plan, context, saved.first, pieces[:1], grad, tuple(proj_grads)), *kv_grads)


def _joined_grads(
    plan: Plan,
    context: BlockContext,
    saved: layernorm_linear.Saved,
    pieces: list[torch.Tensor],
    grad: torch.Tensor,
    proj_grads: Tensors,
) -> Tensors:
    """The gradients of x, γ, β, w and b, computed from those of q, k and v (or of q), followed by proj's."""
    first, needs = context.modules[0], plan.first.needs
    if not any(needs):
        return (*[None] * 5, *proj_grads)
    quantizer, (transpose, dbias) = first.gemm.grad, needs[3:5]
    if len(pieces) > 1:
        g, db = quantizer.joined_grad(pieces, plan.heads.rows, transpose, dbias)
    else:
        g, db = quantizer.grad(pieces[0].contiguous(), transpose, dbias)
    # If the residual is the norm's output, its gradient is added to that of the norm's output.
    returned = plan.first.returns_norm
    residual_grad = grad if needs[0] and not returned else None
    norm_grad = (grad,) if returned else ()
    dx, *grads = layernorm_linear.quantized_backward(
        plan.first, first, saved, g, *norm_grad, residual_grad=residual_grad
    )
    return (None if dx is None else whole(dx, plan.shape), *grads, db, *proj_grads)


def _key_value_grads(
    wanted_of: linear.Plan, plan: Plan, context: ModuleContext, saved: linear.Saved, pieces: list[torch.Tensor]
) -> Tensors:
    """The gradients of the encoder's output, and of w and b of its projection, computed from those of k and v."""
    needs = wanted_of.needs
    if not any(needs):
        return None, None, None
    g, db = context.gemm.grad.joined_grad(pieces, plan.heads.rows, transpose=needs[1], dbias=needs[2])
    dsource, dw = linear.quantized_backward(wanted_of, context, saved, g)
    assert plan.source_shape is not None
    return None if dsource is None else whole(dsource, plan.source_shape), dw, db


def prepared(
    module: Any,
    x: torch.Tensor,
    mask: Mask,
    mask_type: str,
    dropout: Dropout,
    is_first_microbatch: bool | None,
    source: torch.Tensor | None = None,
    angles: Angles = None,
    recomputes: bool = False,
    window: Window = None,
    inference: InferenceParams | None = None,
    run: Run | None = None,
) -> tuple[Plan, BlockContext, tuple[Any, ...]]:
    """The plan, the context and the tensors of one forward of a `MultiheadAttention` with a norm.

    `TransformerLayer` has checked the arguments, and asked where it runs.
    """
    modules, dtype = module._modules, x.dtype
    first, core, proj = modules[module._first_name], modules["core_attention"], modules["proj"]
    crosses = source is not None
    tensors = [x, *named(first, ("layer_norm_weight", "layer_norm_bias")), first.joined_weight()]
    tensors += [first.joined_bias(), proj.weight, proj.joined_bias()]
    contexts = [first.context(dtype, is_first_microbatch, run)]
    if crosses:
        tensors += [source, modules["key_value"].joined_weight(), modules["key_value"].joined_bias()]
        key_value = modules["key_value"].context(dtype, is_first_microbatch, run)
    core_plan: CorePlan = core.core_plan(mask_type, module.window_size if window is None else window)
    hidden = None
    if inference is None:
        if isinstance(mask, tuple):
            core_plan, hidden = _masked(module, core_plan, mask, x, source)
        else:
            hidden = full_mask(core_plan.mask_type, mask)
    core_state = core.random_state(x, core_plan)
    contexts.append(proj.context(dtype, is_first_microbatch, run))
    contexts += [key_value] if crosses else []
    needs = wanted(*tensors)
    trains = any(needs[:5]) or any(needs[7:])
    p, generator = dropout
    cached, step = None, None
    if inference is not None:
        cached, step = inference.step_of(core, MASK_TYPES[mask_type][0] != "none", core_plan.window)
    turns = (angles if isinstance(angles, tuple) else (angles, angles)) if angles is not None else None
    plan = Plan(
        needs,
        layernorm_linear.Plan(
            dtype,
            needs[:5],
            contexts[0].kind,
            norm_plan(first),
            first.return_layernorm_output,
        ),
        linear.Plan(dtype, needs[7:], key_value.kind) if crosses else None,
        core_plan,
        linear.Plan(dtype, (trains, *needs[5:7]), contexts[1].kind),
        module.heads(0 if crosses else module.num_attention_heads // module.num_gqa_groups),
        x.shape,
        None if source is None else source.shape,
        module.qkv_format == "sbhd",
        p,
        None if turns is None else module.rotary_pos_interleaved,
        recomputes and not torch.compiler.is_compiling(),
        cached,
    )
    state = generator.take() if p > 0 else None  # not inside the pair: a compiler cannot trace it there
    reads = (hidden, *((None, None) if turns is None else map(angles_of, turns)), *(step or ()))
    return plan, BlockContext(tuple(contexts), (state, core_state), reads), tuple(tensors)


def _masked(
    module: Any, core: CorePlan, mask: Mask, x: torch.Tensor, source: torch.Tensor | None
) -> tuple[CorePlan, torch.Tensor | None]:
    """How to attend, and the mask over pairs; it holds each sequence's own diagonal, if there is one."""
    batch, sequence = module._batch, 1 - module._batch
    counts = lengths_of_masks(core.mask_type, core.window, mask, x.shape[batch])
    if counts is None:
        return core, full_mask(core.mask_type, mask)
    shape = (
        x.shape[batch],
        module.num_attention_heads,
        x.shape[sequence],
        (x if source is None else source).shape[sequence],
    )
    kind, window, hidden = lengths_mask(core.mask_type, core.window, counts, shape)
    return core._replace(mask_type=kind, window=window), hidden
