"""Other values of every argument of layers and optimizers, and where each of them acts."""

from typing import Any

import numpy as np
import torch
from shared.rng_trackers import tracker_of

import reference as te

BF16 = torch.bfloat16


def numbers(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def each(names: str, value: Any) -> dict[str, Any]:
    """One value under several names."""
    return dict.fromkeys(names.split(), value)


def constant(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.constant_(x, 0.03)


def two_states() -> Any:
    tracker = tracker_of()
    tracker.add("another", 8)
    return tracker


def ends(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def mask(*hidden: int) -> torch.Tensor:
    """Of two sequences of 8, whose last so many tokens are hidden."""
    return (torch.arange(8) >= 8 - torch.tensor(hidden)[:, None]).view(2, 1, 1, 8)


ANGLES = numbers(30, 8, 1, 1, 16, dtype=torch.float32)
X, QKV, PACKED, SOURCE = numbers(1, 8, 2, 32), numbers(2, 8, 2, 2, 16), numbers(3, 12, 32), numbers(7, 8, 2, 32)
CUT = {"attn_mask_type": "padding_causal"}
IN_THD = {"qkv_format": "thd", **CUT}
THD = {"cu_seqlens_q": ends(5, 4), "cu_seqlens_kv": ends(5, 4), "max_seqlen_q": 5, "max_seqlen_kv": 5}
OF_Q = {"cu_seqlens_q": ends(5, 4), "max_seqlen_q": 5}
KV = {"key_layer": None, "value_layer": None, "kv_layer": numbers(4, 8, 2, 2, 2, 16)}
APART = {"cu_seqlens_q_padded": ends(6, 6), "cu_seqlens_kv_padded": ends(6, 6)}

LAYERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # name: class, arguments of the constructor, arguments of the forward
    "Linear": (te.Linear, {"in_features": 32, "out_features": 32}, {"inp": X}),
    "LayerNormLinear": (te.LayerNormLinear, {"in_features": 32, "out_features": 32}, {"inp": X}),
    "LayerNormMLP": (te.LayerNormMLP, {"hidden_size": 32, "ffn_hidden_size": 64}, {"inp": X}),
    "LayerNorm": (te.LayerNorm, {"normalized_shape": 32}, {"input": X}),
    "RMSNorm": (te.RMSNorm, {"normalized_shape": 32}, {"input": X}),
    "Embedding": (te.Embedding, {"num_embeddings": 8, "embedding_dim": 32}, {"input": torch.tensor([1, 2, 1, 7])}),
    "DotProductAttention": (
        te.DotProductAttention,
        {"num_attention_heads": 2, "kv_channels": 16},
        {"query_layer": QKV, "key_layer": numbers(5, 8, 2, 2, 16), "value_layer": numbers(6, 8, 2, 2, 16)},
    ),
    "MultiheadAttention": (
        te.MultiheadAttention,
        {"hidden_size": 32, "num_attention_heads": 2, "input_layernorm": True, "fuse_qkv_params": True},
        {"hidden_states": X, "rotary_pos_emb": ANGLES},
    ),
    "TransformerLayer": (
        te.TransformerLayer,
        {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "layer_type": "decoder"},
        {"hidden_states": X, "rotary_pos_emb": ANGLES, "encoder_output": SOURCE},
    ),
    "TransformerLayer, encoder": (
        te.TransformerLayer,
        {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2},
        {"hidden_states": X, "rotary_pos_emb": ANGLES},
    ),
    "RotaryPositionEmbedding": (te.RotaryPositionEmbedding, {"dim": 16}, {"max_seq_len": 8}),
    **{
        f"ops.{name}": (getattr(te.ops, name), given, {"input": X})
        for name, given in {
            "BasicLinear": {"in_features": 32, "out_features": 32}, "Bias": {"size": 32}, "ClampedSwiGLU": {},
            "ConstantScale": {"scale": 2.0}, "Dropout": {"p": 0.5}, "GEGLU": {}, "GELU": {}, "GLU": {},
            "L2Normalization": {}, "LayerNorm": {"normalized_shape": 32}, "MakeExtraOutput": {}, "QGEGLU": {},
            "Linear": {"in_features": 32, "out_features": 32}, "QGELU": {}, "Quantize": {}, "RMSNorm":
            {"normalized_shape": 32}, "ReGLU": {}, "ReLU": {}, "Reshape": {"shape": (4, 4, 32)}, "SReGLU": {},
            "SReLU": {}, "SiLU": {}, "SwiGLU": {},
        }.items()
    },
    "ops.AddExtraInput": (te.ops.AddExtraInput, {}, {"input": X, "extra_input": numbers(8, 8, 2, 32)}),
}  # fmt: skip

# Other values, by an argument's name; those of `OFF` are found there.
OTHERS: dict[str, list[Any]] = {
    **each("in_features out_features normalized_shape hidden_size size embedding_dim", [64]),
    **each("ffn_hidden_size num_embeddings kv_channels dim", [32]),
    **each("eps layernorm_epsilon qk_norm_eps", [0.5]),
    "key_segment": [4096],
    **each("init_method output_layer_init_method", [constant]),
    **each("attention_dropout hidden_dropout p", [0.3]),
    **each("softmax_scale scale", [0.7]),
    **each("get_rng_state_tracker rng_state_tracker_function", [tracker_of]),
    **each("attn_mask_type self_attn_mask_type", ["no_mask", "padding", "arbitrary"]),
    **each("window_size enc_dec_window_size", [(1, 0), (1, 1)]),
    **each("qkv_format attn_input_format", ["bshd", "thd"]),
    **each("tp_group cp_group tensor_parallel_group", ["a group"]),
    **each("name ub_name rng_tracker_name", ["another"]),
    **each("layer_number seq_length micro_batch_size", [3]),
    **each("tp_size", [2]),
    **each("limit alpha glu_linear_offset", [0.3]),
    **each("input inp hidden_states query_layer key_layer value_layer encoder_output", ["negative"]),
    "num_attention_heads": [1], "num_gqa_groups": [1], "parameters_split": [("a", "b"), {"a": 8, "b": 24}],
    "activation": ["relu", "swiglu"], "activation_params": [{"limit": 0.3}], "normalization": ["RMSNorm"],
    "params_dtype": [torch.float16], "dtype": [torch.float16], "device": ["meta"], "softmax_type": ["off-by-one"],
    "parallel_mode": ["row", "column"], "cp_global_ranks": [[0]], "cp_stream": ["a stream"], "cp_comm_type": ["a2a"],
    "attention_type": ["cross"], "layer_type": ["encoder"], "enc_dec_attn_mask_type": ["causal", "padding"],
    "attention_backend": ["cudnn"], "qk_norm_type": ["RMSNorm", "L2Normalization"], "drop_path_rate": [0.5],
    "use_fp8": [True, False], "padding_idx": [1], "_weight": [numbers(9, 8, 32)], "glu_interleave_size": [8],
    "shape": [(8, 64)], "rotary_percent": [0.5], "seq_len_interpolation_factor": [3], "rotary_base": [100.0],
    "pretrained_max_position_embeddings": [3], "max_seq_len": [9], "offset": [2],
    "extra_input": [numbers(8, 8, 2, 32) + 1],
    "rotary_pos_emb": [ANGLES + 1, (ANGLES, ANGLES + 1), None], "qkv_interleave_dim": [-2],
    "attention_mask": [mask(2, 3)], "enc_dec_attn_mask": [mask(2, 3)], "core_attention_bias_type": ["alibi"],
    "core_attention_bias": [numbers(10, 1, 2, 8, 8)], "alibi_slopes": [torch.tensor([0.1, 0.7])],
    "cu_seqlens_q": [ends(5, 2)], "cu_seqlens_kv": [ends(3, 3)], "max_seqlen_q": [3], "max_seqlen_kv": [3],
    "cu_seqlens_q_padded": [ends(7, 5)], "cu_seqlens_kv_padded": [ends(7, 5)], "inference_params": ["a cache"],
    "qkv_layer": [numbers(11, 8, 2, 3, 2, 16)], "kv_layer": [numbers(12, 8, 2, 2, 2, 16)],
}  # fmt: skip

# Where an argument acts: what else is given. "also" replaces the forward's arguments.
WHERE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "TransformerLayer.fuse_wgrad_accumulation": ({"fuse_qkv_params": True}, {}),
    "parallel_attention_mlp": ({"layer_type": "encoder"}, {"encoder_output": None}),
    "activation_params": ({"activation": "clamped_swiglu"}, {}),
    "qk_norm_eps": ({"qk_norm_type": "RMSNorm"}, {}),
    "qk_norm_before_rope": ({"qk_norm_type": "RMSNorm"}, {}),
    "qkv_weight_interleaved": ({"fuse_qkv_params": True}, {}),
    **each(
        "pretrained_max_position_embeddings seq_len_interpolation_factor",
        ({"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 4}, {}),
    ),
    "rng_tracker_name": ({"get_rng_state_tracker": two_states}, {}),
    "DotProductAttention.get_rng_state_tracker": ({"attention_dropout": 0.5}, {}),
    "DotProductAttention.device": ({"softmax_type": "learnable"}, {}),
    "MultiheadAttention.forward.encoder_output": ({"attention_type": "cross"}, {"encoder_output": SOURCE}),
    "TransformerLayer.forward.attention_mask": (CUT, {"attention_mask": mask(0, 0), "enc_dec_attn_mask": mask(0, 0)}),
    "core_attention_bias": (
        {}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": X.new_zeros(1, 1, 8, 8)},
    ),
    "alibi_slopes": ({}, {"core_attention_bias_type": "alibi"}),
    "TransformerLayer, encoder.forward.enc_dec_attn_mask": ({}, {}),
    "TransformerLayer, encoder.forward.cu_seqlens_q": (IN_THD, {"packed": PACKED, **OF_Q}),
    "TransformerLayer, encoder.forward.cu_seqlens_q_padded": (
        IN_THD, {"packed": PACKED, **OF_Q, "cu_seqlens_q_padded": ends(6, 6)},
    ),
    "forward.attention_mask": (CUT, {"attention_mask": mask(0, 0)}),
    "forward.enc_dec_attn_mask": ({"enc_dec_attn_mask_type": "padding"}, {"enc_dec_attn_mask": mask(0, 0)}),
    "qkv_layer": ({}, {"query_layer": None, **KV, "kv_layer": None, "qkv_layer": numbers(4, 8, 2, 3, 2, 16)}),
    **each("kv_layer qkv_interleave_dim", ({}, KV)),
    **each("cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv", (IN_THD, {"packed": PACKED, **THD})),
    "pad_between_seqs": (IN_THD, {"packed": PACKED, **THD, **APART}),
    **each("cu_seqlens_q_padded cu_seqlens_kv_padded", (IN_THD, {"packed": PACKED, **THD, **APART})),
}  # fmt: skip

# Whose other values are all refused: by what they stand for, by tensors that do not fit, or by a longer sequence.
REFUSED = each(
    """tp_group cp_group tensor_parallel_group cp_stream inference_params use_fp8 attention_backend
    LayerNorm.hidden_size RMSNorm.hidden_size DotProductAttention.num_attention_heads DotProductAttention.kv_channels
    DotProductAttention.num_gqa_groups max_seqlen_q max_seqlen_kv LayerNormMLP.tp_size MultiheadAttention.tp_size
    TransformerLayer.tp_size Embedding.tp_size DotProductAttention.tp_size""",
    True,
)
# An encoder has no cross-attention, and one length.
REFUSED |= {
    f"TransformerLayer, encoder.{name}": True
    for name in ("encoder_output", "enc_dec_attn_mask", "enc_dec_attn_mask_type", "enc_dec_window_size",
                 "cu_seqlens_kv", "cu_seqlens_kv_padded")
}  # fmt: skip

# A name, or a layer's, and why it changes none of what is looked at.
WITHOUT_EFFECT = {
    **each("name ub_name", "a label for logs and debuggers"),
    **each("seq_length micro_batch_size", "sizes to warm up for, which Transformer Engine does not read"),
    **each(
        """parallel_mode set_parallel_mode cp_comm_type cp_global_ranks Linear.sequence_parallel
        LayerNormLinear.sequence_parallel LayerNormMLP.sequence_parallel DotProductAttention.sequence_parallel
        MultiheadAttention.sequence_parallel TransformerLayer.sequence_parallel ops.BasicLinear.sequence_parallel
        ops.Linear.sequence_parallel Embedding.sequence_parallel""",
        "parallelism over one rank is none; of several: tests/nn/core/test_tensor_parallel.py",
    ),
    **{f"TransformerLayer.ub_{name}": "acts with ub_tp_comm_overlap alone, which is refused" for name in
       ("overlap_ag", "overlap_rs", "overlap_rs_dgrad", "bulk_dgrad", "bulk_wgrad")},
    **each("checkpoint checkpoint_core_attention", "backward computes the same numbers again"),
    "save_original_input": "chooses what is kept for backward, whose numbers are the same",
    "layer_number": "chooses a cache of inference_params: tests/nn/attentions/test_inference.py",
    "DotProductAttention.attention_type": "says where keys come from, which are given here",
    "key_segment": "acts beyond so many keys: tests/nn/attentions/test_attention_segments_layers.py",
    "pad_between_seqs": "cu_seqlens_q_padded and cu_seqlens_kv_padded say it",
    "in_place": "chooses the memory of a result: tests/nn/operations/test_operations_more.py",
    "Adafactor.foreach": "a choice of loops of PyTorch's, whose numbers are the same",
}  # fmt: skip

# What switches a part of a layer off: further arguments of the constructor and of the forward.
CROSS = {"attention_type": "cross"}, {"encoder_output": SOURCE}
OF_ATTENTION: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bias": False}, {}), ({"fuse_qkv_params": False}, {}), ({"attention_dropout": 0.0}, {}),
    ({"qk_norm_type": "L2Normalization"}, {}), ({"normalization": "RMSNorm"}, {}),
]  # fmt: skip
OF_PAIRS = numbers(31, 2, 1, 8, 8) > 0.5
MASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"attn_mask_type": "arbitrary"}, {"attention_mask": OF_PAIRS}),
    ({"attn_mask_type": "padding"}, {"attention_mask": mask(0, 1)}),
    ({"attn_mask_type": "padding"}, {"cu_seqlens_q": ends(5, 4), "cu_seqlens_kv": ends(6, 4)}),
    (IN_THD, {"packed": PACKED, **THD, **APART}),
]
STATES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "Linear": [({"bias": False}, {}), ({"return_bias": True}, {})],
    "LayerNormLinear": [({"bias": False}, {}), ({"normalization": "RMSNorm"}, {})],
    "LayerNormMLP": [({"bias": False}, {}), ({"normalization": "RMSNorm"}, {}), ({"activation": "swiglu"}, {})],
    "DotProductAttention": [
        ({"attn_mask_type": "no_mask"}, {}), ({"softmax_type": "learnable"}, {}), ({"attention_dropout": 0.5}, {}),
        *MASKED, ({"softmax_type": "off-by-one"}, {}), ({}, {"core_attention_bias_type": "alibi"}),
    ],
    "MultiheadAttention": [
        ({"input_layernorm": False}, {}), CROSS, ({}, {"rotary_pos_emb": None}), *OF_ATTENTION, *MASKED,
    ],
    "TransformerLayer": [*OF_ATTENTION, ({"hidden_dropout": 0.0}, {}), ({"output_layernorm": True}, {})],
    "TransformerLayer, encoder": [
        *OF_ATTENTION, ({"hidden_dropout": 0.0}, {}), ({"output_layernorm": True}, {}),
        ({"parallel_attention_mlp": True}, {}), ({"activation": "swiglu"}, {}),
    ],
    "ops.Linear": [({"bias": False}, {})],
}  # fmt: skip

ANY = "any but None"
NO_PADDING = [{"attn_mask_type": "causal"}, {"attn_mask_type": "no_mask"}]
LENGTHS_UNREAD = "Transformer Engine's programs always give them; types without padding do not read them"
# A name, or a layer's; the states in which it is not read, although it may be given; and why it is not refused.
UNREAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "qk_norm_eps": ([{"qk_norm_type": None}], "Transformer Engine's programs always give it"),
    "qkv_weight_interleaved": (
        [{"fuse_qkv_params": False}], "Transformer Engine asks for False there, and takes True as False",
    ),
    "rotary_pos_interleaved": ([{"rotary_pos_emb": None}], "the layout of the angles of a forward that gets some"),
    "rng_tracker_name": ([{"get_rng_state_tracker": None}], "Megatron always gives it"),
    "DotProductAttention.get_rng_state_tracker": ([{"attention_dropout": 0.0}], "Megatron always gives it"),
    "DotProductAttention.device": (
        [{"softmax_type": "vanilla"}, {"softmax_type": "off-by-one"}], "of the random state, which follows the input",
    ),
    "attention_mask": (
        [*NO_PADDING, {"cu_seqlens_q": ANY}], "Transformer Engine's programs always give it; only some types read it",
    ),
    "TransformerLayer.enc_dec_attn_mask": ([{"enc_dec_attn_mask_type": "no_mask"}], "as attention_mask"),
    **{
        f"{layer}.cu_seqlens_{name}": (
            [*NO_PADDING, {"attn_mask_type": "arbitrary"}, *[{"qkv_format": "sbhd"}] * name.endswith("d")],
            LENGTHS_UNREAD,
        )
        for layer in ("DotProductAttention", "MultiheadAttention", "TransformerLayer")
        for name in ("q", "kv", "q_padded", "kv_padded")
    },
    "FusedAdam.adam_w_mode": ([{"weight_decay": 0.0}], "a group's weight_decay may be set later"),
    "FusedAdam.master_weight_dtype": ([{"master_weights": False}], "of weights kept in FP8, which have masters always"),
    "FusedSGD.wd_after_momentum": (
        [{"weight_decay": 0.0}, {"momentum": 0.0}], "a group's weight_decay and momentum may be set later",
    ),
    "FusedSGD.dampening": ([{"momentum": 0.0}], "a group's momentum may be set later"),
}  # fmt: skip

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FusedAdam": (te.optimizers.FusedAdam, {"lr": 0.1, "weight_decay": 0.1}),
    "FusedSGD": (te.optimizers.FusedSGD, {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.5}),
    "Adafactor": (te.optimizers.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
}
OPTIONS_OTHERS: dict[str, list[Any]] = {
    **each("lr weight_decay momentum dampening", [0.3]),
    **each("exp_avg_dtype exp_avg_sq_dtype", [BF16, torch.float16, torch.uint8]),
    "betas": [(0.5, 0.999), (0.9, 0.5)], "FusedAdam.eps": [0.5], "Adafactor.eps": [(3.0, 1e-3), (None, 5.0)],
    "beta2_decay": [-0.3], "master_weight_dtype": [torch.float16], "set_grad_none": [False], "foreach": [True],
    "d": [1.5], "params": [[]],
}  # fmt: skip
OPTIONS_WHERE: dict[str, dict[str, Any]] = {
    "nesterov": {"dampening": 0.0},
    "master_weight_dtype": {"master_weights": True},
    "store_param_remainders": {"master_weights": True},
}
