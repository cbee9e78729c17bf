"""`DotProductAttention` of a sequence whose tokens ranks share: its pair of functions, and what it does not take.

Arithmetic and the ranks' tokens: `reference.parallel.context`.
"""

from typing import Any, NamedTuple

import torch

from reference.arguments import MASK_TYPES
from reference.nn.attentions.exact_attention import Equation
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.compiled import before
from reference.nn.core.context import BlockContext
from reference.nn.core.tensor_parallel import check_same_on_ranks, refuse_compiler
from reference.ops.attentions.attention import BLOCK
from reference.parallel import context as ranks
from reference.parallel.ordered_reduce import ranks_of
from reference.support.nested import Tensors


class Plan(NamedTuple):
    """Which gradients are wanted (q, k, v), how to attend, whether tokens come first in q, k and v, the group, and
    which heads are here."""

    needs: tuple[bool, ...]
    equation: Equation
    sequence_first: bool
    group: str
    heads: ranks.Heads

    def tokens_first(self, x: torch.Tensor) -> torch.Tensor:
        """`[s, b, ...]` of a tensor in its layout, and the other way."""
        return x if self.sequence_first else x.transpose(0, 1)


class Saved(NamedTuple):
    """What backward reads, of this rank's tokens, which come first, and the random state from before."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    m: torch.Tensor
    inv: torch.Tensor
    state: torch.Tensor | None


def forward(
    plan: Plan, context: BlockContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """out `[.., .., h·e]` in q's layout."""
    q, k, v = map(plan.tokens_first, (q, k, v))
    (state,) = context.random
    dropped = before(state)
    out, m, inv = ranks.attend(plan.group, plan.heads, plan.equation.options(None, state), q, k, v)
    return plan.tokens_first(out).flatten(2).contiguous(), Saved(q, k, v, out, m, inv, dropped)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """The gradients of q, k and v."""
    grad = plan.tokens_first(grad).unflatten(2, saved.out.shape[2:])
    options = plan.equation.options(None, saved.state)
    qkv, results = (saved.q, saved.k, saved.v), (saved.out, saved.m, saved.inv)
    found = ranks.attend_backward(plan.group, plan.heads, options, *qkv, *results, grad)
    return tuple(plan.tokens_first(x).contiguous() if need else None for x, need in zip(found, plan.needs, strict=True))


def check(module: Any, equation: Equation, layout: str, others: dict[str, Any], *given: torch.Tensor) -> None:
    """Refuse what is not offered here, before anything is drawn; `others`: what else → whether it is asked."""
    size = ranks_of(module.cp_name)[1]
    here = f"a cp_group of {size} ranks"
    q, k, _ = given
    if MASK_TYPES[equation.mask_type][1] or (equation.mask_type == "no_mask" and equation.window != (-1, -1)):
        raise NotImplementedError(
            f"DotProductAttention: attn_mask_type={equation.mask_type!r} and window_size={equation.window} with {here} "
            f"are not offered; causal types, and 'no_mask' without a window, are accepted."
        )
    for what, asked in {
        **others,
        f"softmax_type={module.softmax_type!r}": module.softmax_type != "vanilla",
        f"qkv_format={layout!r}": layout == "thd",
        f"{q.dtype}": q.dtype == torch.float32,
        f"attention_backend={equation.backend!r}": equation.backend != "exact",
    }.items():
        if asked:
            raise NotImplementedError(
                f"DotProductAttention: {what} with {here} is not offered; its default, or attention without the group, "
                f"is accepted."
            )
    refuse_compiler("DotProductAttention", here)
    tokens = q.shape[0 if layout == "sbhd" else 1]
    if k.shape[:2] != q.shape[:2] or tokens % (2 * BLOCK):
        raise ValueError(
            f"DotProductAttention: query_layer has shape {list(q.shape)} and key_layer {list(k.shape)} with {here}; as "
            f"many queries as keys, a multiple of {2 * BLOCK} on each rank, are accepted."
        )
    check_same_on_ranks("DotProductAttention", "query_layer", q, module.cp_name)


def attend(
    module: Any, equation: Equation, layout: str, state: torch.Tensor | None, *given: torch.Tensor
) -> torch.Tensor:
    """`DotProductAttention.forward` of checked q, k and v; `state`: from which it drops, advanced; else None."""
    causal = MASK_TYPES[equation.mask_type][0] != "none"
    equation, count = equation._replace(mask_type="causal" if causal else "no_mask"), module.num_attention_heads
    heads = (count, count, 0) if module.of_heads is None else module.of_heads
    plan = Plan(wanted(*given), equation, layout == "sbhd", module.cp_name, heads)
    found: torch.Tensor = differentiable(forward, backward, plan, BlockContext(random=(state,)), *given)
    return found
