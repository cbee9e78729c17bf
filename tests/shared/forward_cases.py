"""Calls of forwards that are refused, and the state that they must not change."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from shared.bits import assert_same_bits

import reference as te
from reference.support.nested import tensors_of

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
HIDDEN, HEADS, TOKENS, BATCH = 32, 2, 6, 2


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


LAYOUTS = (torch.strided, torch.jagged)
X = numbers(TOKENS, BATCH, HIDDEN)
OTHER = numbers(5, BATCH, HIDDEN)
Q = numbers(TOKENS, BATCH, HEADS, 16)
PADDING = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool)
ARBITRARY = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
ANGLES = torch.zeros(TOKENS, 1, 1, 16)


def not_dense(x: torch.Tensor) -> list[torch.Tensor]:
    """Sparse, nested and masked ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes
        nested = [torch.nested.as_nested_tensor(list(x.unbind()), layout=layout) for layout in LAYOUTS]
        return [x.to_sparse(), *nested, torch.masked.masked_tensor(x.float(), x > 0)]


def bad_activations(x: torch.Tensor) -> list[Any]:
    """What takes the place of an activation, and is none."""
    return [
        None, "x", 1.0, [1.0], x.tolist(), x.float().numpy(), x.double(), x.long(), x.bool(), x.to(torch.complex64),
        x.to("meta"), *not_dense(x), x[..., :-1], x.new_zeros(()),
    ]  # fmt: skip


def bad_hidden(x: torch.Tensor) -> list[Any]:
    return [*bad_activations(x), x[0], x[None], x.flatten(0, 1)]


def bad_masks() -> list[dict[str, Any]]:
    """With their types, as `attention_mask` and `attn_mask_type`."""
    wrong: list[tuple[str, Any]] = [
        ("padding", None), ("padding", PADDING.float()), ("padding", PADDING[..., :-1]), ("padding", PADDING[0]),
        ("padding", PADDING.expand(BATCH, 1, TOKENS, TOKENS)), ("padding", PADDING.repeat(2, 1, 1, 1)),
        ("padding", PADDING.to("meta")), ("padding", PADDING.tolist()), ("padding", (PADDING,)),
        ("padding", not_dense(PADDING)[1]), ("arbitrary", not_dense(PADDING)[1]), ("padding", PADDING.to_sparse()),
        ("padding", (PADDING, PADDING, PADDING)), ("padding", (PADDING, None)), ("padding_causal", "mask"),
        ("causal,padding", PADDING.long()), ("padding_causal_bottom_right", (PADDING, PADDING[..., 2:])),
        ("arbitrary", None), ("arbitrary", (ARBITRARY, ARBITRARY)), ("arbitrary", ARBITRARY[0]),
        ("arbitrary", ARBITRARY.half()), ("arbitrary", ARBITRARY[:, :, :-1]), ("arbitrary", ARBITRARY.to("meta")),
        ("arbitrary", ARBITRARY.repeat(3, 1, 1, 1)), ("arbitrary", ARBITRARY.to_sparse()),
        ("arbitrary", ARBITRARY.repeat(1, 3, 1, 1)), ("diagonal", None), ("", None), (3, None), (["causal"], None),
    ]  # fmt: skip
    return [{"attention_mask": mask, "attn_mask_type": kind} for kind, mask in wrong]


def bad_angles() -> list[Any]:
    return [
        "x", 1.0, ANGLES.half(), ANGLES[:-1], ANGLES.repeat(1, 1, 1, 2), ANGLES[..., :15], ANGLES.to("meta"), (ANGLES,),
        *not_dense(ANGLES)[:2], (ANGLES, None), (ANGLES, ANGLES, ANGLES), (ANGLES, ANGLES[:2]), torch.zeros(()),
        [ANGLES, ANGLES],
    ]  # fmt: skip


def each(name: str, values: list[Any]) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def renamed(calls: list[dict[str, Any]], **names: str) -> list[dict[str, Any]]:
    return [{names.get(name, name): value for name, value in call.items()} for call in calls]


SHARED = [
    *each("is_first_microbatch", [0, 1, "yes", torch.tensor(True)]),
    *each("checkpoint_core_attention", [1, "yes", torch.ones(2)]),
    *each("window_size", [(-1, 3), (-2, 0), (4,), (4, 0, 0), (4.0, 0), (True, 0), [-1, -1], -1, torch.ones(2)]),
    *each("alibi_slopes", [torch.ones(2)]),
    *each("core_attention_bias", [torch.zeros(1, 1, 6, 6)]),
    *each("cu_seqlens_q", [torch.tensor([0, 6, 9]), torch.tensor([0, 6], dtype=torch.int32), "no"]),
    *each("max_seqlen_kv", [0, 7, "no"]),
    *(
        {"core_attention_bias_type": "alibi", "alibi_slopes": wrong}
        for wrong in (torch.ones(3), "no", torch.ones(2, 3))
    ),
    {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 1, 3, 3)},
    *each("core_attention_bias_type", ["pre_scale_bias", "post_scale_bias", None, 3]),
    *each("softcap", [1.0, "no"]),
    *each("inference_params", [{}]),
]
MIDDLE = SHARED[:4]
Case = tuple[Callable[[], torch.nn.Module], dict[str, Any], list[dict[str, Any]]]
LAYERS: dict[str, Case] = {
    "Linear": (
        lambda: te.Linear(HIDDEN, 48, params_dtype=BF16),
        {"inp": X},
        [*each("inp", bad_activations(X)), *MIDDLE, *each("fp8_output", [True]), *each("fp8_grad", [1])],
    ),
    "LayerNorm": (lambda: te.LayerNorm(HIDDEN, params_dtype=BF16), {"input": X}, each("input", bad_activations(X))),
    "RMSNorm": (lambda: te.RMSNorm(HIDDEN, params_dtype=BF16), {"input": X}, each("input", bad_activations(X))),
    "LayerNormLinear": (
        lambda: te.LayerNormLinear(HIDDEN, 48, params_dtype=BF16),
        {"inp": X},
        [*each("inp", bad_activations(X)), *MIDDLE, *each("fp8_output", [True]), *each("fp8_grad", [1])],
    ),
    "LayerNormMLP": (
        lambda: te.LayerNormMLP(HIDDEN, 64, params_dtype=BF16),
        {"inp": X},
        [*each("inp", bad_activations(X)), *MIDDLE],
    ),
    "DotProductAttention": (
        lambda: te.DotProductAttention(HEADS, 16, attention_dropout=0.1),
        {"query_layer": Q, "key_layer": Q, "value_layer": Q},
        [
            *(
                {name: value}
                for name in ("query_layer", "key_layer", "value_layer")
                for value in [*bad_activations(Q), Q[0], Q.half(), Q.float(), Q[:, :1], Q[:, :, :1], Q[..., :8]]
            ),
            *each("key_layer", [Q[1:]]),
            {"key_layer": Q[..., :8], "value_layer": Q[..., :8]},
            {"key_layer": Q[:, :1], "value_layer": Q[:, :1]},
            {"query_layer": None, "key_layer": None, "value_layer": None},
            {"query_layer": X, "key_layer": X, "value_layer": X},
            *bad_masks(),
            *each("qkv_format", ["thd", 3, "", ["sbhd"]]),
            *SHARED[4:],
        ],
    ),
    "MultiheadAttention": (
        lambda: te.MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, params_dtype=BF16),
        {"hidden_states": X},
        [
            *each("hidden_states", bad_hidden(X)),
            *bad_masks(),
            *each("rotary_pos_emb", bad_angles()),
            *each("encoder_output", [X]),
            *SHARED,
        ],
    ),
    "MultiheadAttention, cross": (
        lambda: te.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", params_dtype=BF16),
        {"hidden_states": X, "encoder_output": OTHER, "attn_mask_type": "no_mask"},
        [
            *each("hidden_states", bad_hidden(X)),
            *each("encoder_output", [*bad_hidden(OTHER), OTHER.half(), OTHER.float(), OTHER[:, :1]]),
            *bad_masks(),
            {"attn_mask_type": "padding", "attention_mask": PADDING},
            *each("rotary_pos_emb", bad_angles()),
            *SHARED,
        ],
    ),
    "TransformerLayer": (
        lambda: te.TransformerLayer(HIDDEN, 64, HEADS, params_dtype=BF16),
        {"hidden_states": X},
        [
            *each("hidden_states", bad_hidden(X)),
            *renamed(bad_masks(), attn_mask_type="self_attn_mask_type"),
            *each("rotary_pos_emb", bad_angles()),
            *each("encoder_output", [X]),
            *each("enc_dec_window_size", [(-2, 0), [-1, -1], 3]),
            *SHARED,
        ],
    ),
    "TransformerLayer, decoder": (
        lambda: te.TransformerLayer(HIDDEN, 64, HEADS, params_dtype=BF16, layer_type="decoder"),
        {"hidden_states": X, "encoder_output": OTHER},
        [
            *each("hidden_states", bad_hidden(X)),
            *each("encoder_output", [*bad_hidden(OTHER), OTHER.half(), OTHER.float(), OTHER[:, :1]]),
            *renamed(bad_masks(), attn_mask_type="self_attn_mask_type"),
            *renamed(bad_masks(), attn_mask_type="enc_dec_attn_mask_type", attention_mask="enc_dec_attn_mask"),
            {"enc_dec_attn_mask_type": "padding", "enc_dec_attn_mask": PADDING},
            *each("enc_dec_window_size", [(4, -1), (-1, 3), (-2, 0), [-1, -1], torch.ones(2)]),
            *each("rotary_pos_emb", bad_angles()),
            *SHARED,
        ],
    ),
}


def state(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that a forward may change, copied."""
    found = {"torch": torch.get_rng_state()}
    for name, part in layer.named_modules():
        metas = getattr(part, "fp8_meta", {})
        for key in ("scaling_fwd", "scaling_bwd"):
            if key in metas:
                found |= {f"{name}.{key}.scale": metas[key].scale, f"{name}.{key}.history": metas[key].amax_history}
        for weight, operand in (part._store.casts if hasattr(part, "_store") else {}).items():
            found |= {f"{name}.{weight}.{i}": t for i, t in enumerate(tensors_of(operand))}
        if isinstance(getattr(part, "state", None), torch.Tensor):
            found[f"{name}.random"] = part.state
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], what: str) -> None:
    assert before.keys() == after.keys(), what
    for name, tensor in before.items():
        assert_same_bits(tensor, after[name], f"{name} after {what}")


def describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return repr(value)
    return f"{value.dtype} {list(value.shape)} {value.layout} {value.device}"
