"""`twin::attention_paged_codes`: attention of packed queries with keys and values that lie in pages as FP8 codes.

    k, v          [pages, page_size, hkv, d] of E4M3        k_scales, v_scales  fp32 [pages, page_size, hkv]
    number        = round_bf16(fp32(code) · scale)          as `twin::dequantize`

These numbers in place of the codes, it is `twin::attention_paged`, word for word. Where scales are powers of two that
`twin::cast_rowwise` writes, the numbers are exact. Codes and scales of rows that no key of a sequence lies in change
nothing, even where they are NaN.

On a GPU few queries read codes where they lie, in pages of a multiple of 128 keys. Otherwise the pages of the batch are
dequantized first.
"""

from typing import Any

import torch

from reference.ops.attentions import attention_paged as paged
from reference.ops.casts import dequantize  # noqa: F401  (declares the op)
from reference.ops.library import define, twin

OP = "twin::attention_paged_codes"
CODES = torch.float8_e4m3fn


def outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    page_table: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if q.dtype != torch.bfloat16:
        raise ValueError(f"{OP}: q must be torch.bfloat16, which holds what codes stand for exactly; got {q.dtype}.")
    for name, x, scales in (("k", k, k_scales), ("v", v, v_scales)):
        if x.dtype != CODES or x.dim() != 4 or x.shape[3] % 16:
            raise ValueError(
                f"{OP}: {name} must be {CODES} [pages, page_size, key heads, head_dim], head_dim a multiple of 16; got "
                f"{x.dtype} {list(x.shape)}."
            )
        fits = scales.dtype == torch.float32 and scales.shape == x.shape[:3] and scales.is_contiguous()
        if not fits or scales.device != x.device:
            raise ValueError(
                f"{OP}: {name}_scales must be contiguous torch.float32 {list(x.shape[:3])} on {x.device}; got "
                f"{scales.dtype} {list(scales.shape)} on {scales.device}."
            )
        if not x.is_contiguous():
            raise ValueError(f"{OP}: {name} must be contiguous; got strides {x.stride()}.")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{OP}: k and v must have the same pages and page_size; got {list(k.shape[:2])} and {list(v.shape[:2])}."
        )
    keys, values = (q.new_empty((min(1, len(x)), *x.shape[1:])) for x in (k, v))
    return paged.outputs(q, keys, values, page_table, *rest, op=OP)


def numbers_of(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The bf16 numbers `[.., h, d]` that codes `[.., h, d]` with scale_inv `[.., h]` stand for."""
    rows = codes.view(-1, codes.shape[-1]), scale_inv.view(-1)
    return twin.dequantize(*rows, False, torch.bfloat16).view(codes.shape)  # type: ignore[no-any-return]


def pages_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    page_table: torch.Tensor,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages that sequences of up to `longest` keys have, dequantized, and the page table of these.

    Arguments of the op -> keys bf16 `[b · m, page_size, hkv, d]`, values the same with e, and int32 `[b, m]`,
    m = ceil(longest / page_size). Where nobody has a key, a page of zeros.
    """
    columns = -(-longest // k.shape[1])
    used = page_table[:, :columns].reshape(-1).long().clamp(0, len(k) - 1)
    table = torch.arange(used.numel(), dtype=torch.int32, device=used.device).view(len(page_table), columns)
    if not used.numel():
        return q.new_zeros((1, *k.shape[1:])), q.new_zeros((1, *v.shape[1:])), table

    def numbers(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
        taken = codes.view(torch.uint8).index_select(0, used).view(CODES)
        return numbers_of(taken, scale_inv.index_select(0, used))

    return numbers(k, k_scales), numbers(v, v_scales), table


@define(outputs)
def attention_paged_codes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    page_table: torch.Tensor,
    scale: float,
    mask_type: str,
    left: int,
    right: int,
    q_lengths: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor,
    longest_q: int,
    longest_kv: int,
    sinks: torch.Tensor | None = None,
    key_segment: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out bf16 `[t, h, e]`, m fp32 `[b, h, longest_q]`, inv fp32 the same).

    Args:
        q: `[t, h, d]` bf16.
        k, v: E4M3, contiguous `[pages, page_size, hkv, d]` and `[pages, page_size, hkv, e]`; d and e multiples of 16.
        k_scales, v_scales: fp32, contiguous `[pages, page_size, hkv]`.
        page_table and what follows: as in `twin::attention_paged`.

    Raises:
        IndexError: a key lies in a page that there is not.
    """
    rest = (scale, mask_type, left, right, q_lengths, kv_lengths, q_starts, longest_q, longest_kv, sinks, key_segment)
    outputs(q, k, v, k_scales, v_scales, page_table, *rest)
    paged.check_pages(OP, page_table, kv_lengths, k.shape[1], k.shape[0])
    keys, values, table = pages_of(q, k, v, k_scales, v_scales, page_table, longest_kv)
    return paged.attention_paged(q, keys, values, table, *rest)
