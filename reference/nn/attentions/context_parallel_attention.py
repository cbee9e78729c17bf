"""`DotProductAttention` of a sequence whose tokens ranks share: its pair of functions, and what it does not take.

Arithmetic and the ranks' tokens: `reference.parallel.context`.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reference.arguments import MASK_TYPES
from reference.nn.attentions.exact_attention import Equation
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.context import BlockContext
from reference.nn.core.context_parallel import ContextGroup
from reference.nn.core.tensor_parallel import check_same_on_ranks, refuse_beyond_cpu
from reference.ops.attentions.attention import BLOCK
from reference.parallel import context as ranks
from reference.parallel.chain import ranks_of
from reference.support import groups
from reference.support.nested import Tensors


class Plan(NamedTuple):
    """Which gradients are wanted (q, k, v), how to attend, whether tokens come first in q, k and v, and the group."""

    needs: tuple[bool, ...]
    equation: Equation
    sequence_first: bool
    group: str

    def tokens_first(self, x: torch.Tensor) -> torch.Tensor:
        """`[s, b, ...]` of a tensor in its layout, and the other way."""
        return x if self.sequence_first else x.transpose(0, 1)


class Saved(NamedTuple):
    """What backward reads, of this rank's tokens, which come first."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    m: torch.Tensor
    inv: torch.Tensor


def forward(
    plan: Plan, context: BlockContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """out `[.., .., h·e]` in q's layout."""
    q, k, v = map(plan.tokens_first, (q, k, v))
    out, m, inv = ranks.attend(plan.group, plan.equation.options(None, None), q, k, v)
    return plan.tokens_first(out).flatten(2).contiguous(), Saved(q, k, v, out, m, inv)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """The gradients of q, k and v."""
    grad = plan.tokens_first(grad).unflatten(2, saved.out.shape[2:])
    found = ranks.attend_backward(plan.group, plan.equation.options(None, None), *saved, grad)
    return tuple(plan.tokens_first(x).contiguous() if need else None for x, need in zip(found, plan.needs, strict=True))


def take_context_group(module: Any, cp_group: Any, cp_global_ranks: Any, cp_comm_type: str) -> None:
    """Keep the group's name; None, and a group of one rank, are none."""
    name = type(module).__name__
    size = 1 if cp_group is None else dist.get_world_size(cp_group)
    if cp_global_ranks is not None and len(cp_global_ranks) != size:
        raise ValueError(
            f"{name}: cp_global_ranks={cp_global_ranks!r}; None and a list of the ranks of cp_group, {size}, are "
            f"accepted."
        )
    if size > 1 and cp_comm_type != "all_gather":
        raise NotImplementedError(
            f"{name}: cp_comm_type={cp_comm_type!r} with a cp_group of {size} ranks is not offered; 'all_gather' is "
            f"accepted."
        )
    module.cp_name = groups.name_of(cp_group) if size > 1 else None
    module.cp_comm_type = cp_comm_type


def attend(module: Any, equation: Equation, layout: str, others: dict[str, Any], *given: torch.Tensor) -> torch.Tensor:
    """`DotProductAttention.forward` of checked q, k and v; `others`: what is not offered here → whether it is asked."""
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
        f"attention_dropout={equation.p}": equation.p > 0,
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
    refuse_beyond_cpu("DotProductAttention", here, q.device)
    tokens = q.shape[0 if layout == "sbhd" else 1]
    if k.shape[:2] != q.shape[:2] or tokens % (2 * BLOCK):
        raise ValueError(
            f"DotProductAttention: query_layer has shape {list(q.shape)} and key_layer {list(k.shape)} with {here}; as "
            f"many queries as keys, a multiple of {2 * BLOCK} on each rank, are accepted."
        )
    check_same_on_ranks("DotProductAttention", "query_layer", q, module.cp_name)
    causal = MASK_TYPES[equation.mask_type][0] != "none"
    plan = Plan(
        wanted(*given), equation._replace(mask_type="causal" if causal else "no_mask"), layout == "sbhd", module.cp_name
    )
    found: torch.Tensor = differentiable(forward, backward, plan, BlockContext(), *given)
    return found


class SharesContext(ContextGroup):
    """A layer that takes a context-parallel group of several ranks."""

    cp_name: str | None = None

    @property
    def cp_group(self) -> Any:
        """The process group, where it has several ranks; else None."""
        return None if self.cp_name is None else groups.group_of(self.cp_name)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Give the group after the layer was made, as Megatron-LM and NeMo do; arguments are the constructor's."""
        super().set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        take_context_group(self, cp_group, cp_global_ranks, cp_comm_type)
