"""What `InferenceParams` refuses: steps that it has no room for, and forwards that its caches do not fit."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from reference.arguments import is_int


def new_tokens(params: Any, step_dict: Mapping[Hashable, int]) -> list[int]:
    """The numbers of new tokens of each sequence, after everything that `pre_step` refuses."""
    name = "InferenceParams.pre_step"
    if not isinstance(step_dict, Mapping) or not step_dict or not all(map(is_int, step_dict.values())):
        raise TypeError(f"{name}: step_dict={step_dict!r}; a dict from sequences to their new tokens is accepted.")
    steps = [int(n) for n in step_dict.values()]
    if len(steps) > params.max_batch_size:
        raise ValueError(
            f"{name}: step_dict has {len(steps)} sequences; max_batch_size={params.max_batch_size} are accepted."
        )
    lengths = params.sequences if params.pages is None else params.pages.lengths
    for one, n in zip(step_dict, steps, strict=True):
        start = lengths.get(one, 0)
        if n < 1 or start + n > params.max_sequence_length:
            raise ValueError(
                f"{name}: sequence {one!r} has {start} tokens and gets {n}; 1 or more are accepted, and "
                f"max_sequence_length={params.max_sequence_length} of them together."
            )
    missing = sorted(params.cache.keys() - params._ran)
    if params._steps and missing and not params._captured:
        raise RuntimeError(
            f"{name}: the layers {missing} have not run since the last pre_step, so their caches lack its tokens; "
            f"a forward of them is accepted, or reset()."
        )
    if params.pages is not None:
        needed = params.pages.needed(dict(zip(step_dict, steps, strict=True)), params.sequences.keys() - step_dict)
        if needed > len(params.pages.free):
            raise ValueError(
                f"{name}: {needed} pages are needed beside those in use, and {len(params.pages.free)} are free; "
                f"fewer sequences or tokens are accepted, or a larger total_num_pages."
            )
    return steps


def check_begun(params: Any, layer: str, number: int) -> None:
    """Refuse a layer without a cache once the sequences have tokens."""
    if number not in params.cache and any(params._starts):
        raise ValueError(
            f"{layer}: layer_number={number} has no cache, and the sequences have tokens that belong into it; "
            f"one of {sorted(params.cache)} is accepted, or reset()."
        )


def check_forward(
    params: Any,
    layer: str,
    core: Any,
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int],
    mask: Any,
    mask_type: str,
    alone: bool = False,
) -> None:
    """Refuse a forward of `layer` that the cache does not fit, before anything changes.

    Args:
        core: the layer's `DotProductAttention`.
        dtype, device: of its activations.
        sizes: the batch, and the length of the new tokens.
        mask, mask_type: `attention_mask` and the mask type.
        alone: whether `core` is called by itself, and so nobody else allocates its cache.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{layer}: inference_params under torch.compile is not offered; eager mode is.")
    if core.attention_type == "cross" or core.attention_backend == "cudnn" or mask_type == "arbitrary":
        raise NotImplementedError(
            f"{layer}: inference_params with attention_type={core.attention_type!r}, attention_backend="
            f"{core.attention_backend!r} and the mask type {mask_type!r} is not offered; 'self', 'exact' and any "
            f"type but 'arbitrary' are accepted."
        )
    if mask is not None:
        raise ValueError(f"{layer}: attention_mask with inference_params; None is accepted (pre_step gives lengths).")
    ours = (params.num_heads_kv, params.head_dim_k, params.head_dim_v)
    heads = (core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v)
    groups = core.num_gqa_groups_per_partition
    if ours != (groups, *heads):
        raise ValueError(
            f"{layer}: num_gqa_groups={groups} and heads of {heads[0]} (keys) and {heads[1]} (values) "
            f"channels, and inference_params has num_heads_kv, head_dim_k and head_dim_v {ours}; equal ones are "
            f"accepted."
        )
    if dtype != params.dtype or device != params.device:
        raise TypeError(
            f"{layer}: the activations are {dtype} on {device} and the cache is {params.dtype} on {params.device}; "
            f"one dtype and one device are accepted."
        )
    wanted = (1, sum(params._steps)) if params.packed else (params.batch_size, max(params._steps, default=0))
    wanted = wanted if params._held is None else (1, params._held.rows)
    if sizes != wanted:
        raise ValueError(
            f"{layer}: a batch of {sizes[0]} with {sizes[1]} new tokens; {wanted[0]} with {wanted[1]}, as pre_step "
            f"said, is accepted."
        )
    number = core.layer_number
    owner = params._owners.get(number, lambda: None)()
    if owner is not None and owner is not core:
        raise ValueError(
            f"{layer}: layer_number={number} is another layer's; a layer_number of its own for each is accepted."
        )
    if alone and number not in params.cache:
        raise ValueError(
            f"{layer}: layer_number={number} has no cache; one of {sorted(params.cache)} is accepted, or "
            f"allocate_memory({number}) before."
        )
    check_begun(params, layer, number)
