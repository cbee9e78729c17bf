"""`DotProductAttention`: softmax(q·kᵀ·scale, masked)·v per head.

Arithmetic: `reference.ops.attention`. As in Transformer Engine, True in a mask means hidden, and a query that sees no
key gives zeros. In fp32 attention is PyTorch's own, and with `attention_backend="cudnn"` it is cuDNN's, which is
faster; both are outside the bit contract. Source: Transformer Engine's `pytorch/attention/dot_product_attention`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reference.arguments import MASK_TYPES, check_arguments
from reference.compiled import before
from reference.nn.autograd import differentiable, wanted
from reference.nn.checks import (
    Window,
    activation_dtype,
    check_cudnn,
    check_grid,
    check_mask,
    check_mask_type,
    check_qkv,
    window_of,
)
from reference.nn.context import BlockContext, Saved
from reference.nn.dropout import Generator
from reference.nn.inference import InferenceParams, entered
from reference.nn.parameters import DeviceDefault
from reference.notice import say_once
from reference.ops.attention import NO_LIMIT, limits
from reference.ops.library import twin
from reference.quantized import as_dtype
from reference.recompute import checkpoint

Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
MASK_NAMES = ("attention_mask", "attn_mask_type", "window_size")


class CorePlan(NamedTuple):
    """How to attend: the scale, Transformer Engine's mask type, the window, dropout's probability, the backend."""

    scale: float
    mask_type: str
    window: tuple[int, int]
    p: float
    backend: str

    def arguments(self, mask: torch.Tensor | None) -> tuple[float, str, int, int, torch.Tensor | None, float]:
        """Arguments of `twin::attention` after q, k and v."""
        return self.scale, MASK_TYPES[self.mask_type][0], *self.window, mask, self.p


class Plan(NamedTuple):
    """Which gradients are wanted (q, k, v), and how to attend."""

    needs: tuple[bool, ...]
    core: CorePlan


def attend(
    core: CorePlan, mask: torch.Tensor | None, state: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """out `[b, h, sq, d]` of q `[b, h, sq, d]`, k and v `[b, hkv, skv, d]`, and what `attend_backward` reads."""
    state_before = before(state)
    out, m, inv = twin.attention(q, k, v, *core.arguments(mask), state)
    return out, (out, m, inv, state_before)


def attend_backward(
    core: CorePlan, mask: torch.Tensor | None, qkv: Saved, saved: Saved, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv."""
    *tensors, state_before = saved
    if grad.stride(-1) != 1:  # an expanded gradient, such as a sum's
        grad = grad.contiguous()
    return twin.attention_backward(grad, *qkv, *tensors, *core.arguments(mask), state_before)


def forward(
    plan: Plan, context: BlockContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """out of q, k and v; shapes as in `attend`."""
    out, saved = attend(plan.core, context.reads[0], context.random[0], q, k, v)
    return out, (q, k, v, *saved)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Saved:
    """dq, dk, dv."""
    return attend_backward(plan.core, context.reads[0], saved[:3], saved[3:], grad)


class DotProductAttention(DeviceDefault, torch.nn.Module):
    """softmax(q·kᵀ)·v with Transformer Engine's arguments.

    Args:
        num_attention_heads: heads of the queries.
        kv_channels: size of a head; a multiple of 8, at most 256.
        num_gqa_groups: heads of keys and values, a divisor of num_attention_heads; None is num_attention_heads.
        attention_dropout: probability of dropping a weight in training.
        qkv_format: "sbhd" or "bshd".
        attn_mask_type: default of `forward`'s, one of `MASK_TYPES`.
        window_size: default of `forward`'s. (left, right) lets query i see only the keys from i + shift - left to
            i + shift + right, where shift is 0 under a causal mask type, otherwise, and for "..._bottom_right", the
            number of keys less that of queries. Causal types make right 0. None, (-1, -1) and (-1, 0) are no window.
        softmax_scale: None is 1 / sqrt(kv_channels).
        attention_type: "self" or "cross".
        layer_number: whose cache in `inference_params` is this one's; None is 1.
        name: accepted as in Transformer Engine, without effect.
        softcap, softmax_type, tp_*, cp_*, sequence_parallel, get_rng_state_tracker, ...: only "off" is offered.
        device: of the random state; None is the package's own.
        attention_backend: "exact" gives the bits of `reference.ops.attention` on every device. "cudnn" is
            PyTorch's SDPA on its cuDNN backend, on CUDA, in bf16 or fp16, without a mask or causal with as many keys as
            queries. Its bits may change with cuDNN's version, the GPU, and from run to run; its dropout draws from
            torch's generator. (Transformer Engine chooses by NVTE_FUSED_ATTN and similar variables.)
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        *,
        device: torch.device | str | None = None,
        attention_backend: str = "exact",
    ) -> None:
        check_arguments("DotProductAttention", locals())
        super().__init__()
        self.num_attention_heads = int(num_attention_heads)
        self.num_gqa_groups = check_groups("DotProductAttention", num_gqa_groups, self.num_attention_heads)
        self.kv_channels = int(kv_channels)
        self.attention_dropout = float(attention_dropout)
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_of("DotProductAttention", MASK_NAMES, attn_mask_type, window_size)
        self.attention_type = attention_type
        self.layer_number = 1 if layer_number is None else int(layer_number)
        self.softmax_scale = self.kv_channels**-0.5 if softmax_scale is None else float(softmax_scale)
        self.attention_backend = attention_backend
        if attention_backend == "cudnn":
            say_once("cudnn", "attention_backend='cudnn': attention is cuDNN's and outside the bit contract")
        self.generator = Generator(self.resolve_device(device), get_rng_state_tracker)

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: Mask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, torch.Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, torch.Tensor] | None = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> torch.Tensor:
        """Attend.

        Args:
            query_layer: `[s, b, h, d]` ("sbhd") or `[b, s, h, d]` ("bshd"), bf16 or fp16. fp32 is cast to
                torch.autocast's dtype; without torch.autocast attention is PyTorch's own.
            key_layer, value_layer: the same with the keys' length and heads.
            attention_mask: bool, True = hidden; `[b, 1, 1, s]` (for cross-attention a pair, queries' and keys') with a
                padding mask type, broadcastable to `[b, h, sq, skv]` with "arbitrary". The other types ignore it.
            qkv_format, attn_mask_type, window_size: None is the constructor's.
            checkpoint_core_attention: recompute in backward.
            inference_params: keys and values go to its cache, and queries see what is there: `reference.nn.inference`.
                The causal types mean one thing, and attention_mask is None.
            cu_seqlens_*, max_seqlen_*, core_attention_bias_type, core_attention_bias and the rest: Transformer
                Engine's, in its order; only "off" is offered.

        Returns:
            `[s, b, h·d]` or `[b, s, h·d]`.
        """
        if not (
            cu_seqlens_q is cu_seqlens_kv is cu_seqlens_q_padded is cu_seqlens_kv_padded is max_seqlen_q is None
            and max_seqlen_kv is bottom_right_diagonal is softcap is core_attention_bias is None
            and alibi_slopes is pad_between_seqs is score_mod is score_mod_bprop is None
            and score_mod_tensors is score_mod_bprop_tensors is qkv_layer is kv_layer is thd_attention_policies is None
            and fast_zero_fill is True
            and fp8_output is bf16_backward is False
            and type(num_splits) is type(qkv_interleave_dim) is int
            and (num_splits, qkv_interleave_dim) == (1, -3)
            and type(core_attention_bias_type) is type(thd_attention_policy_dispatch) is str
            and (core_attention_bias_type, thd_attention_policy_dispatch) == ("no_bias", "auto")
            and type(checkpoint_core_attention) is bool
            and qkv_format in (None, "sbhd", "bshd")
        ):
            check_arguments("DotProductAttention.forward", locals())
        layout = self.qkv_format if qkv_format is None else qkv_format
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        check_mask_type("DotProductAttention", "attn_mask_type", kind)
        core = self.core_plan(kind, window_size)
        check_qkv(self, query_layer, key_layer, value_layer, layout == "sbhd")
        given: Any = (query_layer, key_layer, value_layer)
        if given[0].dtype == torch.float32:
            given = [as_dtype(t, activation_dtype(t)) for t in given]
        heads_first = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(heads_first) for t in given)
        if inference_params is not None:
            check_inference("DotProductAttention", inference_params, self, given[0], layout, attention_mask, kind, True)
        elif MASK_TYPES[kind][1]:
            shape = (*q.shape[:3], k.shape[2])
            check_mask("DotProductAttention", MASK_NAMES, kind, attention_mask, core.window, shape, q.device)
        if self.attention_backend == "cudnn":
            check_cudnn(q.dtype, q.device, (q.shape[2], k.shape[2]), kind, core.window)
        elif q.is_cuda and q.dtype != torch.float32:
            check_grid("DotProductAttention", q.shape[0], q.shape[1], q.device)
        run = self._attend
        if inference_params is not None:
            cached = inference_params.step_of(self, MASK_TYPES[kind][0] != "none", core.window)
            core, mask, qkv = entered(*cached, core, q, k, v)
            out = run(*qkv, core, mask).reshape(q.shape)
        else:
            mask = full_mask(kind, attention_mask)
            out = checkpoint(run, q, k, v, core, mask) if checkpoint_core_attention else run(q, k, v, core, mask)
        out = out.permute(2, 0, 1, 3) if layout == "sbhd" else out.permute(0, 2, 1, 3)
        return out.reshape(*out.shape[:2], self.num_attention_heads * self.kv_channels)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: CorePlan, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if q.dtype == torch.float32:
            return torch_attention(q, k, v, core, mask)
        if core.backend == "cudnn":
            return cudnn_attention(q, k, v, core)
        context = BlockContext(random=(self.random_state(q, core),), reads=(mask,))
        return differentiable(forward, backward, Plan(wanted(q, k, v), core), context, q, k, v)

    def core_plan(self, mask_type: str, window: Window = None) -> CorePlan:
        """How to attend now; a window of None is the constructor's."""
        window = window_of("DotProductAttention", MASK_NAMES, mask_type, self.window_size if window is None else window)
        p = self.attention_dropout if self.training else 0.0
        return CorePlan(self.softmax_scale, mask_type, window, p, self.attention_backend)

    def random_state(self, inp: torch.Tensor, core: CorePlan) -> torch.Tensor | None:
        """The newly seeded state from which `twin::attention` drops in this forward; None where it drops nothing."""
        if core.p == 0 or core.backend == "cudnn":
            return None
        self.generator.draw(inp.device)
        return self.generator.take()


def _say_fp32() -> None:
    say_once("fp32 attention", "attention in fp32 is PyTorch's own and outside the bit contract")


_say_fp32._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a compiler runs it while tracing


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: CorePlan, mask: torch.Tensor | None
) -> torch.Tensor:
    """PyTorch's attention, for fp32: differentiable, outside the bit contract; dropout from torch's generator."""
    _say_fp32()
    sq, skv = q.shape[2], k.shape[2]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    lower, upper = limits(MASK_TYPES[core.mask_type][0], *core.window, sq, skv)
    if mask is None and lower == -NO_LIMIT and upper in (0, NO_LIMIT):
        return scaled_dot_product_attention(q, k, v, dropout_p=core.p, is_causal=upper == 0, scale=core.scale)
    if (lower, upper) != (-NO_LIMIT, NO_LIMIT):
        every = torch.ones(sq, skv, dtype=torch.bool, device=q.device)
        unseen = every.triu(upper + 1) | every.tril(lower - 1)
        mask = unseen if mask is None else mask | unseen
    assert mask is not None
    mask = mask.expand(*mask.shape[:-1], skv)  # CUDA's kernels broadcast a mask over every dimension but the last
    blind = mask.all(-1, keepdim=True)  # such a row would be NaN: it sees everything and is cleared afterwards
    out = scaled_dot_product_attention(q, k, v, attn_mask=blind | ~mask, dropout_p=core.p, scale=core.scale)
    return out.masked_fill(blind, 0.0)


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: CorePlan) -> torch.Tensor:
    """cuDNN's attention, differentiable, outside the bit contract."""
    shared: dict[str, Any] = {"dropout_p": core.p, "is_causal": core.mask_type == "causal", "scale": core.scale}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, **shared, enable_gqa=q.shape[1] != k.shape[1])


def cudnn_attend(
    core: CorePlan, trains: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """What SDPA calls on its cuDNN backend, without autograd; for as many heads of keys as of queries."""
    out, sums, *lengths, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, trains, core.p, core.mask_type == "causal", False, scale=core.scale
    )
    drawn = (seed, offset) if core.p > 0 else (None, None)
    return out, (out, sums, *drawn, *lengths)


def cudnn_attend_backward(core: CorePlan, qkv: Saved, saved: Saved, grad: torch.Tensor) -> Saved:
    """dq, dk, dv."""
    q, k, _ = qkv
    assert q is not None
    assert k is not None
    lengths, causal = (q.shape[2], k.shape[2]), core.mask_type == "causal"
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, *qkv, *saved[:4], None, *saved[4:], *lengths, core.p, causal, scale=core.scale
    )


def check_groups(layer: str, num_gqa_groups: int | None, heads: int) -> int:
    """The number of heads of keys and values, checked."""
    groups = heads if num_gqa_groups is None else int(num_gqa_groups)
    if heads % groups:
        raise ValueError(f"{layer}: num_gqa_groups={groups} with num_attention_heads={heads}; a divisor is accepted.")
    return groups


def check_inference(
    layer: str,
    params: Any,
    core: Any,
    x: torch.Tensor,
    layout: str,
    mask: Any,
    kind: str,
    alone: bool = False,
) -> None:
    """`InferenceParams.check` of activations x [s, b, ...] or [b, s, ...]."""
    if not isinstance(params, InferenceParams):
        raise TypeError(f"{layer}: inference_params={params!r}; None or InferenceParams is accepted.")
    if not isinstance(core, DotProductAttention):
        raise TypeError(f"{layer}: inference_params with core_attention={core!r}; a DotProductAttention is accepted.")
    sizes = (x.shape[1], x.shape[0]) if layout == "sbhd" else (x.shape[0], x.shape[1])
    params.check(layer, core, activation_dtype(x), x.device, sizes, mask, kind, alone)


def full_mask(kind: str, mask: Any) -> torch.Tensor | None:
    """The mask over pairs, broadcastable to `[b, h, sq, skv]`; a padded query's whole row is hidden."""
    if not MASK_TYPES[kind][1]:
        return None
    if kind == "arbitrary":
        return mask
    queries, keys = mask if isinstance(mask, tuple) else (mask, mask)
    return queries.transpose(2, 3) | keys
