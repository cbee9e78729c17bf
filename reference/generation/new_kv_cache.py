"""The cache that a `Generator` needs: of the kind of heads that all of a model's attention has."""

import torch

from reference.arguments import MASK_TYPES
from reference.nn.attentions.dot_product_attention import DotProductAttention
from reference.nn.attentions.kv_cache import InferenceParams


def attention_of(model: torch.nn.Module) -> list[DotProductAttention]:
    """A model's attention, after a check that a `Generator` can run it."""
    cores = [module for module in model.modules() if isinstance(module, DotProductAttention)]
    kinds = {_kind(one) for one in cores}
    if len(kinds) != 1 or any(MASK_TYPES[c.attn_mask_type][0] == "none" for c in cores):
        raise ValueError(
            f"Generator: model has {len(cores)} layers of attention, of {len(kinds)} kinds (key heads, channels of "
            f"keys and of values) and the mask types {sorted({c.attn_mask_type for c in cores})}; one kind and "
            f"causal types are accepted (Hugging Face's models get them by te.convert(model, blocks=True))."
        )
    return cores


def _kind(core: DotProductAttention) -> tuple[int, int, int]:
    """Key heads, channels of keys and of values."""
    return core.num_gqa_groups, core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v


def cache_for(
    parameter: torch.Tensor,
    cores: list[DotProductAttention],
    max_batch_size: int,
    max_sequence_length: int,
    page_size: int,
    total_num_pages: int | None,
    dtype: torch.dtype | None,
    fp8_kv: bool | None,
) -> InferenceParams:
    """A cache in pages; arguments as `Generator` has them, and one of the model's parameters."""
    heads, k, v = _kind(cores[0])
    wide = dtype or (torch.bfloat16 if parameter.dtype == torch.float32 else parameter.dtype)
    return InferenceParams(
        max_batch_size,
        max_sequence_length,
        heads,
        k,
        wide,
        v,
        is_paged=True,
        total_num_pages=total_num_pages or max_batch_size * -(-max_sequence_length // page_size),
        page_size=page_size,
        qkv_format="thd",
        device=parameter.device,
        fp8_kv=any(core.fp8_kv for core in cores) if fp8_kv is None else fp8_kv,
    )
