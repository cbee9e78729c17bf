"""The accepted values of layers' arguments: one table for all constructors and forwards.

`check_arguments` checks every argument before anything is made or changed. An error names the argument: one of
Transformer Engine's that is not offered (`OFF`), or one of another type or value than its rule accepts (`RULES`).
"""

import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reference.numbers.formats import WIDE_DTYPES
from reference.ops.activations.activation import KINDS as ACTIVATIONS
from reference.ops.activations.activation import Clamp
from reference.ops.attentions.attention import MAX_HEAD_DIM
from reference.ops.norms.norm import MAX_HIDDEN
from reference.support import transforms

# Transformer Engine's names → the op's mask type, and whether an explicit mask is read.
MASK_TYPES = {
    "no_mask": ("none", False),
    "padding": ("none", True),
    "arbitrary": ("none", True),
    "causal": ("causal", False),
    "causal_bottom_right": ("causal_bottom_right", False),
    "padding_causal": ("causal", True),
    "padding,causal": ("causal", True),
    "causal,padding": ("causal", True),
    "padding_causal_bottom_right": ("causal_bottom_right", True),
}

# Transformer Engine's arguments for what is not offered, by the values that mean "off".
_OFF: list[tuple[tuple[Any, ...], str]] = [
    ((None,), "symmetric_ar_type bottom_right_diagonal enc_dec_bottom_right_diagonal"),
    ((None,), "score_mod score_mod_bprop score_mod_tensors score_mod_bprop_tensors"),
    ((None,), "thd_attention_policies"),
    ((None,), "get_cpu_offload_context.offload_stream"),
    ((False,), "get_cpu_offload_context.manual_synchronization"),
    ((False,), "get_cpu_offload_context.retain_pinned_cpu_buffers"),
    ((False,), "return_layernorm_output_gathered ub_tp_comm_overlap ub_overlap_ag"),
    ((False,), "ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad"),
    ((False,), "_graph amsgrad"),
    ((False,), "distribute_saved_activations"),
    ((False, None), "fp8_output fp8_grad bf16_backward"),
    # In Transformer Engine, too, these have no effect without ub_tp_comm_overlap.
    ((True, False), "TransformerLayer.ub_overlap_ag TransformerLayer.ub_overlap_rs TransformerLayer.ub_bulk_dgrad"),
    ((True, False), "TransformerLayer.ub_overlap_rs_dgrad TransformerLayer.ub_bulk_wgrad"),
    ((True,), "fast_zero_fill materialize_master_grads"),
    ((0,), "sm_margin cp_rank"),
    ((1,), "cp_size"),
    ((1, None), "num_splits"),
    ((0.0, None), "softcap"),
    (("auto",), "thd_attention_policy_dispatch"),
    ((None,), "Embedding.max_norm"),
    ((None,), "InferenceParams.custom_cache_manager"),
    ((2.0,), "Embedding.norm_type"),
    ((False,), "Embedding.scale_grad_by_freq Embedding.sparse"),
    ((None,), "tensor_parallel_mode userbuffers_options op_kwargs"),
    ((False,), "tensor_parallel cache_quantized_input overwrite_input"),
    ((True,), "rowwise"),
    ((False,), "Float8CurrentScalingQuantizer.use_existing_amax pin_memory internal"),
    ((None,), "Float8CurrentScalingQuantizer.scale Float8CurrentScalingQuantizer.amax"),
]
OFF = {name: accepted for accepted, names in _OFF for name in names.split()}


class Rule(NamedTuple):
    """What an argument accepts: a test of its type, a test of its value, and both in words."""

    of_type: Callable[[Any], bool]
    fits: Callable[[Any], bool]
    accepted: str


def is_int(x: Any) -> bool:
    """Whether x is an int of Python or NumPy; True and False are not."""
    return type(x) is int or (isinstance(x, numbers.Integral) and not isinstance(x, bool))


def is_real(x: Any) -> bool:
    """Whether x is a real number of Python or NumPy; True and False are not."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _is_device(x: Any) -> bool:
    try:
        torch.device(x)
    except (RuntimeError, ValueError, OverflowError):
        return False
    return True


def _ints(least: int, most: int = 2**31 - 1) -> Rule:
    return Rule(is_int, lambda x: least <= x <= most, f"an int from {least} to {most} is accepted")


def _one_of(*choices: str) -> Rule:
    return Rule(lambda x: isinstance(x, str), lambda x: x in choices, f"one of {choices} is accepted")


def _int_of(*choices: int) -> Rule:
    return Rule(is_int, lambda x: x in choices, f"{' or '.join(map(str, choices))} is accepted")


def _or_none(rule: Rule) -> Rule:
    of_type, fits, accepted = rule
    return Rule(lambda x: x is None or of_type(x), lambda x: x is None or fits(x), f"None or {accepted}")


def _any(x: Any) -> bool:
    return True


def is_group(x: Any) -> bool:
    """Whether torch.distributed accepts it: a group, or what `new_group` returns to a process outside of one."""
    return dist.is_available() and (isinstance(x, dist.ProcessGroup) or x is dist.GroupMember.NON_GROUP_MEMBER)


def _is_window(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and all(map(is_int, x))


def _is_clamp(name: Any, value: Any) -> bool:
    """Whether it is a parameter of clamped_swiglu."""
    lowest = -1e30 if name == "glu_linear_offset" else 1e-30
    return name in Clamp._fields and is_real(value) and lowest < value < 1e30


_SIZE = _ints(1)
_HIDDEN = _ints(1, MAX_HIDDEN)  # of a norm
_HEAD = Rule(
    is_int, lambda x: x % 8 == 0 and 8 <= x <= MAX_HEAD_DIM, f"a multiple of 8 from 8 to {MAX_HEAD_DIM} is accepted"
)
_HEADS = Rule(
    lambda x: is_int(x) or (isinstance(x, tuple) and len(x) == 2 and all(map(is_int, x))),
    lambda x: all(map(_HEAD.fits, x)) if isinstance(x, tuple) else _HEAD.fits(x),
    f"a multiple of 8 from 8 to {MAX_HEAD_DIM}, or a pair of them (queries and keys, values), is accepted",
)
_SCALE = Rule(is_real, lambda x: 1e-30 < x < 1e30, "a number between 1e-30 and 1e30 is accepted")
_LEAST_AMAX = Rule(is_real, lambda x: 0 <= x <= 3.4e38, "a finite number of fp32, at least 0, is accepted")
_FP8_DTYPE = Rule(is_int, lambda x: x in (7, 8), "te.DType.kFloat8E4M3 and te.DType.kFloat8E5M2 are accepted")
_EPSILON = Rule(is_real, lambda x: 1e-45 <= x <= 3.4e38, "a positive finite number of fp32 is accepted")
_WINDOW = Rule(_is_window, lambda x: all(-1 <= side < 2**31 for side in x), "a pair of ints from -1 on is accepted")
_PROBABILITY = Rule(is_real, lambda x: 0 <= x < 1, "0 <= p < 1 is accepted")
_SHARE = Rule(is_real, lambda x: 0 <= x <= 1, "a number from 0 to 1 is accepted")
_FRACTION = Rule(is_real, lambda x: 0 < x <= 1, "a number above 0, at most 1, is accepted")
_OFFSET = Rule(is_real, lambda x: abs(x) < 1e30, "a number between -1e30 and 1e30 is accepted")
_NUMBER = Rule(is_real, lambda x: abs(x) <= 3.4e38, "a finite number of fp32 is accepted")
_INTERLEAVING = Rule(is_int, lambda x: x in (-3, -2), "-3 and -2 are accepted")
_FLAG = Rule(lambda x: isinstance(x, bool), _any, "True and False are accepted")
_FLAG_OR_NONE = Rule(lambda x: x is None or isinstance(x, bool), _any, "None, True and False are accepted")
_NAME = Rule(lambda x: x is None or isinstance(x, str), _any, "None or a string is accepted")
_FUNCTION = Rule(lambda x: x is None or callable(x), _any, "None or a function is accepted")
_DTYPE = Rule(
    lambda x: x is None or (isinstance(x, torch.dtype) and x in WIDE_DTYPES),
    _any,
    "float32, bfloat16 and float16 are accepted",
)
_ACTIVATION_DTYPE = Rule(
    lambda x: isinstance(x, torch.dtype) and x in WIDE_DTYPES, _any, "float32, bfloat16 and float16 are accepted"
)
_DEVICE = Rule(
    lambda x: x is None or is_int(x) or isinstance(x, (str, torch.device)),
    lambda x: x is None or _is_device(x),
    "None, a torch.device or its name is accepted",
)
_FLAGS = Rule(
    lambda x: x is None or isinstance(x, bool) or (isinstance(x, tuple) and all(isinstance(one, bool) for one in x)),
    _any,
    "None, True, False and a tuple of flags are accepted",
)
# Parallelism over one rank is none: its arguments are accepted, and have no effect, as in Transformer Engine.
_ONE_RANK = Rule(
    lambda x: x is None or is_group(x),
    lambda x: x is None or dist.get_world_size(x) == 1,
    "None and a process group of one rank are accepted (several ranks are not offered here)",
)
_GROUP = Rule(
    lambda x: x is None or is_group(x),
    lambda x: x is None or dist.get_world_size(x) > 0,
    "None and a process group of which this process is a rank are accepted",
)
_RANKS = Rule(
    lambda x: x is None or (isinstance(x, (list, tuple)) and all(map(is_int, x))),
    _any,
    "None and a list of the group's ranks are accepted",
)
_CLAMP = Rule(
    lambda x: x is None or isinstance(x, dict),
    lambda x: x is None or all(_is_clamp(name, value) for name, value in x.items()),
    "None, or a dict of 'limit' and 'alpha', numbers between 1e-30 and 1e30, and 'glu_linear_offset', a number between "
    "-1e30 and 1e30, is accepted",
)
_STREAM = Rule(lambda x: x is None or isinstance(x, torch.Stream), _any, "None and a CUDA stream are accepted")
_NAMES: list[tuple[Rule, str]] = [
    (_ONE_RANK, "tp_group"),
    (_GROUP, "Linear.tp_group LayerNormLinear.tp_group LayerNormMLP.tp_group MultiheadAttention.tp_group"),
    (_GROUP, "TransformerLayer.tp_group checkpoint.tp_group Float8CurrentScalingQuantizer.amax_reduction_group"),
    (_GROUP, "Embedding.tp_group DotProductAttention.tp_group cp_group dist_process_group"),
    (_SIZE, "tp_size"),
    (_RANKS, "cp_global_ranks"),
    (_STREAM, "cp_stream"),
    (_one_of("p2p", "all_gather", "a2a", "a2a+p2p"), "cp_comm_type"),
    (_FLAG, "sequence_parallel set_parallel_mode"),
    (_FLAG_OR_NONE, "LayerNorm.sequence_parallel RMSNorm.sequence_parallel"),
    (_FLAGS, "make_graphed_callables.enabled make_graphed_callables.fp8_enabled"),
    (_FLAG_OR_NONE, "make_graphed_callables.calibrating make_graphed_callables.fp8_calibrating"),
    (_FLAG_OR_NONE, "make_graphed_callables.cache_quantized_params make_graphed_callables.fp8_weight_caching"),
    (_FUNCTION, "pre_warmup_hook post_warmup_hook"),
    (_FLAG, "retain_graph_in_backward"),
    (_FLAG, "allow_unused_input clone_param_grads_on_return _reuse_graph_input_output_buffers"),
    (_ints(0), "num_warmup_iters"),
    (_SIZE, "max_batch_size max_sequence_length num_heads_kv"),
    (_or_none(_SIZE), "max_ctx_len total_num_pages page_size"),
    (_FLAG, "is_paged"),
    (_HEAD, "head_dim_k"),
    (_or_none(_HEAD), "head_dim_v"),
    (_ACTIVATION_DTYPE, "InferenceParams.dtype"),
    (_FLAG, "get_cpu_offload_context.offload_activations get_cpu_offload_context.double_buffering offload_weights"),
    (_SIZE, "get_cpu_offload_context.model_layers"),
    (_or_none(_ints(0)), "get_cpu_offload_context.num_layers"),
    (_SIZE, "dim max_seq_len"),
    (_ints(0), "offset"),
    (_or_none(_SIZE), "seq_len_interpolation_factor pretrained_max_position_embeddings"),
    (_FRACTION, "rotary_percent"),
    (_SCALE, "rotary_base"),
    (_FLAG, "interleaved fused"),
    (_SIZE, "in_features out_features hidden_size ffn_hidden_size num_attention_heads"),
    (_SIZE, "num_embeddings embedding_dim chunk_size"),
    (_or_none(_ints(-(2**31))), "padding_idx"),
    (_ints(-(2**63), 2**63 - 1), "ignore_index"),
    (_one_of("mean", "sum", "none"), "reduction"),
    (_SHARE, "label_smoothing"),
    (_FLAG, "reduce_loss is_cg_capturable _freeze"),
    (_or_none(_SIZE), "num_gqa_groups layer_number seq_length micro_batch_size"),
    (_HIDDEN, "LayerNormLinear.in_features LayerNormMLP.hidden_size TransformerLayer.hidden_size"),
    (_HIDDEN, "normalized_shape LayerNorm.hidden_size RMSNorm.hidden_size"),
    (_HEADS, "DotProductAttention.kv_channels"),
    (_or_none(_HEAD), "kv_channels"),
    (_or_none(_SCALE), "softmax_scale"),
    (_EPSILON, "eps layernorm_epsilon"),
    (_SCALE, "qk_norm_eps"),
    (_or_none(_one_of("L2Normalization", "RMSNorm", "LayerNorm")), "qk_norm_type"),
    (_or_none(_WINDOW), "window_size enc_dec_window_size"),
    (_PROBABILITY, "attention_dropout hidden_dropout"),
    (_SHARE, "drop_path_rate"),
    (_FLAG_OR_NONE, "return_max_logit pad_between_seqs"),
    (_INTERLEAVING, "qkv_interleave_dim"),
    (_FLAG, "bias return_bias fuse_wgrad_accumulation zero_centered_gamma return_layernorm_output input_layernorm"),
    (_FLAG, "checkpoint"),
    (_FLAG, "in_place output_layernorm fuse_qkv_params qkv_weight_interleaved rotary_pos_interleaved"),
    (_FLAG, "apply_residual_connection_post_layernorm checkpoint_core_attention qk_norm_before_rope"),
    (_FLAG, "parallel_attention_mlp delay_wgrad_compute save_original_input"),
    (_FLAG, "return_reason enabled calibrating preserve_high_precision_init_val"),
    (_FLAG_OR_NONE, "is_first_microbatch"),
    (_FUNCTION, "init_method output_layer_init_method get_rng_state_tracker"),
    (_NAME, "name ub_name rng_tracker_name"),
    (_DTYPE, "params_dtype dtype"),
    (_DEVICE, "device"),
    (_or_none(_one_of("row", "column")), "parallel_mode"),
    (_one_of(*MASK_TYPES), "attn_mask_type self_attn_mask_type enc_dec_attn_mask_type"),
    (_one_of("sbhd", "bshd", "thd"), "qkv_format attn_input_format tensor_format"),
    (_or_none(_SIZE), "max_seqlen_q max_seqlen_kv"),
    (_one_of(*ACTIVATIONS), "activation"),
    (_CLAMP, "activation_params"),
    (_one_of("LayerNorm", "RMSNorm"), "normalization"),
    (_one_of("self", "cross"), "attention_type"),
    (_one_of("encoder", "decoder"), "layer_type"),
    (_one_of("vanilla", "off-by-one", "learnable"), "softmax_type"),
    (_one_of("no_bias", "post_scale_bias", "alibi"), "core_attention_bias_type"),
    (_one_of("exact", "cudnn"), "attention_backend"),
    (_or_none(_int_of(4096)), "key_segment"),
    (_ONE_RANK, "tensor_parallel_group"),
    (_FLAG, "accumulate_into_main_grad"),
    (_FUNCTION, "rng_state_tracker_function"),
    (_SIZE, "ops.Bias.size"),
    (_SHARE, "ops.Dropout.p"),
    (_NUMBER, "ops.ConstantScale.scale"),
    (_or_none(_SIZE), "glu_interleave_size"),
    (_SCALE, "ops.ClampedSwiGLU.limit ops.ClampedSwiGLU.alpha"),
    (_OFFSET, "ops.ClampedSwiGLU.glu_linear_offset"),
    (_FLAG, "ops.Quantize.forward ops.Quantize.backward"),
    (_FLAG, "columnwise force_pow_2_scales requires_grad with_amax_reduction"),
    (_FP8_DTYPE, "fp8_dtype"),
    (_LEAST_AMAX, "amax_epsilon"),
    (_ACTIVATION_DTYPE, "Float8Tensor.dtype Quantizer.make_empty.dtype fake_dtype"),
]
RULES = {name: rule for rule, names in _NAMES for name in names.split()}


def _is_off(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether a value means "off"; arrays and tensors are never compared."""
    return any(value is one or (_is_like(value, one) and value == one) for one in accepted)


def _is_like(value: Any, one: Any) -> bool:
    return isinstance(value, str if isinstance(one, str) else numbers.Number)


def _shown(value: Any) -> str:
    if is_group(value):
        return f"<a process group of {dist.get_world_size(value)} ranks>"
    return f"<a {value.dtype} tensor>" if isinstance(value, torch.Tensor) else repr(value)


def check_arguments(layer: str, arguments: Mapping[str, Any]) -> None:
    """Refuse what a constructor or forward does not accept; other names in `arguments` are ignored."""
    for name, value in arguments.items():
        fault = _fault(layer, name, value)
        if fault is not None:
            # A tracer may have replaced the value: torch.onnx.export gives tensors for flags.
            transforms.refuse(layer.removesuffix(".forward"), *arguments.values())
            raise fault


def check_unread(layer: str, given: Mapping[str, Any], defaults: Mapping[str, Any], state: str, cure: str) -> None:
    """Refuse settings of a part that is switched off: `given` must have their defaults.

    `state`: the argument that switches it off, with its value, which `cure` would switch on.
    """
    for name, default in defaults.items():
        value = given[name]
        if value is not default and not (_is_like(value, default) and value == default):
            raise ValueError(
                f"{layer}: {name}={_shown(value)} with {state}, where nothing reads it; {default!r} is accepted, or "
                f"{cure}."
            )


def _fault(layer: str, name: str, value: Any) -> Exception | None:
    """What is wrong with a value; None if nothing is."""
    accepted = OFF.get(f"{layer}.{name}", OFF.get(name))
    if accepted is not None and not _is_off(value, accepted):
        text = " and ".join(map(repr, accepted)) + (" is accepted" if len(accepted) == 1 else " are accepted")
        return NotImplementedError(f"{layer}: {name}={_shown(value)} is not offered; {text}.")
    rule = RULES.get(f"{layer}.{name}", RULES.get(name))
    if rule is None or (value is None and layer.endswith(".forward")):  # a forward's None is the constructor's
        return None
    if not rule.of_type(value):
        return TypeError(f"{layer}: {name}={_shown(value)}; {rule.accepted}.")
    if not rule.fits(value):
        return ValueError(f"{layer}: {name}={_shown(value)}; {rule.accepted}.")
    return None
