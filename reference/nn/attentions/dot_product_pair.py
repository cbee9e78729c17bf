"""Attention of q, k and v in their layout: the pair of functions of `DotProductAttention`, and a part of the block's.

    q, k, v  [s, b, h, d] or [b, s, h, d]    of heads `[b, h, s, d]`, as views
             [t, h, d] (packed sequences)    as they lie
    out      the same layout with v's d      by one of three:

    exact    `twin::attention`, with a mask, a bias, ALiBi, sinks, lengths, a cache (`exact_attention.py`)
    FP8      `twin::attention_fp8` (`attention_fp8.py`)
    cuDNN    PyTorch's, outside the bit contract (`torch_attention.py`)

`attend` and `attend_backward` are for all of them.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from reference.nn.attentions import attention_fp8, exact_attention, torch_attention
from reference.nn.attentions.exact_attention import Equation, Qkv
from reference.nn.attentions.fp8_keys_values import rounded
from reference.nn.attentions.heads import dense_rows
from reference.nn.attentions.inference_step import Cached, attended_in_pages, entered
from reference.nn.attentions.no_grad_inputs import NoGradInputs, Tensor
from reference.nn.core.context import BlockContext, ModuleContext
from reference.ops.attentions.attention_options import Options
from reference.ops.library import twin
from reference.support.nested import Tensors


class Wants(NamedTuple):
    """Which gradients are wanted: of q, k, v and, where it is given, of what is added: a bias, or sinks."""

    q: bool
    k: bool
    v: bool
    added: bool = False


class Plan(NamedTuple):
    """Everything but tensors that the launches depend on.

    Attributes:
        needs: which gradients are wanted (`Wants`).
        equation: how to attend.
        layout: "sbhd", "bshd" or "thd".
        heads: of q.
        recomputes: whether backward runs attention again instead of keeping its results; not in FP8, where these and
            the codes take less memory than q, k and v.
        returns_rows: whether `forward` returns m and inv `[b, h, sq]` beside out.
        fp8: the key of the quantizers; None where attention is in 16 bits.
        cached: None, or how keys and values go through a cache; then there is no backward.
        longest: of packed sequences the longest ones' queries and keys.
    """

    needs: tuple[bool, ...]
    equation: Equation
    layout: str
    heads: int
    recomputes: bool = False
    returns_rows: bool = False
    fp8: Hashable = None
    cached: Cached | None = None
    longest: tuple[int, int] | None = None

    @property
    def wants(self) -> Wants:
        """`needs` by names."""
        return Wants(*self.needs)

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """`[b, h, s, d]` of sequences in their layout; packed ones as they lie."""
        if self.longest is not None:
            return x
        return x.permute(1, 2, 0, 3) if self.layout == "sbhd" else x.permute(0, 2, 1, 3)

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `heads_first`."""
        if self.longest is not None:
            return x
        return x.permute(2, 0, 1, 3) if self.layout == "sbhd" else x.permute(0, 2, 1, 3)


class Saved(NamedTuple):
    """What backward reads.

    Attributes:
        q, k, v: as attention read them, in their layout; None in FP8, where `attended` has codes.
        attended: the core's results; with `Plan.recomputes` the random state from before it.
        added: a bias, or sinks.
    """

    q: Any
    k: Any
    v: Any
    attended: Any
    added: Tensor


def options_of(plan: Plan, reads: NoGradInputs, state: Tensor, added: Tensor) -> Options:
    """What the ops of attention take after q, k and v; in FP8 those that they have there, too."""
    found = plan.equation.options(reads.mask, state, added, reads.slopes, reads.q_lengths, reads.kv_lengths)
    if plan.longest is None:
        return found
    longest_q, longest_kv = plan.longest
    of_q, of_kv = reads.q_starts, reads.kv_starts
    return found._replace(q_starts=of_q, kv_starts=of_kv, longest_q=longest_q, longest_kv=longest_kv)


def attend(
    plan: Plan,
    fp8: ModuleContext | None,
    state: Tensor,
    reads: NoGradInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    added: Tensor,
    wants_amax: bool = False,
) -> tuple[torch.Tensor, Any, tuple[Any, Any, Any], Tensor]:
    """out in q's layout, what is saved of the core (`Saved.attended`), q, k and v as they are saved, and out's amax.

    q, k and v are in their layout; `added`: a bias, or sinks; `fp8`: the context of attention in FP8. The amax, fp32
    `[1, 1]`, is None unless it is wanted and found in passing.
    """
    amax: Tensor = None
    if plan.equation.fp8_kv and reads.step_key_scales is None:  # else they become codes in the cache
        k, v = rounded(k), rounded(v)
    kept: tuple[Any, Any, Any] = (None, None, None)
    attended: Any
    if fp8 is None:
        kept = (q, k, v)
        heads = (plan.heads_first(q), plan.heads_first(k), plan.heads_first(v))
        out, attended, amax = _attend_by_heads(plan, reads, state, added, *heads, wants_amax)
    else:
        options = options_of(plan, reads, state, added)
        out, attended = attention_fp8.attend(fp8, plan.layout, options, q, k, v)
    return plan.in_order(out), attended, kept, amax


def _attend_by_heads(
    plan: Plan,
    reads: NoGradInputs,
    state: Tensor,
    added: Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    wants_amax: bool,
) -> tuple[torch.Tensor, Any, Tensor]:
    """out `[b, h, s, d]`, what backward reads of it, and its amax."""
    equation = plan.equation
    if equation.backend == "cudnn":
        return *torch_attention.cudnn_attend(equation, any(plan.needs), q, k, v), None
    if plan.cached is None:
        return exact_attention.attend(options_of(plan, reads, state, added), q, k, v, wants_amax)
    if plan.cached.layout == "paged":
        out, m, inv = attended_in_pages(plan.cached, reads.step(), equation, added, q, k, v)
        return out, exact_attention.Attended(out, m, inv, None), None
    equation, hidden, qkv = entered(plan.cached, reads.step(), equation, q, k, v)
    out, attended, _ = exact_attention.attend(equation.options(hidden, state, added), *qkv)
    rows = attended._replace(m=attended.m.reshape(q.shape[:3]), inv=attended.inv.reshape(q.shape[:3]))
    return out.reshape(*q.shape[:3], v.shape[3]), rows, None


def attend_backward(
    plan: Plan,
    reads: NoGradInputs,
    saved: Saved,
    fp8: ModuleContext | None,
    grad: torch.Tensor,
    wants_amax: bool = False,
) -> tuple[Any, Any, Any, Tensor, Tensor]:
    """The gradients of q, k and v in their layout and of what is added, and the amax of the first three (`attend`)."""
    grad = dense_rows(plan.heads_first(grad))
    if fp8 is not None:
        options = options_of(plan, reads, saved.attended.state, saved.added)
        heads = attention_fp8.attend_backward(options, saved.attended, grad)
        dq, dk, dv = (plan.in_order(x).contiguous() for x in heads)  # neighbours in memory, as tapes want results
        return dq, dk, dv, None, None
    qkv = (plan.heads_first(saved.q), plan.heads_first(saved.k), plan.heads_first(saved.v))
    *grads, amax, dadded = _backward_by_heads(plan, reads, saved, qkv, grad, wants_amax)
    dq, dk, dv = map(plan.in_order, grads)
    return dq, dk, dv, dadded, amax


def _backward_by_heads(
    plan: Plan, reads: NoGradInputs, saved: Saved, qkv: Qkv, grad: torch.Tensor, wants_amax: bool
) -> Any:
    """dq, dk, dv `[b, h, s, d]`, their amax, and the gradient of what is added."""
    attended, added = saved.attended, saved.added
    if plan.equation.backend == "cudnn":
        return *torch_attention.cudnn_attend_backward(plan.equation, qkv, attended, grad), None, None
    if plan.recomputes:
        again = None if attended is None else attended.clone()
        _, attended, _ = exact_attention.attend(options_of(plan, reads, again, added), *qkv)
    options = options_of(plan, reads, attended.state, added)
    grads = exact_attention.attend_backward(options, qkv, attended, grad, wants_amax)
    if added is None or not plan.wants.added:
        return *grads, None
    out, m, inv = attended.out, attended.m, attended.inv
    if options.sinks is not None:
        where = (options.q_lengths, options.q_starts) if options.packed else ()
        return *grads, twin.attention_sink_backward(grad, out, m, inv, added, *where)
    return *grads, twin.attention_bias_backward(grad, *qkv, out, m, inv, *options)


def forward(plan: Plan, context: BlockContext, *given: Tensor) -> tuple[Any, Saved]:
    """out `[.., .., h·d]` or `[t, h·d]` of q, k and v, and of a bias or of sinks; with `returns_rows` (out, m, inv)."""
    fp8 = context.modules[0] if context.modules else None
    tensors: Any = given if len(given) == 4 else (*given, None)
    out, attended, kept, _ = attend(plan, fp8, context.random[0], NoGradInputs.of(context.reads), *tensors)
    # A view must not be returned.
    out = torch.ops.aten._unsafe_view(out.contiguous(), (*out.shape[:-2], out.shape[-2] * out.shape[-1]))
    results = (out, attended.m, attended.inv) if plan.returns_rows else out
    if plan.recomputes:
        attended = attended.state
    else:  # the result itself is saved, and not other views of it: autograd sees a change in place
        attended = attended._replace(out=out)
    return results, Saved(*kept, attended, tensors[3])


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor, *unused: torch.Tensor) -> Tensors:
    """The gradients of q, k and v, and of what is added, if it is given; m and inv get none: they are looked at."""
    fp8 = context.modules[0] if context.modules else None
    grad = grad.unflatten(-1, (plan.heads, -1))
    if not plan.recomputes:
        out = plan.heads_first(saved.attended.out.unflatten(-1, (plan.heads, -1)))
        saved = saved._replace(attended=saved.attended._replace(out=out))
    return attend_backward(plan, NoGradInputs.of(context.reads), saved, fp8, grad)[: len(plan.needs)]
