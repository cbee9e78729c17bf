"""What a `MultiheadAttention` refuses: settings that ranks cannot share, and a forward that a part would refuse."""

from typing import Any

import torch

from reference.arguments import MASK_TYPES
from reference.nn.attentions.attention_extras import NO_EXTRAS, Extras
from reference.nn.attentions.attention_lengths import sizes_of
from reference.nn.attentions.dot_product_attention import DotProductAttention
from reference.nn.core import checks
from reference.parallel.ordered_reduce import ranks_of


def check_context(module: Any, here: str) -> None:
    """Refuse what ranks that share tokens are not offered for."""
    if module.qkv_format != "sbhd":
        raise NotImplementedError(
            f"MultiheadAttention: qkv_format={module.qkv_format!r} with {here} is not offered; 'sbhd' is accepted."
        )


def check_shared_heads(module: Any) -> None:
    """Refuse heads that ranks cannot share with the words of one process."""
    module.divided("num_attention_heads", module.num_attention_heads, "")
    module.divided("num_gqa_groups", module.num_gqa_groups, "")
    given = {"set_parallel_mode": module.set_parallel_mode, **module.settings_of_heads}
    others: list[tuple[str, tuple[Any, ...], str]] = [
        ("set_parallel_mode", (True,), "True is"),
        ("qk_norm_type", (None, "L2Normalization"), "None and 'L2Normalization' are"),
    ]
    if given["fuse_qkv_params"]:
        others.append(("qkv_weight_interleaved", (True,), "True is"))
    for name, accepted, words in others:
        if given[name] not in accepted:
            raise NotImplementedError(
                f"MultiheadAttention: {name}={given[name]!r} with tp_size={module.tp_size} is not offered; {words} "
                f"accepted."
            )


def check_forward(
    module: Any,
    layer: str,
    hidden_states: Any,
    encoder_output: Any,
    mask: Any,
    mask_type: Any,
    window: Any,
    angles: Any = None,
    names: checks.Names = checks.MASK_NAMES,
    extras: Extras = NO_EXTRAS,
) -> None:
    """Refuse what the module or a part of it would refuse, before anything changes; `layer` names the caller."""
    modules, layout, inference = module._modules, module.qkv_format, extras.inference
    core, first = modules["core_attention"], modules[module._first_name]
    checks.check_input(first, hidden_states, module.hidden_size, "hidden_states", layer, layout == "thd")
    if (encoder_output is None) != (module.attention_type == "self"):
        wanted = "no encoder_output" if module.attention_type == "self" else "an encoder_output"
        raise ValueError(f"{layer}: attention_type={module.attention_type!r} takes {wanted}.")
    ours, plain = isinstance(core, DotProductAttention), True
    if ours:
        checks.check_mask_type(layer, names[1], mask_type)
        window = checks.window_of(layer, names, mask_type, core.window_size if window is None else window)
        plain = not MASK_TYPES[mask_type][1] and core.attention_backend != "cudnn" and core.softmax_type == "vanilla"
    if module.cp_name is not None:
        first.check_whole_chunks("hidden_states", hidden_states, layer, ranks=first.ranks_of_rows)
    alone, batch = module.tp_size == 1 and module.cp_name is None, module._batch
    shape = hidden_states.shape if alone else _of_all_ranks(module, hidden_states)
    dtype, device = checks.activation_dtype(hidden_states), hidden_states.device
    heads = module.num_attention_heads // module.tp_size
    if ours:
        core.refuse_in_fp8(layer, dtype, extras.bias.given, inference is not None)
    if inference is not None:
        extras.check_cache(layer, layout)
        if not ours:
            accepted = "a DotProductAttention is accepted"
            raise TypeError(f"{layer}: inference_params with core_attention={core!r}; {accepted}.")
        new = (1, shape[0]) if layout == "thd" else (shape[batch], shape[1 - batch])
        inference.check(layer, core, dtype, device, new, mask, mask_type)
    elif (
        encoder_output is angles is None
        and extras is NO_EXTRAS
        and plain
        and (not hidden_states.is_cuda or shape[batch] * heads <= checks.MAX_ATTENTIONS)
    ):
        return
    packed, source = layout == "thd" and inference is None, shape
    if encoder_output is not None:
        of_batch = None if packed else batch
        checks.check_encoder_output(layer, encoder_output, hidden_states, modules["key_value"], of_batch)
        source = _of_all_ranks(module, encoder_output)
    sizes = sizes_of(layout, extras.lengths, heads, shape, source)
    if inference is not None:
        longest = max(inference.sequences.values())
        sizes = (sizes[0], heads, longest, longest)
    if angles is not None:
        checks.check_angles(layer, angles, sizes[2:], module.channels, device)
    if ours:
        tokens = (shape[0], source[0]) if packed else None
        extras.check(layer, names, core, mask_type, window, mask, sizes, tokens, dtype, device)


def _of_all_ranks(module: Any, x: torch.Tensor) -> torch.Size:
    """The shape of a tensor `[sequence, ...]` of whose tokens each rank may have a part."""
    ranks = module.ranks_of_rows
    if module.cp_name is not None:
        ranks *= ranks_of(module.cp_name)[1]
    return x.shape if ranks == 1 else torch.Size((x.shape[0] * ranks, *x.shape[1:]))
