"""What `torch.utils.flop_counter.FlopCounterMode` counts for the ops: the formulas of PyTorch's own equivalents.

    gemm*, a [M, K], b [N, K]            2 · M · N · K        gemm_nvfp4*, two codes a byte: b is [N, K / 2]
    attention                            4 · b · h · sq · skv · d            as for scaled_dot_product_attention: hidden
    attention_fp8                        the same
    attention_backward                   10 · b · h · sq · skv · d           pairs count, and the scores count again

`attention_fp8_backward` counts as `attention_backward`. So a model has the count of the same model made of PyTorch's
layers, in 16 bits and in FP8. In FP8 the weight gradient's K is the number of tokens rounded up to a multiple of 16, as
the tensor cores compute it.
"""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from reference.ops.attentions import attention_amax, attention_fp8, attention_fp8_backward  # noqa: F401  (declares the ops)
from reference.ops.attentions.attention_fp8 import of_call
from reference.ops.attentions.attention_options import Options
from reference.ops.gemms import gemm_activation_scale, gemm_block_formats, gemm_fp8_rowwise, gemm_fused, gemm_part  # noqa: F401  (declares the ops)

Shape = tuple[int, ...]
_GEMMS = (
    *("gemm", "gemm_accumulate", "gemm_fp8", "gemm_fp8_accumulate"),
    *("gemm_fp8_activation", "gemm_fp8_activation_backward", "gemm_fp8_bias_dropout_add"),
    "gemm_fp8_activation_scale",
    *("gemm_fp8_blocks", "gemm_fp8_blocks_accumulate", "gemm_fp8_blocks_bias_dropout_add"),
    *("gemm_fp8_rowwise", "gemm_fp8_rowwise_accumulate"),
    *("gemm_mxfp8", "gemm_mxfp8_accumulate"),
    *("gemm_part", "gemm_fp8_part", "gemm_fp8_blocks_part", "gemm_fp8_end"),
)


def gemm_flops(a: Shape, b: Shape, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """a·bᵀ."""
    return 2 * a[0] * a[1] * b[0]


def gemm_nvfp4_flops(a: Shape, b: Shape, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """a·bᵀ of codes of which two are a byte."""
    return 2 * gemm_flops(a, b)


def _padded(options: Any, q: Shape, k: Shape, v: Shape) -> tuple[Shape, Shape, Shape]:
    """The sizes as if each head of q had its own keys; of packed sequences as if all had the longest ones' length."""
    if len(q) == 3:
        found = Options(*options)
        batch = found.q_starts[0] - 1  # type: ignore[index]
        q = (batch, q[1], found.longest_q, q[2])  # type: ignore[assignment]
        k, v = ((batch, x[1], found.longest_kv, x[2]) for x in (k, v))  # type: ignore[assignment]
    return q, (k[0], q[1], *k[2:]), (v[0], q[1], *v[2:])


def attention_flops(q: Shape, k: Shape, v: Shape, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Two products for each head of q."""
    q, k, v = _padded(rest, q, k, v)
    return int(sdpa_flop_count(q, k, v))


def attention_fp8_flops(q: Shape, k: Shape, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """As `attention_flops`; v comes transposed, with k's sizes."""
    options, _ = of_call(rest[4:])
    return attention_flops(q, k, k, *options)


def attention_backward_flops(grad: Shape, q: Shape, k: Shape, v: Shape, *rest: Any, **more: Any) -> int:
    """Five products for each head of q, one of which recomputes the scores."""
    q, k, v = _padded(rest[3:], q, k, v)
    return int(sdpa_backward_flop_count((*q[:3], v[3]), q, k, v))


def attention_fp8_backward_flops(grad: Shape, q: Shape, k: Shape, v: Shape, *rest: Any, **more: Any) -> int:
    """As `attention_backward_flops`, whose arguments it has but for three scale_invs."""
    return attention_backward_flops(grad, q, k, v, *rest[3:6], *Options.of_fp8(*rest[6:]))


register_flop_formula([getattr(torch.ops.twin, name) for name in _GEMMS])(gemm_flops)
register_flop_formula([torch.ops.twin.gemm_nvfp4, torch.ops.twin.gemm_nvfp4_accumulate])(gemm_nvfp4_flops)
register_flop_formula([torch.ops.twin.attention, torch.ops.twin.attention_amax])(attention_flops)
register_flop_formula(torch.ops.twin.attention_fp8)(attention_fp8_flops)
_BACKWARDS = ("attention_backward", "attention_backward_amax")
register_flop_formula([getattr(torch.ops.twin, name) for name in _BACKWARDS])(attention_backward_flops)
register_flop_formula(torch.ops.twin.attention_fp8_backward)(attention_fp8_backward_flops)
