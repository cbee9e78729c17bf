"""`twin::attention_paged` on the GPU: kernels/attentions/attention.cu, for wide heads attention_wide.cu, with PAGED.

Semantics: `reference.ops.attentions.attention_paged`.
"""

import itertools
from typing import Any

import torch

from optimized.ops.attentions.attention import CAPACITIES, FORMATS, SEGMENTS, Entries, Pages, attend, kernels
from reference.ops.attentions.attention_paged import gathered, of_gathered, options_of, outputs, reads_in_place
from reference.ops.library import on_cuda

_PAGED = Entries(True, True, True)
CONFIGURATIONS = [
    kernels(dtype, d, False, False, sunk, _PAGED, 1, segment)[0].configuration
    for segment, dtype, d, sunk in itertools.product(SEGMENTS, FORMATS, CAPACITIES, (False, True))
]


@on_cuda
def attention_paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out `[t, h, e]`, m fp32 `[b, h, longest_q]`, inv fp32 the same)."""
    results, options, size = outputs(q, k, v, page_table, *rest), options_of(*rest), k.shape[1]
    if reads_in_place(size):
        rows = (k.flatten(0, 1), v.flatten(0, 1))
        attend("twin::attention_paged", q, *rows, results, options, Pages(page_table, size))
    else:
        longest = options.longest_kv or 0
        rows = (gathered(k, page_table, longest), gathered(v, page_table, longest))
        attend("twin::attention_paged", q, *rows, results, of_gathered(options))
    return results
