"""`twin::attention_paged_codes` on the GPU: kernels/attentions/attention_decode.cu reads codes of few queries' keys;
for others the pages are dequantized, and `twin::attention_paged` attends.

Semantics: `reference.ops.attentions.attention_paged_codes`.
"""

from typing import Any

import torch

from optimized.ops.attentions import attention_decode
from optimized.ops.attentions.attention import check_grid, loadable
from optimized.ops.attentions.attention_paged import attention_paged
from reference.ops.attentions.attention_options import KEY_SEGMENTS
from reference.ops.attentions.attention_packed import by_heads
from reference.ops.attentions.attention_paged import options_of, reads_in_place
from reference.ops.attentions.attention_paged_codes import outputs, pages_of
from reference.ops.library import on_cuda

CONFIGURATIONS = [
    attention_decode.kernels(torch.bfloat16, rows, True, segment)[0].configuration
    for segment in (0, *KEY_SEGMENTS)
    for rows in attention_decode.ROWS
]


@on_cuda
def attention_paged_codes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    page_table: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out bf16 `[t, h, e]`, m fp32 `[b, h, longest_q]`, inv fp32 the same)."""
    results, options = outputs(q, k, v, k_scales, v_scales, page_table, *rest), options_of(*rest)
    out, m, inv = by_heads(results[0]), *results[1:]
    queries, keys, values = by_heads(q), by_heads(k.flatten(0, 1)), by_heads(v.flatten(0, 1))
    aligned = not k.data_ptr() % 16 and not v.data_ptr() % 16
    fits = out.numel() and m.numel() and options.longest_kv and aligned and reads_in_place(k.shape[1])
    if fits and attention_decode.can(queries, keys, options):
        check_grid("twin::attention_paged_codes", queries, m.shape[0])
        where = ((out, m, inv), options, (page_table, k.shape[1]), (k_scales, v_scales))
        attention_decode.decode(loadable(queries), keys, values, *where)
        return results
    return attention_paged(q, *pages_of(q, k, v, k_scales, v_scales, page_table, options.longest_kv or 0), *rest)
