"""What constructors accept: each argument of each layer, with values of every kind. Nothing is silently taken."""

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from shared.constructor_cases import LAYERS, META

import reference as te
from reference.arguments import RULES, Rule

NAN, INF = math.nan, math.inf
MASKS = ("no_mask", "padding", "arbitrary", "causal", "causal_bottom_right", "padding_causal", "causal,padding")
NOTHING: list[Any] = ["", "none", 3, None, ("causal",), ["causal"], True, np.float32(1), b"causal"]
# Kind -> what is refused, what is taken.
KINDS: dict[str, tuple[list[Any], list[Any]]] = {
    "size": (
        [None, "16", 16.0, True, (16,), [16], -1, 0, 2**31, 10**30, NAN, np.float32(16), torch.tensor(16), np.ones(2)],
        [32, np.int64(32)],
    ),
    "size or none": (["16", 16.0, True, (16,), -1, 0, 2**31, NAN, np.float32(2), torch.ones(1)], [None, 2, np.int8(2)]),
    "heads": (
        [None, 0, -8, 4, 20, 264, True, 16.0, "16", (16,), [16, 8], (16, 12), (16, None), (8, 8, 8), np.float64(16)],
        [8, 256, np.int32(16), (16, 16), (192, np.int64(128))],
    ),
    "head or none": ([0, -8, 4, 20, 264, True, 16.0, "16", (16, 16), np.float64(16)], [None, 8, np.int32(16)]),
    "flag": ([None, 0, 1, "yes", "", (True,), np.True_, 1.0, torch.tensor(True)], [True, False]),
    "flag or none": ([0, 1, "yes", (True,), np.True_, torch.tensor(True)], [None, True, False]),
    "share": (
        [None, "0.1", True, False, (0.1,), -0.1, 1.1, 2, NAN, INF, torch.tensor(0.1), np.ones(2)],
        [0, 0.0, 0.5, np.float32(0.25), 1, 1.0],
    ),
    "probability": (
        [None, "0.1", True, False, (0.1,), -0.1, 1, 1.0, 2, NAN, INF, np.float32(1), torch.tensor(0.1), np.ones(2)],
        [0, 0.0, 0.5, np.float32(0.25), np.float64(0.25)],
    ),
    "epsilon": (
        [None, "1e-5", True, (1e-5,), 0, -1e-5, NAN, INF, 1e-60, 1e60, 10**400, torch.tensor(1e-5), 1j],
        [1e-5, 1, np.float32(1e-6)],
    ),
    "function": ([1, "normal", (1,), True], [None, torch.nn.init.ones_]),
    "rng": ([1, "normal", (1,), True], [None]),
    "name": ([1, b"x", ("a",), True], [None, "a", ""]),
    "dtype": (["float32", torch.int8, torch.float64, float, np.float32, 16, np.dtype("int8")], [None, torch.float16]),
    "device": (["nowhere", 1.5, (0,), True, "cuda:x", "cpu:-3", b"cpu", torch.ones(1)], ["cpu", torch.device("meta")]),
    "mask type": (NOTHING, [*MASKS]),
    "activation": (["tanh", "clamped_swiglu(7.0, 1.702, 1.0)", *NOTHING], ["gelu", "srelu", "glu", "clamped_swiglu"]),
    "activation params": (
        [7.0, "limit", True, (7.0,), {"limits": 7.0}, {"limit": 0}, {"limit": None}, {"limit": True}, {"alpha": -1.0},
         {"alpha": INF}, {"glu_linear_offset": NAN}, {"glu_linear_offset": "1"}, {1: 1.0}, {"limit": torch.ones(1)}],
        [None, {}, {"limit": 7}, {"alpha": 1, "glu_linear_offset": -np.float32(0.5)}],
    ),
    "qk norm": (["BatchNorm", "", 3, True, ("RMSNorm",)], [None, "L2Normalization", "RMSNorm", "LayerNorm"]),
    "normalization": (["BatchNorm", *NOTHING], ["LayerNorm", "RMSNorm"]),
    "format": (["hdt", *NOTHING], ["sbhd", "bshd", "thd"]),
    "attention type": (["both", *NOTHING], ["self", "cross"]),
    "layer type": (["both", *NOTHING], ["encoder", "decoder"]),
    "backend": (["flash", *NOTHING], ["exact", "cudnn"]),
    "parallel mode": (["both", "", 1, True, ("row",)], [None, "row", "column"]),
    "group": ([0, "tp", True, (0,), object()], [None]),
    "ranks": ([0, "0", (), [0, 1], [0.5], [True], torch.zeros(1)], [None, [0], (3,)]),
    "stream": ([0, "stream", True, object()], [None]),
    "communication": (NOTHING, ["p2p", "all_gather", "a2a", "a2a+p2p"]),
    "scale": ([0, -1.0, NAN, INF, "1", True, (1.0,), 1e31, torch.tensor(1.0)], [None, 0.5, 2, np.float32(0.5)]),
    "scale of its own": ([None, 0, -1.0, NAN, INF, "1", True, (1.0,), 1e31, torch.tensor(1.0)], [1e-6, np.float32(1)]),
    "split": (
        [
            "qkv", 3, (), {}, ("q", "q"), ("q", "q_"), {"q": 32.0}, {"q": "32"}, {"q": -16, "k": 48}, {1: 32}, (1, 2),
            ("a.b", "c"), ("", "c"), {"q": 16}, ("q", "k", "v"), ("layer_norm", "k"), {"q": 32, "k": 0}, True, {"q"},
        ],
        [None, ("q", "k"), ["q_", "k_"], {"q": 16, "k": np.int64(16)}],
    ),
}  # fmt: skip
ARGUMENTS = {
    "size": "in_features out_features ffn_hidden_size num_attention_heads hidden_size normalized_shape",
    "flag or none": "return_max_logit",
    "size or none": "num_gqa_groups layer_number seq_length micro_batch_size",
    "head or none": "kv_channels",
    "flag": "bias return_bias zero_centered_gamma return_layernorm_output input_layernorm output_layernorm "
    "fuse_qkv_params qkv_weight_interleaved rotary_pos_interleaved apply_residual_connection_post_layernorm "
    "checkpoint fuse_wgrad_accumulation sequence_parallel set_parallel_mode qk_norm_before_rope "
    "parallel_attention_mlp delay_wgrad_compute save_original_input",
    "probability": "attention_dropout hidden_dropout",
    "share": "drop_path_rate",
    "epsilon": "eps layernorm_epsilon",
    "function": "init_method output_layer_init_method",
    "rng": "get_rng_state_tracker",
    "name": "name ub_name rng_tracker_name",
    "dtype": "params_dtype dtype",
    "device": "device",
    "mask type": "attn_mask_type self_attn_mask_type enc_dec_attn_mask_type",
    "activation": "activation",
    "activation params": "activation_params",
    "normalization": "normalization",
    "qk norm": "qk_norm_type",
    "format": "qkv_format attn_input_format",
    "attention type": "attention_type",
    "layer type": "layer_type",
    "backend": "attention_backend",
    "parallel mode": "parallel_mode",
    "group": "tp_group cp_group",
    "ranks": "cp_global_ranks",
    "stream": "cp_stream",
    "communication": "cp_comm_type",
    "scale": "softmax_scale",
    "scale of its own": "qk_norm_eps",
    "split": "parameters_split",
}
KIND_OF = {name: kind for kind, names in ARGUMENTS.items() for name in names.split()}
CASES = [
    (layer, name, KIND_OF[name])
    for layer, (kind, _) in LAYERS.items()
    for name in inspect.signature(kind).parameters
    if name in KIND_OF
]


OF_A_NORM = ("return_layernorm_output", "layernorm_epsilon", "zero_centered_gamma", "normalization")
OFF: list[tuple[str, dict[str, Any], str]] = [
    # a layer, a setting of a part that is switched off, the sentence
    ("MultiheadAttention", {"layernorm_epsilon": 1e-6}, "layernorm_epsilon=1e-06 with input_layernorm=False, where"),
    ("MultiheadAttention", {"normalization": "RMSNorm"}, "normalization='RMSNorm' with input_layernorm=False, where"),
    ("MultiheadAttention", {"zero_centered_gamma": True}, "zero_centered_gamma=True with input_layernorm=False, where"),
    ("MultiheadAttention", {"qk_norm_before_rope": True}, "qk_norm_before_rope=True with qk_norm_type=None, where"),
    ("TransformerLayer", {"qk_norm_before_rope": True}, "qk_norm_before_rope=True with qk_norm_type=None, where"),
    (
        "TransformerLayer", {"enc_dec_attn_mask_type": "causal"},
        "enc_dec_attn_mask_type='causal' with layer_type='encoder', where nothing reads it; 'no_mask' is accepted, or",
    ),
    ("TransformerLayer", {"enc_dec_window_size": (2, 0)}, r"enc_dec_window_size=(2, 0) with layer_type='encoder', "),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "setting", "sentence"), OFF)
def test_a_setting_of_what_is_switched_off(layer: str, setting: dict[str, Any], sentence: str) -> None:
    make, given = LAYERS[layer]
    with pytest.raises(ValueError, match="^" + re.escape(f"{layer}: {sentence}")):
        make(**given, **setting)


def test_settings_that_say_that_something_is_off() -> None:
    """The defaults in other words, and what Transformer Engine's programs always give, are accepted."""
    make, given = LAYERS["TransformerLayer"]
    make(**given, enc_dec_window_size=(-1, -1), enc_dec_attn_mask_type="no_mask", qk_norm_before_rope=False)
    make(**given, output_layernorm=True, normalization="RMSNorm", layernorm_epsilon=1e-6, zero_centered_gamma=True)
    make, given = LAYERS["MultiheadAttention"]
    made: Any = make(**{**given, "fuse_qkv_params": False, "layernorm_epsilon": np.float64(1e-5), "qk_norm_eps": 1e-5})
    assert made.qkv_weight_interleaved is False  # as in Transformer Engine


@pytest.mark.parametrize(("layer", "name", "kind"), CASES)
def test_each_argument(layer: str, name: str, kind: str) -> None:
    make, given = LAYERS[layer]
    kind = "heads" if (layer, name) == ("DotProductAttention", "kv_channels") else kind
    if (layer, name) in (("LayerNorm", "hidden_size"), ("RMSNorm", "hidden_size")):
        given = META  # it is the older name of normalized_shape
    if name == "activation_params":
        given = {**given, "activation": "clamped_swiglu"}
    # Settings of parts that these switch on.
    if layer == "MultiheadAttention" and name in OF_A_NORM:
        given = {**given, "input_layernorm": True}
    if name == "qk_norm_before_rope":
        given = {**given, "qk_norm_type": "RMSNorm"}
    if name == "enc_dec_attn_mask_type":
        given = {**given, "layer_type": "decoder"}
    if (layer, name) == ("MultiheadAttention", "fuse_qkv_params"):
        given = {**given, "qkv_weight_interleaved": False}
    refused, taken = KINDS[kind]
    if name == "normalized_shape":  # may be a tuple of one
        refused = [value for value in refused if not isinstance(value, (tuple, list))]
    if name == "sequence_parallel" and layer in ("LayerNorm", "RMSNorm"):  # None is its default
        refused = [value for value in refused if value is not None]
    if given is META:  # one of both is needed
        refused = [value for value in refused if value is not None and not isinstance(value, (tuple, list))]
    if name == "hidden_size" and "num_attention_heads" in given:
        taken = [512, np.int64(1024)]
    for value in refused:
        random = torch.get_rng_state()
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
            make(**{**given, name: value})
        text = str(error.value)
        assert text.startswith(f"{layer}: "), (value, text)
        assert f"{name}=" in text, (value, text)
        assert text.endswith("."), (value, text)
        assert torch.equal(random, torch.get_rng_state())
    for value in taken:
        if (name, value) not in (("fuse_wgrad_accumulation", True), ("output_layernorm", True)):
            made = make(**{**given, name: value})
            repr(made)


def test_numpys_numbers_become_pythons() -> None:
    """So that nothing later meets an integer that is no int."""
    layer = te.TransformerLayer(
        np.int64(32), np.int32(64), np.int8(2), np.uint8(1), np.float32(1e-5), np.float32(0.5), np.float16(0.5)
    )
    numbers = [
        value
        for part in layer.modules()
        for name, value in part.__dict__.items()
        if isinstance(value, (int, float, np.generic)) and not isinstance(value, bool)
    ]
    assert len(numbers) > 10
    assert {type(number) for number in numbers} == {int, float}


def test_arguments_that_do_not_go_together() -> None:
    for make, sentence in (
        (lambda: te.LayerNorm(16, hidden_size=16), "normalized_shape=16 and hidden_size=16, its older name"),
        (lambda: te.LayerNorm((4, 4)), r"normalized_shape=\(4, 4\); one dimension"),
        (
            lambda: te.LayerNorm(16, params_dtype=torch.float16, dtype=torch.bfloat16),
            "params_dtype=torch.float16 and dtype=torch.bfloat16",
        ),
        (lambda: te.MultiheadAttention(60, 4), "hidden_size=60 with num_attention_heads=4; a quotient that is a mult"),
        (lambda: te.TransformerLayer(64, 64, 4, 3), "TransformerLayer: num_gqa_groups=3 with num_attention_heads=4"),
        (
            lambda: te.TransformerLayer(2048, 64, 4),
            "TransformerLayer: hidden_size=2048 with num_attention_heads=4; a quotient",
        ),
        (lambda: te.MultiheadAttention(64, 4, num_gqa_groups=3), "num_gqa_groups=3 with num_attention_heads=4"),
        (lambda: te.DotProductAttention(4, 16, num_gqa_groups=8), "num_gqa_groups=8 with num_attention_heads=4"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()
    assert te.LayerNorm([16], dtype=torch.float16, params_dtype=torch.float16).weight.dtype == torch.float16
    assert te.LayerNorm(torch.Size([16])).weight.shape == (16,)


def test_torchs_default_dtype_has_to_be_one_of_ours() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(TypeError, match=r"Linear: params_dtype=torch.float64; float32, bfloat16 and float16"):
            te.Linear(16, 16)
    finally:
        torch.set_default_dtype(torch.float32)


# Of numbers that words alone say: the least and the most of fp32, as `reference.arguments` rounds them.
IN_WORDS = {
    "a positive finite number of fp32": "1e-45 3.4e38",
    "a finite number of fp32, at least 0": "0 3.4e38",
    "a finite number of fp32": "-3.4e38 3.4e38",
    "te.DType.kFloat8E4M3 and te.DType.kFloat8E5M2": "7 8",
}
OF_NUMBERS = {rule.accepted: rule for rule in RULES.values() if rule.of_type(1) and re.search(r"[1-9]", rule.accepted)}
PROBED = sorted({sign * base**power for sign in (1, -1) for base in (2, 3, 10) for power in range(64)} | {0})


@pytest.mark.parametrize("rule", OF_NUMBERS.values(), ids=list(OF_NUMBERS))
def test_the_numbers_in_a_rules_words_are_where_it_ends(rule: Rule) -> None:
    """It changes its mind at each of them, and nowhere else."""
    words, whole = rule.accepted, not rule.of_type(0.5)
    for phrase, numbers in IN_WORDS.items():
        words = words.replace(phrase, numbers)
    multiple = re.search(r"a multiple of (\d+) from (\d+) to (\d+)", words)
    if multiple:
        step, least, most = map(int, multiple.groups())
        assert [x for x in range(-20, 2 * most) if rule.fits(x)] == list(range(least, most + 1, step))
        return
    stated = [int(one) if whole else float(one) for one in re.findall(r"(?<!\w)-?\d+(?:\.\d+)?(?:e-?\d+)?", words)]

    def minds(x: float) -> int:
        """How many there are among a number and its neighbours."""
        near = [int(x) - 1, int(x), int(x) + 1] if whole else [math.nextafter(x, -INF), x, math.nextafter(x, INF)]
        return len(set(map(rule.fits, near)))

    assert stated
    for x in stated:
        assert minds(x) == 2, x
    for x in PROBED:
        assert minds(x) == 1 or any(abs(x - one) <= (1 if whole else 0) for one in stated), x
    assert whole or not rule.fits(NAN)
