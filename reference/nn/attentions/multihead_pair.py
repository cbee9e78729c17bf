"""Attention with its projections, in a layer with its norm and its residual, as one pair of functions.

    h = r + dropout(attention(q, k, v)·wᵀ + b)      q, k, v = norm(x)·w_qkvᵀ + b_qkv;  r = x, or norm(x)

Parts may be switched off: the norm; residual and dropout, as `MultiheadAttention` by itself has none; then norm(x) may
be a second result. For cross-attention q is projected from norm(x), k and v from an encoder's output. Each step is the
function of the corresponding module, so the bits are those of the modules one after the other:

    q, k, v from the projections    `Heads.split`
    each head normalised            `reference.nn.attentions.head_norms`, before or after
    rotated by angles               `reference.nn.attentions.apply_rotary`
    attention                       `reference.nn.attentions.dot_product_pair`, with all of its options
    the last two, of one token      `reference.nn.attentions.inference_step.attended_at_once`

Several things happen at once:

    all weights are cast in one launch                            FP8, unless they are cached
    bias, dropout and residual are fused into the last GEMM       FP8
    the norm's backward adds the residual's gradient              two roundings, as in two modules
    the cast of proj's gradient computes its db                   where `dbias` would read the gradient once more
    the gradients of q, k, v are cast from where they are         FP8 with a bias; otherwise they are joined first

`reference.nn.attentions.multihead_plan` makes plan, context and tensors of a module.
"""

from typing import Any, NamedTuple

import torch

from reference.nn.attentions import dot_product_pair, head_norms
from reference.nn.attentions.apply_rotary import turn
from reference.nn.attentions.head_norms import HeadNorms
from reference.nn.attentions.heads import Heads
from reference.nn.attentions.inference_step import attended_at_once
from reference.nn.attentions.no_grad_inputs import NoGradInputs
from reference.nn.core.compiled import before
from reference.nn.core.context import BlockContext, ModuleContext, WeightRequest, quantize_weights
from reference.nn.core.dropout import before_dropped
from reference.nn.layers import layernorm_linear, linear
from reference.ops.library import twin
from reference.ops.random.dropout import state_or_none
from reference.recipes.quantized import Dropout, Weight, fprop, fprop_residual, rows_of
from reference.support.nested import Tensors


class Given(NamedTuple):
    """The tensors that may want a gradient, in the pair's order; also their gradients.

    Attributes:
        source: an encoder's output; key_value_*: of its projection.
        added: a bias on the scores, or sinks.
        q_norm_*, k_norm_*: γ and β of the heads' norms.
    """

    x: Any = None
    norm_weight: Any = None
    norm_bias: Any = None
    weight: Any = None
    bias: Any = None
    proj_weight: Any = None
    proj_bias: Any = None
    source: Any = None
    key_value_weight: Any = None
    key_value_bias: Any = None
    added: Any = None
    q_norm_weight: Any = None
    q_norm_bias: Any = None
    k_norm_weight: Any = None
    k_norm_bias: Any = None

    @property
    def of_norms(self) -> Tensors:
        """γ and β of the heads' norms, of q and then of k."""
        return self.q_norm_weight, self.q_norm_bias, self.k_norm_weight, self.k_norm_bias


class Wants(NamedTuple):
    """Which gradients of `Given` are wanted."""

    x: bool
    norm_weight: bool
    norm_bias: bool
    weight: bool
    bias: bool
    proj_weight: bool
    proj_bias: bool
    source: bool = False
    key_value_weight: bool = False
    key_value_bias: bool = False
    added: bool = False
    q_norm_weight: bool = False
    q_norm_bias: bool = False
    k_norm_weight: bool = False
    k_norm_bias: bool = False

    @property
    def of_key_value(self) -> tuple[bool, bool, bool]:
        """Those of the projection of an encoder's output, as `linear.Wants` has them."""
        return self.source, self.key_value_weight, self.key_value_bias

    @property
    def of_norms(self) -> tuple[bool, bool, bool, bool]:
        """As `Given.of_norms`."""
        return self.q_norm_weight, self.q_norm_bias, self.k_norm_weight, self.k_norm_bias


class Plan(NamedTuple):
    """Everything but tensors that the block's launches depend on.

    Attributes:
        needs: which gradients are wanted, in the order of `Given`, as far as tensors are given.
        first: of the norm and the projection of q, k and v, for cross-attention of q; a `linear.Plan` without a norm.
        key_value: of the projection of k and v for cross-attention, or None.
        core, proj: of attention, and of the projection after it.
        heads: layout of q, k and v (or k and v) in their projection.
        shape, source_shape: of x, and of the encoder's output (None for self-attention).
        adds: whether the residual is added.
        p: probability of dropping an element after proj.
        rotary: None without angles, else whether neighbours are paired.
        norms: of each head of q and k, or None.
    """

    needs: tuple[bool, ...]
    first: layernorm_linear.Plan | linear.Plan
    key_value: linear.Plan | None
    core: dot_product_pair.Plan
    proj: linear.Plan
    heads: Heads
    shape: torch.Size
    source_shape: Any
    adds: bool
    p: float
    rotary: Any
    norms: HeadNorms | None

    @property
    def returns_norm(self) -> bool:
        """Whether the norm's output is the residual, or a second result."""
        return isinstance(self.first, layernorm_linear.Plan) and self.first.returns_norm

    @property
    def casts_core_gradients(self) -> bool:
        """Whether attention's gradients are cast as they are, and together."""
        return self.rotary is self.norms is self.key_value is None and any(self.first.needs)

    def turned(self, x: torch.Tensor, angles: torch.Tensor, reads: NoGradInputs, backward: bool) -> torch.Tensor:
        """q or k in its layout (or its gradient) rotated."""
        step = None if self.core.cached is None else (self.core.cached, reads.step())
        return turn(x, angles, self.rotary, self.core.layout, backward, step)


class Saved(NamedTuple):
    """What backward reads.

    Attributes:
        first, proj: of the first projection with its norm, and of the projection after attention.
        dropped: the random state from before the last dropout.
        mixed: the first projection's output, of which q, k and v are views (for cross-attention q).
        joined: for cross-attention the output of the other one, of which k and v are views.
        key_value: for cross-attention of the projection of k and v.
        norms: of the heads' norms.
        core: of attention; q, k and v that are views of projections are None.
    """

    first: layernorm_linear.Saved | linear.Saved
    proj: linear.Saved
    dropped: torch.Tensor | None
    mixed: torch.Tensor | None
    joined: torch.Tensor | None
    key_value: Any
    norms: Any
    core: dot_product_pair.Saved


class Modules(NamedTuple):
    """The contexts of the block's modules; `core` only of attention in FP8."""

    first: ModuleContext
    proj: ModuleContext
    key_value: Any
    core: ModuleContext | None


def modules_of(plan: Plan, context: BlockContext) -> Modules:
    """Those of a context, which holds the ones that there are."""
    first, proj, *others = context.modules
    crosses, fp8 = plan.key_value is not None, plan.core.fp8 is not None
    return Modules(first, proj, others[0] if crosses else None, others[-1] if fp8 else None)


def whole(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`[tokens, hidden]` in the input's shape; not a view, which a function must not return."""
    return torch.ops.aten._unsafe_view(rows, shape)


def forward(plan: Plan, context: BlockContext, *tensors: Any) -> tuple[Any, Any]:
    """h `[..., hidden]` of x `[..., hidden]`; without a residual also norm(x) `[tokens, hidden]`, if it is returned."""
    given, modules = Given(*tensors), modules_of(plan, context)
    (state, core_state), reads = context.random, NoGradInputs.of(context.reads)
    first, proj = modules.first, modules.proj
    requests = [
        WeightRequest(first, first.gemm, given.weight, wants_input(plan.first)),
        WeightRequest(proj, proj.gemm, given.proj_weight, plan.proj.wants.x),
    ]
    if plan.key_value is not None:
        of_kv = modules.key_value
        requests.append(WeightRequest(of_kv, of_kv.gemm, given.key_value_weight, plan.key_value.wants.x))
    w, proj_w, *more = quantize_weights(*requests)
    of_kv = (modules.key_value, more[0]) if more else None
    if plan.core.cached is not None and plan.core.cached.at_once:
        own, residual, _ = _projected(plan, first, given, w)
        how = (plan.core.cached, reads.step(), plan.core.equation, reads.angles_q, plan.rotary)
        out = attended_at_once(*how, *plan.heads.of_groups(own))
        h, _, _ = project_out(plan, proj, state, reads, out, proj_w, given.proj_bias, residual)
        return h if plan.adds or not plan.returns_norm else (h, residual), ()
    (q, k, v), residual, saved = project_in(plan, first, of_kv, reads, given, w)
    of_core = (plan.core, modules.core, core_state, reads, q, k, v, given.added)
    out, attended, kept, amax = dot_product_pair.attend(*of_core, proj.gemm.input.reads_amax)
    h, saved_proj, dropped = project_out(plan, proj, state, reads, out, proj_w, given.proj_bias, residual, amax)
    results = h if plan.adds or not plan.returns_norm else (h, residual)
    if plan.core.cached is not None:
        return results, ()
    mixed, joined = saved.mixed, saved.joined
    q, k, v = kept
    if modules.core is not None:
        mixed = joined = None
    else:
        rounds, turns = plan.core.equation.fp8_kv, plan.rotary is not None or plan.norms is not None
        q, k, v = q if turns else None, k if turns or rounds else None, v if rounds else None
    saved_core = dot_product_pair.Saved(q, k, v, attended.state if plan.core.recomputes else attended, given.added)
    return results, Saved(saved.first, saved_proj, dropped, mixed, joined, saved.key_value, saved.norms, saved_core)


class SavedIn(NamedTuple):
    """Of `project_in`; as in `Saved`."""

    first: layernorm_linear.Saved | linear.Saved
    mixed: Any
    joined: Any
    key_value: Any
    norms: Any


def project_in(
    plan: Plan,
    first: ModuleContext,
    key_value: tuple[ModuleContext, Weight] | None,
    reads: NoGradInputs,
    given: Given,
    w: Any,
) -> tuple[tuple[Any, Any, Any], torch.Tensor, SavedIn]:
    """q, k and v as attention reads them, the residual (or the norm's output, if that is returned), what is saved.

    `w`: the first projection's weight; `key_value`: the context of the one of k and v and its weight.
    """
    mixed, residual, saved_first = _projected(plan, first, given, w)
    joined: Any = None
    saved_kv: linear.Saved | None = None
    if key_value is not None and plan.key_value is not None:
        of_source = (rows_of(given.source), key_value[1], given.key_value_bias)
        joined, saved_kv = linear.forward(plan.key_value, key_value[0], *of_source)
    q: Any
    k: Any
    v: Any
    q, k, v = split(plan, mixed, joined)
    saved_norms: head_norms.Saved | None = None
    norms = plan.norms
    if norms is not None and norms.before_rope:
        q, k, saved_norms = head_norms.forward(norms, given.of_norms, reads.head_gamma, q, k)
    if plan.rotary is not None:
        q, k = plan.turned(q, reads.angles_q, reads, False), plan.turned(k, reads.angles_k, reads, False)
    if norms is not None and not norms.before_rope:
        q, k, saved_norms = head_norms.forward(norms, given.of_norms, reads.head_gamma, q, k)
    return (q, k, v), residual, SavedIn(saved_first, mixed, joined, saved_kv, saved_norms)


def project_out(
    plan: Plan,
    proj: ModuleContext,
    state: torch.Tensor | None,
    reads: NoGradInputs,
    out: torch.Tensor,
    w: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, linear.Saved, torch.Tensor | None]:
    """h of attention's result `[.., heads, channels]`, what the projection saves, the random state from before.

    Without `plan.adds` the residual is not read. `amax`: that of attention's result, if it is known.
    """
    gemm, dtype, dropped = proj.gemm, plan.proj.dtype, before(state)
    operand = gemm.input.knowing(amax).quantize(
        out.reshape(-1, out.shape[-2] * out.shape[-1]), transpose=plan.proj.wants.weight
    )
    if plan.adds and residual is not None:
        h = fprop_residual(operand, w, bias, residual, Dropout(plan.p, state, reads.kept), dtype, gemm.how)
    else:
        h = fprop(operand, w, bias, dtype, gemm.how)
    return whole(h, plan.shape), linear.Saved(operand.column, w.column), dropped


def wants_input(plan: layernorm_linear.Plan | linear.Plan) -> bool:
    """Whether a gradient is wanted of the first projection's input, or of its norm's parameters."""
    return plan.wants.normed if isinstance(plan, layernorm_linear.Plan) else plan.wants.x


def _projected(plan: Plan, first: ModuleContext, given: Given, w: Weight) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The first projection's output, the residual (or the norm's output, if that is returned), what is saved."""
    rows = rows_of(given.x)
    if not isinstance(plan.first, layernorm_linear.Plan):
        mixed, saved = linear.forward(plan.first, first, rows, w, given.bias)
        return mixed, rows, saved
    parameters = (given.norm_weight, given.norm_bias, w, given.bias)
    found: Any
    found, of_both = layernorm_linear.forward(plan.first, first, rows, *parameters)
    return (*found, of_both) if plan.first.returns_norm else (found, rows, of_both)


def split(plan: Plan, mixed: Any, joined: Any) -> tuple[torch.Tensor, ...]:
    """q, k and v `[.., .., heads, channels]`, views of the projections where these can be viewed so."""
    mixed = mixed.view(*plan.shape[:-1], mixed.shape[-1])
    if joined is None:
        return plan.heads.split(mixed)
    queries = mixed.unflatten(-1, (-1, plan.heads.channels))
    return queries, *plan.heads.split(joined.view(*plan.source_shape[:-1], joined.shape[-1]))


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor, *norm_grads: torch.Tensor) -> Tensors:
    """The gradients of `Given`; `norm_grads`: of norm(x), if it is a second result."""
    modules, reads = modules_of(plan, context), NoGradInputs.of(context.reads)
    grad = rows_of(grad)
    inner = before_dropped(grad, plan.p, saved.dropped, reads.kept)
    context_grad, proj_weight, proj_bias = linear.backward(plan.proj, modules.proj, saved.proj, inner)
    if context_grad is None:
        return Given(proj_weight=proj_weight, proj_bias=proj_bias)[: len(plan.needs)]
    core = saved.core
    if saved.mixed is not None:
        q, k, v = split(plan, saved.mixed, saved.joined)
        q, k, v = (x if kept is None else kept for x, kept in zip((q, k, v), (core.q, core.k, core.v), strict=True))
        core = dot_product_pair.Saved(q, k, v, core.attended, core.added)
    by_head = context_grad.view(*plan.shape[:-1], plan.core.heads, plan.heads.channels)
    asked = modules.first.gemm.grad.reads_amax and plan.casts_core_gradients
    found = dot_product_pair.attend_backward(plan.core, reads, core, modules.core, by_head, asked)
    dq, dk, dv, dadded, amax = found
    past = grad if plan.adds else None
    of_saved = SavedIn(saved.first, None, None, saved.key_value, saved.norms)
    which = (plan, modules.first, modules.key_value, reads, of_saved)
    grads = project_in_backward(*which, (dq, dk, dv), past, norm_grads, amax)
    return grads._replace(proj_weight=proj_weight, proj_bias=proj_bias, added=dadded)[: len(plan.needs)]


def project_in_backward(
    plan: Plan,
    first: ModuleContext,
    key_value: Any,
    reads: NoGradInputs,
    saved: SavedIn,
    grads: tuple[Any, Any, Any],
    past: torch.Tensor | None,
    norm_grads: Any,
    amax: torch.Tensor | None = None,
) -> Given:
    """The gradients of all but the projection after attention and what is added; `mixed` and `joined` are not read.

    `grads`: of q, k and v; `past`: the gradient that reaches the residual; `norm_grads`: of norm(x), if it is returned;
    `amax`: that of `grads`, where it is known and they are cast as they are.
    """
    dq, dk, dv = grads
    norms = plan.norms
    of_norms: Any = (None,) * 4
    if norms is not None and not norms.before_rope:
        dq, dk, *of_norms = head_norms.backward(norms, saved.norms, dq, dk)
    if plan.rotary is not None:
        dq, dk = plan.turned(dq, reads.angles_q, reads, True), plan.turned(dk, reads.angles_k, reads, True)
    if norms is not None and norms.before_rope:
        dq, dk, *of_norms = head_norms.backward(norms, saved.norms, dq, dk)
    pieces = [t.reshape(-1, t.shape[-2] * t.shape[-1]) for t in (dq, dk, dv)]
    of_x: Any
    of_kv: Any = (None, None, None)
    if plan.key_value is not None:
        of_query, *of_joined = pieces
        of_kv = _key_value_grads(plan, plan.key_value, key_value, saved.key_value, of_joined)
        pieces = [of_query]
    of_x = _first_grads(plan, first, saved.first, pieces, past, norm_grads, amax)
    return Given(*[*of_x, None, None, *of_kv, None, *of_norms])


def _first_grads(
    plan: Plan,
    context: ModuleContext,
    saved: Any,
    pieces: list[torch.Tensor],
    past: torch.Tensor | None,
    norm_grads: Any,
    amax: torch.Tensor | None,
) -> Tensors:
    """The gradients of x, γ, β, w and b, computed from those of q, k and v, or of q, whose amax may be known.

    `past`: the gradient that reaches the residual; `norm_grads`: of norm(x), if it is a second result.
    """
    first, wants = plan.first, plan.first.wants
    if not any(wants):
        return None, None, None, None, None
    quantizer, transpose, dbias = context.gemm.grad.knowing(amax), wants.weight, wants.bias
    if len(pieces) > 1:
        g, db = quantizer.joined_grad(pieces, plan.heads.rows, transpose, dbias)
    else:
        g, db = quantizer.grad(pieces[0].contiguous(), transpose, dbias)
    grads: Tensors
    if isinstance(first, layernorm_linear.Plan):
        # If the residual is the norm's output, its gradient is added to that of the norm's output.
        if first.returns_norm and past is not None:
            norm_grads, past = (past,), None
        residual = past if wants.x else None
        dx, *grads = layernorm_linear.quantized_backward(  # type: ignore[assignment]
            first, context, saved, g, *norm_grads, residual_grad=residual
        )
    else:
        dx, dw = linear.quantized_backward(first, context, saved, g)
        grads = (None, None, dw)
        if dx is not None and past is not None:  # an op, which a tape may contain
            dx = twin.bias_dropout_add(dx, None, past, 0.0, state_or_none(None, dx))
    return None if dx is None else whole(dx, plan.shape), *grads, db


def _key_value_grads(
    plan: Plan, of: linear.Plan, context: ModuleContext, saved: linear.Saved, pieces: list[torch.Tensor]
) -> Tensors:
    """The gradients of the encoder's output, and of w and b of its projection, computed from those of k and v."""
    wants = of.wants
    if not any(wants):
        return None, None, None
    g, db = context.gemm.grad.joined_grad(pieces, plan.heads.rows, transpose=wants.weight, dbias=wants.bias)
    dsource, dw = linear.quantized_backward(of, context, saved, g)
    return None if dsource is None else whole(dsource, plan.source_shape), dw, db
