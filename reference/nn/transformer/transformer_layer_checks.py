"""What a `TransformerLayer` refuses: arguments of its constructor, and those of a forward that a part would refuse."""

from collections.abc import Mapping
from typing import Any

import torch

from reference.arguments import check_arguments, check_unread
from reference.memory.recompute import Run
from reference.nn.attentions.attention_extras import Extras
from reference.nn.attentions.attention_lengths import check_alike
from reference.nn.attentions.multihead_attention import MultiheadAttention
from reference.nn.core import checks
from reference.nn.layers.layernorm_mlp import check_activation_params


def check_construction(given: Mapping[str, Any]) -> None:
    """Refuse arguments that do not go together, as Transformer Engine does."""
    layer = "TransformerLayer"
    check_arguments(layer, given)
    checks.check_channels(layer, given["hidden_size"], given["num_attention_heads"], given["kv_channels"])
    checks.check_groups(layer, given["num_gqa_groups"], int(given["num_attention_heads"]))
    check_activation_params(layer, given["activation"], given["activation_params"])
    checks.check_norms(layer, given)
    if given["layer_type"] == "encoder":
        of_cross: dict[str, Any] = {"enc_dec_attn_mask_type": "no_mask"}
        if given["enc_dec_window_size"] not in checks.NO_WINDOWS:
            of_cross["enc_dec_window_size"] = None
        check_unread(layer, given, of_cross, "layer_type='encoder'", "layer_type='decoder'")
    if given["parallel_attention_mlp"]:
        for name, accepted in (
            ("layer_type", "encoder"),
            ("apply_residual_connection_post_layernorm", False),
            ("output_layernorm", False),
        ):
            if given[name] != accepted:
                raise ValueError(
                    f"{layer}: parallel_attention_mlp=True with {name}={given[name]!r}; {accepted!r} is accepted."
                )


def check_context(layer: Any, here: str) -> None:
    """Refuse what ranks that share tokens are not offered for."""
    rate = layer.settings_of_tokens["drop_path_rate"]
    for what, asked, accepted in (
        (f"attn_input_format={layer.attn_input_format!r}", layer.attn_input_format != "sbhd", "'sbhd' is"),
        (f"drop_path_rate={rate!r}", rate > 0, "0.0 is"),
    ):
        if asked:
            raise NotImplementedError(f"TransformerLayer: {what} with {here} is not offered; {accepted} accepted.")


def check_sequence(layer: Any) -> None:
    """Refuse what a rank's own tokens are not offered for."""
    for one, off in (("output_layernorm", False), ("drop_path_rate", 0.0)):
        given = layer.settings_of_tokens[one]
        if layer.sequence_parallel and given != off:
            raise NotImplementedError(
                f"TransformerLayer: {one}={given!r} with sequence_parallel=True and tp_size={layer.tp_size} is not "
                f"offered; {off!r} is accepted."
            )


def _checks(attention: Any) -> bool:
    """Whether a part is one of ours, whose arguments can be checked before it runs."""
    return isinstance(attention, MultiheadAttention) and not checks.is_prepared(attention)


def check_forward(
    layer: Any,
    hidden_states: Any,
    mask: Any,
    mask_type: Any,
    window: Any,
    angles: Any,
    cross: tuple[Any, Any, Any, Any],
    enc_dec: tuple[Any, Any, Any],
    extras: Extras,
    run: Run,
) -> None:
    """Refuse what a part of the layer would refuse, before anything changes.

    `cross`: of cross-attention its source, mask, mask type and window; `enc_dec`: the last three as they are given.
    """
    modules: Any = layer._modules
    attention, mlp, decodes = modules["self_attention"], modules["layernorm_mlp"], layer.layer_type == "decoder"
    packed = layer.attn_input_format == "thd"
    checks.check_input(mlp, hidden_states, layer.hidden_size, "hidden_states", "TransformerLayer", packed)
    if extras.lengths.given and not decodes:
        check_alike("TransformerLayer", extras.lengths)
    if (cross[0] is not None) != decodes:
        wanted = "an encoder_output" if decodes else "no encoder_output"
        raise ValueError(f"TransformerLayer: layer_type={layer.layer_type!r} takes {wanted}.")
    if not decodes and not (enc_dec[0] is enc_dec[1] is enc_dec[2] is None):
        names = ("enc_dec_attn_mask", "enc_dec_attn_mask_type", "enc_dec_window_size")
        name, one = next(pair for pair in zip(names, enc_dec, strict=True) if pair[1] is not None)
        shown = "a tensor" if isinstance(one, torch.Tensor) else "a tuple" if name == names[0] else repr(one)
        raise ValueError(
            f"TransformerLayer: {name} is {shown} with layer_type='encoder', which has no cross-attention; None is "
            f"accepted."
        )
    if decodes and angles is not None and extras.inference is not None:
        raise NotImplementedError(
            "TransformerLayer: rotary_pos_emb with inference_params in a decoder is not offered, because its "
            "cross-attention has no cache that says where its queries are; one of them is accepted."
        )
    if decodes and layer.attn_input_format == "thd" and extras.inference is not None:
        raise NotImplementedError(
            "TransformerLayer: inference_params with attn_input_format='thd' in a decoder is not offered, because its "
            "cross-attention needs lengths, which pre_step gives for self-attention; 'sbhd' and 'bshd' are accepted."
        )
    if _checks(attention):
        names = ("attention_mask", "self_attn_mask_type", "window_size")
        of_self = extras.of_self()
        of_first = (hidden_states, None, mask, mask_type, window, angles, names, of_self)
        attention.check("TransformerLayer", *of_first)
    if decodes and _checks(modules["inter_attention"]):
        names = ("enc_dec_attn_mask", "enc_dec_attn_mask_type", "enc_dec_window_size")
        of_second = (hidden_states, *cross, angles, names, extras.of_cross())
        modules["inter_attention"].check("TransformerLayer", *of_second)
    if run.state.enabled and not checks.has_run_in_fp8(mlp):
        attentions = [part for part in modules.values() if _checks(part)]
        checks.check_fp8_sizes(mlp, *(part for one in attentions for part in one._modules.values()))
