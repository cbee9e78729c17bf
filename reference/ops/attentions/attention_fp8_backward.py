"""`twin::attention_fp8_backward`: the gradients of q, k and v, in 16 bits.

    q', k', v' = T(fp32(code) · scale_inv)         T is the dtype of grad
    dq, dk, dv = `twin::attention_backward` of grad, q', k', v' and the forward's out, m and inv

It reads the codes, as numbers of T, and not the q, k and v of before the cast. So its scores are those of the forward,
but for that rounding, and by the forward's m and 1 / l a row's weights add up to 1 but for that and for the cast of P,
which l sums. By scores of the numbers before the cast they would add up to anything: a number beyond its delayed scale
saturates, its score before the cast may lie far above m, and the weight 2^(score - m) has no bound. Codes take half the
memory, too. The gradient passes the cast unchanged. (Transformer Engine's backward in 16 bits reads the numbers before
the cast.)
"""

from typing import Any

import torch

from reference.ops.attentions import attention_backward as in_16_bits
from reference.ops.attentions.attention_fp8 import check_codes, check_options
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import sizes
from reference.ops.library import define


def dequantized(codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """round_dtype(fp32(code) · scale_inv), with the strides of `codes`."""
    return torch.empty_like(codes, dtype=dtype).copy_(codes.float() * scale_inv)


def outputs(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale_inv: torch.Tensor,
    k_scale_inv: torch.Tensor,
    v_scale_inv: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    op, found = "twin::attention_fp8_backward", Options.of_fp8(*options)
    check_codes(op, "v", q, k, v, found, q_scale_inv, k_scale_inv, v_scale_inv)
    check_options(op, q, k, found)
    if grad.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: grad is {grad.dtype}; torch.bfloat16 and torch.float16 are accepted.")
    b, h, _, sq, _ = sizes(q, k, found)
    in_16_bits.check_results(op, q, v, grad.dtype, grad, out, m, inv, (b, h, sq))
    return tuple([torch.empty_like(x, dtype=grad.dtype) for x in (q, k, v)])  # type: ignore[return-value]


@define(outputs)
def attention_fp8_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale_inv: torch.Tensor,
    k_scale_inv: torch.Tensor,
    v_scale_inv: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    scale: float,
    mask_type: str,
    left: int,
    right: int,
    mask: torch.Tensor | None,
    dropout: float,
    rng_state: torch.Tensor | None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    longest_q: int | None = None,
    longest_kv: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (dq `[b, h, sq, d]`, dk and dv `[b, hkv, skv, d]`), of grad's dtype.

    Args:
        grad: the gradient of out, bf16 or fp16 `[b, h, sq, d]`.
        q, k, v: the codes; v is not transposed here, `[b, hkv, skv, d]`.
        out, m, inv: the forward's results.
        rng_state: the state from before the forward; it is not advanced.
        the others: those of the forward. With starts all tensors of `[b, h, s, d]` are packed, `[tokens, heads, d]`.
    """
    first = (scale, mask_type, left, right, mask, dropout, rng_state)
    options = (*first, q_lengths, kv_lengths, q_starts, kv_starts, longest_q, longest_kv)
    outputs(grad, q, k, v, q_scale_inv, k_scale_inv, v_scale_inv, out, m, inv, *options)
    pairs = ((q, q_scale_inv), (k, k_scale_inv), (v, v_scale_inv))
    q, k, v = (dequantized(codes, scale_inv, grad.dtype) for codes, scale_inv in pairs)
    return in_16_bits.attention_backward(grad, q, k, v, out, m, inv, *Options.of_fp8(*options))
