"""`MultiheadAttention` as an attention block: whether it runs as one, and the block's plan, context and tensors."""

from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from reference.arguments import MASK_TYPES
from reference.memory.recompute import Run
from reference.nn.attentions import head_norms, multihead_around_torch, multihead_pair
from reference.nn.attentions.apply_rotary import angles_of
from reference.nn.attentions.attention_extras import NO_EXTRAS, Extras
from reference.nn.attentions.attention_lengths import sizes_of
from reference.nn.attentions.dot_product_attention import DotProductAttention
from reference.nn.attentions.dot_product_pair import Plan as CorePairPlan
from reference.nn.attentions.dot_product_plan import Call, cached_call_of, call_of, context_of
from reference.nn.attentions.exact_attention import Equation, Mask, full_mask
from reference.nn.attentions.inference_step import Cached, takes_at_once
from reference.nn.attentions.multihead_pair import Plan, Wants
from reference.nn.attentions.no_grad_inputs import NO_INPUTS, NoGradInputs
from reference.nn.attentions.packing import positions_of
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import Window
from reference.nn.core.context import BlockContext
from reference.nn.core.dropout import DropPath, Generator
from reference.nn.core.parameters import named
from reference.nn.layers import layernorm_linear, linear
from reference.nn.layers.layernorm import L2Normalization, LayerNorm, norm_plan
from reference.nn.layers.layernorm_linear import LayerNormLinear
from reference.nn.layers.linear import Linear
from reference.support.nested import Tensors

Dropout = tuple[float, Generator]
Angles = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


def uses_default_forward(part: torch.nn.Module, cls: type[torch.nn.Module]) -> bool:
    """Whether a part of a layer is not replaced, graphed or hooked, so that it need not be called as a module."""
    return not (
        type(part).forward is not cls.forward
        or "forward" in part.__dict__
        or part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or _has_any_global_hook()
    )


def norm_class(norm: torch.nn.Module) -> type[torch.nn.Module]:
    """What a norm of heads is an instance of, whose forward is that of the others if it is none."""
    return L2Normalization if isinstance(norm, L2Normalization) else LayerNorm


def is_block(module: Any) -> bool:
    """Whether a `MultiheadAttention` runs as a block; if not, because a part is observed or replaced, its parts do."""
    if module.tp_size > 1 or module.cp_name is not None:  # of which no function of the block knows
        return False
    modules = module._modules
    first, core, proj = modules[module._first_name], modules["core_attention"], modules["proj"]
    if not uses_default_forward(core, DotProductAttention):
        return False
    for one in (proj,) if module.attention_type == "self" else (proj, modules["key_value"]):
        settings = (one.own_recipe is first.own_recipe, one.in_high_precision == first.in_high_precision)
        if settings != (True, True) or not uses_default_forward(one, Linear):
            return False
    if module.input_layernorm:
        returns = module.return_layernorm_output == first.return_layernorm_output
        fits = returns and uses_default_forward(first, LayerNormLinear)
    else:
        fits = uses_default_forward(first, Linear)
    if module.q_norm is not None:
        fits = fits and all(uses_default_forward(one, norm_class(one)) for one in (module.q_norm, module.k_norm))
    return fits


def prepared(
    module: Any,
    dtype: torch.dtype,
    x: torch.Tensor,
    mask: Mask,
    mask_type: str,
    dropout: Dropout | None,
    is_first_microbatch: bool | None,
    source: torch.Tensor | None = None,
    angles: Angles = None,
    recomputes: bool = False,
    window: Window = None,
    extras: Extras = NO_EXTRAS,
    drop_path: DropPath | None = None,
    run: Run | None = None,
) -> tuple[Plan, BlockContext, tuple[Any, ...]]:
    """Of a forward whose arguments are checked; the tensors are those of `Given`, as far as there are any.

    Without `dropout` no residual is added, either. `dtype`: T. `run` is None where nobody has asked yet. Where PyTorch
    differentiates attention (`multihead_around_torch.by_torch`) the plan is for `multihead_around_torch.run`.
    """
    modules = module._modules
    first, core, proj = modules[module._first_name], modules["core_attention"], modules["proj"]
    crosses, has_norm, layout = source is not None, module.input_layernorm, module.qkv_format
    contexts = [first.context(dtype, is_first_microbatch, run)]
    equation: Equation = core.equation(mask_type, module.window_size if window is None else window)
    is_exact = dtype != torch.float32 and core.attention_backend == "exact"  # spares most layers the call
    of_torch = not is_exact and multihead_around_torch.by_torch(module, dtype, recomputes)
    fp8 = None if of_torch else context_of(core, dtype, x.device, run)
    call, cached = _called(module, equation, x, source, mask, angles, extras, of_torch)
    equation, reads, added, longest = call
    core_state = None if of_torch else core.random_state(x, equation)
    contexts.append(proj.context(dtype, is_first_microbatch, run))
    norms = None
    of_norms: Tensors = ()
    if module.q_norm is not None:
        norms, of_norms, gamma = head_norms.norms_of(module, dtype, x.device)
        reads = reads if gamma is None else reads._replace(head_gamma=gamma)
    norm_weights = named(first, ("layer_norm_weight", "layer_norm_bias")) if has_norm else (None, None)
    proj_bias = None if dropout is None and proj.return_bias else proj.joined_bias()
    own: tuple[Any, ...] = (x, *norm_weights, first.joined_weight(), first.joined_bias(), proj.weight, proj_bias)
    tensors = own
    if crosses:
        key_value = modules["key_value"]
        contexts.append(key_value.context(dtype, is_first_microbatch, run))
        tensors = (*own, source, key_value.joined_weight(), key_value.joined_bias(), added, *of_norms)
    elif added is not None or of_norms:
        tensors = (*own, None, None, None, added, *of_norms)
    if fp8 is not None:
        contexts.append(fp8)
    needs = wanted(*tensors)
    wants = Wants(*needs)
    of_first = (wants.x, wants.norm_weight, wants.norm_bias, wants.weight, wants.bias)
    trains = any(needs) and (any(of_first) or any(wants.of_key_value) or wants.added or any(wants.of_norms))
    p, generator = (0.0, None) if dropout is None else dropout
    if drop_path is not None:
        reads = reads._replace(kept=drop_path.kept(x.shape[0], x.device))
    plan = Plan(
        needs,
        (
            layernorm_linear.Plan(dtype, of_first, contexts[0].key, norm_plan(first), first.return_layernorm_output)
            if has_norm
            else linear.Plan(dtype, (wants.x, wants.weight, wants.bias), contexts[0].key)
        ),
        linear.Plan(dtype, wants.of_key_value, contexts[2].key) if crosses else None,
        CorePairPlan(
            (True, True, True, wants.added),
            equation,
            layout,
            module.num_attention_heads,
            recomputes and fp8 is None and not torch.compiler.is_compiling(),
            False,
            None if fp8 is None else fp8.key,
            cached,
            longest,
        ),
        linear.Plan(dtype, (trains, wants.proj_weight, wants.proj_bias), contexts[1].key),
        module.heads(0 if crosses else module.num_attention_heads // module.num_gqa_groups),
        x.shape,
        None if source is None else source.shape,
        dropout is not None,
        p,
        None if angles is None else module.rotary_pos_interleaved,
        norms,
    )
    state = None if generator is None or p == 0 else generator.take()  # not inside the pair: a compiler cannot trace it
    context = BlockContext(tuple(contexts), (state, core_state), () if reads is NO_INPUTS else reads)
    return plan, context, tensors


def run_block(
    module: Any,
    dtype: torch.dtype,
    x: torch.Tensor,
    mask: Mask,
    mask_type: str,
    dropout: Dropout | None,
    is_first_microbatch: bool | None,
    source: torch.Tensor | None,
    angles: Angles,
    recomputes: bool,
    *rest: Any,
) -> Any:
    """h of x, with `norm(x)` as a second result where it is returned; arguments of `prepared`."""
    given = (x, mask, mask_type, dropout, is_first_microbatch, source, angles, recomputes, *rest)
    plan, context, tensors = prepared(module, dtype, *given)
    if multihead_around_torch.by_torch(module, dtype, recomputes):
        return multihead_around_torch.run(plan, context, tensors, recomputes)
    return differentiable(multihead_pair.forward, multihead_pair.backward, plan, context, *tensors)


def _called(
    module: Any,
    equation: Equation,
    x: torch.Tensor,
    source: torch.Tensor | None,
    mask: Mask,
    angles: Angles,
    extras: Extras,
    by_mask: bool,
) -> tuple[Call, Cached | None]:
    """The call of attention's core with its angles, and how a cache is used; `by_mask` as in `call_of`."""
    core, mask_type = module._modules["core_attention"], equation.mask_type
    cached = tokens = None
    of_q: Any = None
    of_k: Any = None
    if angles is not None:
        of_q, of_k = map(angles_of, angles if isinstance(angles, tuple) else (angles, angles))
    if extras.inference is not None:
        cached, step = extras.inference.step_of(core, MASK_TYPES[mask_type][0] != "none", equation.window)
        call = cached_call_of(core, equation, cached, step, x, module.qkv_format)
        one = of_q is not None and (not isinstance(angles, tuple) or angles[0] is angles[1])
        if one and module.q_norm is None and takes_at_once(cached, step, call.equation):
            cached = cached._replace(at_once=True)
        if of_q is not None and module.qkv_format == "thd" and not cached.at_once:
            at: Any = step.positions
            of_q, of_k = of_q.index_select(0, at), of_k.index_select(0, at)
    elif extras is NO_EXTRAS and type(mask) is not tuple and core.softmax_type == "vanilla":
        hidden = full_mask(mask_type, mask)
        reads = NO_INPUTS if hidden is of_q is None else NoGradInputs(hidden, angles_q=of_q, angles_k=of_k)
        call = Call(equation, reads)
    else:
        kv = x.shape if source is None else source.shape
        shape = sizes_of(module.qkv_format, extras.lengths, module.num_attention_heads, x.shape, kv)
        tokens = (x.shape[0], kv[0]) if module.qkv_format == "thd" else None
        call = call_of(core, equation, mask, extras, shape, x, by_mask, tokens)
    if of_q is not None and call.reads.angles_q is None:
        if tokens is not None:
            q_positions, k_positions = positions_of(extras.lengths, tokens)
            of_q, of_k = of_q[q_positions], of_k[k_positions]
        call = call._replace(reads=call.reads._replace(angles_q=of_q, angles_k=of_k))
    return call, cached
