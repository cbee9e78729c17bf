"""Attention outside the bit contract: PyTorch's own, for fp32, and cuDNN's through PyTorch."""

from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reference.arguments import MASK_TYPES
from reference.memory.recompute import checkpoint
from reference.nn.attentions.attention_bias import alibi
from reference.nn.attentions.dot_product_plan import Call
from reference.nn.attentions.exact_attention import Equation, Qkv
from reference.nn.attentions.inference_step import Cached, entered
from reference.nn.attentions.packing import moved
from reference.ops.attentions.attention import NO_LIMIT, limits
from reference.support.nested import Tensors
from reference.support.notice import say_once


def _say_fp32() -> None:
    say_once("fp32 attention", "attention in fp32 is PyTorch's own and outside the bit contract")


_say_fp32._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a compiler runs it while tracing


def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    equation: Equation,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch's attention, for fp32: differentiable, outside the bit contract; dropout from torch's generator."""
    _say_fp32()
    sq, skv = q.shape[2], k.shape[2]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    lower, upper = limits(MASK_TYPES[equation.mask_type][0], *equation.window, sq, skv)
    if slopes is not None:
        bias = alibi(slopes, MASK_TYPES[equation.mask_type][0], sq, skv)
    if mask is bias is None and lower == -NO_LIMIT and upper in (0, NO_LIMIT):
        return scaled_dot_product_attention(q, k, v, dropout_p=equation.p, is_causal=upper == 0, scale=equation.scale)
    if (lower, upper) != (-NO_LIMIT, NO_LIMIT):
        every = torch.ones(sq, skv, dtype=torch.bool, device=q.device)
        unseen = every.triu(upper + 1) | every.tril(lower - 1)
        mask = unseen if mask is None else mask | unseen
    if mask is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=equation.p, scale=equation.scale)
    mask = mask.expand(*mask.shape[:-1], skv)  # CUDA's kernels broadcast a mask over every dimension but the last
    blind = mask.all(-1, keepdim=True)  # such a row would be NaN: it sees everything and is cleared afterwards
    seen: torch.Tensor = blind | ~mask
    if bias is not None:
        seen = bias.masked_fill(~seen, -torch.inf)
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=equation.p, scale=equation.scale)
    return out.masked_fill(blind, 0.0)


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, equation: Equation) -> torch.Tensor:
    """cuDNN's attention, differentiable, outside the bit contract."""
    shared: dict[str, Any] = {
        "dropout_p": equation.p,
        "is_causal": equation.mask_type == "causal",
        "scale": equation.scale,
    }
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, **shared, enable_gqa=q.shape[1] != k.shape[1])


class Attended(NamedTuple):
    """What `cudnn_attend_backward` reads: results of cuDNN's forward, its random state, its sequences' lengths."""

    out: torch.Tensor
    sums: torch.Tensor
    seed: torch.Tensor | None
    offset: torch.Tensor | None
    lengths: tuple[torch.Tensor | None, ...]


def cudnn_attend(
    equation: Equation, trains: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Attended]:
    """What SDPA calls on its cuDNN backend, without autograd; for as many heads of keys as of queries."""
    out, sums, *lengths, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, trains, equation.p, equation.mask_type == "causal", False, scale=equation.scale
    )
    if equation.p == 0:
        seed = offset = None
    return out, Attended(out, sums, seed, offset, tuple(lengths))


def cudnn_attend_backward(equation: Equation, qkv: Qkv, attended: Attended, grad: torch.Tensor) -> Tensors:
    """dq, dk, dv."""
    q, k, _ = qkv
    *results, of_sequences = attended
    lengths, causal = (q.shape[2], k.shape[2]), equation.mask_type == "causal"
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, *qkv, *results, None, *of_sequences, *lengths, equation.p, causal, scale=equation.scale
    )


def attend_by_torch(
    call: Call, cached: Cached | None, layout: str, recomputes: bool, *given: torch.Tensor
) -> torch.Tensor:
    """PyTorch's own attention, in fp32 or on cuDNN: under its autograd, outside the bit contract."""
    equation, reads = call.equation, call.reads
    packed = layout == "thd"
    if packed:
        of_q, of_kv = reads.maps()
        given = tuple([moved(t, one, True) for t, one in zip(given, (of_q, of_kv, of_kv), strict=True)])
    q, k, v = (t.permute((1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)) for t in given)
    run: Any = cudnn_attention
    arguments: Any = (q, k, v, equation)
    if cached is not None:
        equation, hidden, qkv = entered(cached, reads.step(), equation, q, k, v)
        arguments = (*qkv, equation, hidden)
    elif q.dtype == torch.float32:
        arguments = (*arguments, reads.mask, call.added, reads.slopes)
    if q.dtype == torch.float32:
        run = torch_attention
    out = checkpoint(run, *arguments) if recomputes else run(*arguments)
    out = out.reshape(*q.shape[:3], v.shape[3])
    out = out.permute(2, 0, 1, 3) if layout == "sbhd" else out.permute(0, 2, 1, 3)
    out = moved(out, of_q, False) if packed else out
    found: torch.Tensor = out.flatten(-2)
    return found
