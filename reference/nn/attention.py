"""`DotProductAttention`: softmax(q·kᵀ·scale, masked)·v per head.

Arithmetic: `reference.ops.attention`. A mask says True where a pair is hidden, and a query that sees no key gets zeros
(Transformer Engine's conventions). `attention_backend="cudnn"` leaves the arithmetic to cuDNN: faster, and outside the
bit contract. Source: Transformer Engine's `pytorch/attention/dot_product_attention`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reference.compiled import before
from reference.nn.autograd import differentiable
from reference.nn.dropout import Generator
from reference.nn.parameters import DeviceDefault, refuse_not_offered
from reference.nn.precision import Call
from reference.notice import say_once
from reference.ops.library import twin
from reference.recompute import checkpoint

Saved = tuple[torch.Tensor | None, ...]
Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None

# Transformer Engine's names → the op's causal rule, and whether an explicit mask is read.
MASK_TYPES = {
    "no_mask": ("none", False),
    "padding": ("none", True),
    "arbitrary": ("none", True),
    "causal": ("causal", False),
    "causal_bottom_right": ("causal_bottom_right", False),
    "padding_causal": ("causal", True),
    "padding,causal": ("causal", True),
    "causal,padding": ("causal", True),
    "padding_causal_bottom_right": ("causal_bottom_right", True),
}
FORMATS = ("sbhd", "bshd")
BACKENDS = ("exact", "cudnn")
CUDNN_MASK_TYPES = ("no_mask", "causal")


class AttentionCall(Call):
    """One attention: its scale, masks and dropout."""

    def __init__(
        self, dtype: torch.dtype, scale: float, masks: tuple[str, torch.Tensor | None], p: float, state: Any
    ) -> None:
        super().__init__(None, dtype)  # type: ignore[arg-type]
        self.arguments = (scale, *masks, p)
        self.state = state


def forward(
    call: AttentionCall, needs: tuple[bool, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """out `[b, h, sq, d]` of q `[b, h, sq, d]`, k and v `[b, hkv, skv, d]`."""
    state_before = before(call.state)
    out, m, inv = twin.attention(q, k, v, *call.arguments, call.state)
    return out, (q, k, v, out, m, inv, state_before)


def backward(call: AttentionCall, needs: tuple[bool, ...], saved: Saved, grad: torch.Tensor) -> Saved:
    """dq, dk, dv."""
    *tensors, state_before = saved
    if grad.stride(-1) != 1:  # an expanded gradient, as of a plain sum
        grad = grad.contiguous()
    return twin.attention_backward(grad, *tensors, *call.arguments, state_before)


class DotProductAttention(DeviceDefault, torch.nn.Module):
    """softmax(q·kᵀ)·v with Transformer Engine's arguments.

    Args:
        num_attention_heads: heads of the queries.
        kv_channels: size of a head; a multiple of 8, at most 256.
        num_gqa_groups: heads of keys and values, dividing num_attention_heads; None is as many.
        attention_dropout: probability of dropping a weight in training.
        qkv_format: "sbhd" or "bshd".
        attn_mask_type: default of `forward`'s, one of `MASK_TYPES`.
        softmax_scale: None is 1 / sqrt(kv_channels).
        attention_type: "self" or "cross".
        window_size, softmax_type, tp_*, sequence_parallel, ...: only "off" is offered.
        device: where the random state lives; None is the package's own.
        attention_backend: "exact", the bits of `reference.ops.attention` on every device; or "cudnn", PyTorch's SDPA
            on its cuDNN backend, for speed: on CUDA, in bf16 or fp16, without a mask or causal with as many keys as
            queries. Its bits are cuDNN's, and may change with cuDNN's version, the GPU, and from run to run; its
            dropout draws from torch's generator. (Transformer Engine chooses by NVTE_FUSED_ATTN and its kin.)
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
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        device: torch.device | str | None = None,
        attention_backend: str = "exact",
    ) -> None:
        super().__init__()
        refuse_not_offered("DotProductAttention", locals())
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if groups < 1 or num_attention_heads % groups:
            raise ValueError(
                f"DotProductAttention: num_gqa_groups={num_gqa_groups} with num_attention_heads={num_attention_heads}; "
                f"a divisor of it is accepted."
            )
        check_format("DotProductAttention", qkv_format)
        check_mask_type("DotProductAttention", attn_mask_type)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = groups
        self.kv_channels = kv_channels
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.softmax_scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.attention_backend = check_backend("DotProductAttention", attention_backend)
        self.generator = Generator(self.resolve_device(device), get_rng_state_tracker)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Mask = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query_layer: `[s, b, h, d]` ("sbhd") or `[b, s, h, d]` ("bshd"), bf16 or fp16.
            key_layer, value_layer: the same with the keys' length and heads.
            attention_mask: bool, True = hidden; `[b, 1, 1, s]` (for cross-attention a pair of them, queries' and
                keys') with a padding mask type, broadcastable to `[b, h, sq, skv]` with "arbitrary".
            qkv_format, attn_mask_type: None is the constructor's.
            checkpoint_core_attention: recompute in backward.
            core_attention_bias_type, core_attention_bias: only "no_bias" is offered.

        Returns:
            `[s, b, h·d]` or `[b, s, h·d]`.
        """
        refused = {"core_attention_bias_type": core_attention_bias_type, "core_attention_bias": core_attention_bias}
        refuse_not_offered("DotProductAttention.forward", refused)
        layout = check_format("DotProductAttention", qkv_format or self.qkv_format)
        kind = check_mask_type("DotProductAttention", attn_mask_type or self.attn_mask_type)
        heads_first = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(heads_first) for t in (query_layer, key_layer, value_layer))
        mask = full_mask(kind, attention_mask, q.shape[2], k.shape[2])
        run = self._attend
        out = checkpoint(run, q, k, v, kind, mask) if checkpoint_core_attention else run(q, k, v, kind, mask)
        out = out.permute(2, 0, 1, 3) if layout == "sbhd" else out.permute(0, 2, 1, 3)
        return out.reshape(*out.shape[:2], -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str, mask: torch.Tensor | None
    ) -> torch.Tensor:
        call = self.attention_call(q, q.dtype, kind, mask)
        if isinstance(call, CudnnCall):
            return cudnn_attention(q, k, v, call)
        return differentiable(forward, backward, call, q, k, v)

    def attention_call(
        self, inp: torch.Tensor, dtype: torch.dtype, kind: str, mask: torch.Tensor | None
    ) -> "AttentionCall | CudnnCall":
        """How this forward of an input attends in `dtype`; its dropout's random state is taken here."""
        p = self.attention_dropout if self.training else 0.0
        if self.attention_backend == "cudnn":
            return CudnnCall(dtype, self.softmax_scale, kind, p)
        state = None
        if p > 0:
            self.generator.draw(inp.device)
            state = self.generator.take()
        return AttentionCall(dtype, self.softmax_scale, (MASK_TYPES[kind][0], mask), p, state)


def check_cudnn(q: torch.Tensor, k: torch.Tensor, kind: str) -> None:
    """Refuse what cuDNN is not offered for."""
    name = "DotProductAttention: attention_backend='cudnn'"
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"{name} with {q.dtype}; bfloat16 and float16 are accepted.")
    if kind not in CUDNN_MASK_TYPES:
        raise ValueError(f"{name} with attn_mask_type={kind!r}; one of {CUDNN_MASK_TYPES} is accepted.")
    if kind == "causal" and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{name} with {q.shape[2]} queries and {k.shape[2]} keys under a causal mask; as many keys are accepted."
        )
    if not q.is_cuda:
        raise RuntimeError(f"{name} on {q.device}; 'cuda' is accepted, or attention_backend='exact'.")


class CudnnCall(Call):
    """One attention of cuDNN's."""

    def __init__(self, dtype: torch.dtype, scale: float, kind: str, p: float) -> None:
        super().__init__(None, dtype)  # type: ignore[arg-type]
        self.kind, self.p, self.scale = kind, p, scale


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CudnnCall) -> torch.Tensor:
    """`forward`'s out by cuDNN, differentiable, outside the bit contract."""
    check_cudnn(q, k, call.kind)
    shared: dict[str, Any] = {"dropout_p": call.p, "is_causal": call.kind == "causal", "scale": call.scale}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, **shared, enable_gqa=q.shape[1] != k.shape[1])


def cudnn_forward(
    call: CudnnCall, needs: tuple[bool, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """The same without autograd, for as many heads of keys as of queries: what SDPA calls on its cuDNN backend."""
    check_cudnn(q, k, call.kind)
    out, sums, *lengths, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, any(needs), call.p, call.kind == "causal", False, scale=call.scale
    )
    drawn = (seed, offset) if call.p > 0 else (None, None)
    return out, (q, k, v, out, sums, *drawn, *lengths)


def cudnn_backward(call: CudnnCall, needs: tuple[bool, ...], saved: Saved, grad: torch.Tensor) -> Saved:
    """dq, dk, dv."""
    q, k, *_ = saved
    assert q is not None
    assert k is not None
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, *saved[:7], None, *saved[7:], q.shape[2], k.shape[2], call.p, call.kind == "causal", scale=call.scale
    )


def check_backend(layer: str, attention_backend: str) -> str:
    """`attention_backend`, if it is offered; says once what "cudnn" gives up."""
    if attention_backend not in BACKENDS:
        raise ValueError(f"{layer}: attention_backend={attention_backend!r}; one of {BACKENDS} is accepted.")
    if attention_backend == "cudnn":
        say_once("cudnn", "attention_backend='cudnn': attention is cuDNN's and outside the bit contract")
    return attention_backend


def check_format(layer: str, qkv_format: str) -> str:
    """`qkv_format`, if it is offered."""
    if qkv_format not in FORMATS:
        raise ValueError(f"{layer}: qkv_format={qkv_format!r}; one of {FORMATS} is accepted.")
    return qkv_format


def check_mask_type(layer: str, attn_mask_type: str) -> str:
    """`attn_mask_type`, if it is offered."""
    if attn_mask_type not in MASK_TYPES:
        raise ValueError(f"{layer}: attn_mask_type={attn_mask_type!r}; one of {tuple(MASK_TYPES)} is accepted.")
    return attn_mask_type


def full_mask(kind: str, mask: Mask, sq: int, skv: int) -> torch.Tensor | None:
    """The mask over pairs, broadcastable to `[b, h, sq, skv]`: a padded query hides its whole row."""
    if not MASK_TYPES[kind][1]:
        return None
    if mask is None:
        raise ValueError(f"DotProductAttention: attn_mask_type={kind!r} needs attention_mask; got None.")
    if kind == "arbitrary":
        if isinstance(mask, tuple):
            raise TypeError("DotProductAttention: attention_mask is a tuple; one tensor goes with 'arbitrary'.")
        return mask
    queries, keys = mask if isinstance(mask, tuple) else (mask, mask)
    for name, part, length in (("queries", queries, sq), ("keys", keys, skv)):
        if part.dtype != torch.bool or part.dim() != 4 or part.shape[1:] != (1, 1, length):
            raise ValueError(
                f"DotProductAttention: attention_mask of the {name} is {part.dtype} {list(part.shape)}; "
                f"bool [batch, 1, 1, {length}] is accepted with {kind!r}."
            )
    return queries.transpose(2, 3) | keys
