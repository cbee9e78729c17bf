"""What the arguments of `TransformerLayer` and of its forward do, and what they refuse."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared.transformer_layers import RECIPE, layer_of, numbers

import reference as te
from reference.nn.transformer import halves
from reference.ops import library


def reached(layer: torch.nn.Module, name: str) -> dict[str, Any]:
    """The value of an attribute in every submodule that has it, by the submodule's name."""
    return {path: getattr(part, name) for path, part in layer.named_modules() if path and name in vars(part)}


QKV, QUERY, MLP = "self_attention.layernorm_qkv", "inter_attention.layernorm_query", "layernorm_mlp"
DECODER = {"layer_type": "decoder"}
OUT_NORM = {"output_layernorm": True}
LINEARS = {QKV, QUERY, MLP, "self_attention.proj", "inter_attention.proj", "inter_attention.key_value"}
CORES = {"self_attention.core_attention", "inter_attention.core_attention"}


@pytest.mark.parametrize(
    ("settings", "attribute", "value", "where"),
    [
        ({"layernorm_epsilon": 1e-3, **DECODER}, "eps", 1e-3, {QKV, QUERY, MLP}),
        ({"layernorm_epsilon": 1e-3, **OUT_NORM}, "eps", 1e-3, {MLP, "layernorm"}),
        ({"zero_centered_gamma": True, **DECODER}, "zero_centered_gamma", True, {QKV, QUERY, MLP}),
        ({"zero_centered_gamma": True, **OUT_NORM}, "zero_centered_gamma", True, {MLP, "layernorm"}),
        ({"normalization": "RMSNorm", **DECODER}, "kind", "rmsnorm", {QKV, QUERY, MLP}),
        ({"attention_dropout": 0.3, **DECODER}, "attention_dropout", 0.3, CORES),
        ({"kv_channels": 8, **DECODER}, "kv_channels", 8, CORES),
        ({"num_gqa_groups": 2, **DECODER}, "num_gqa_groups", 2, {*CORES, "self_attention", "inter_attention"}),
        ({"attn_input_format": "bshd", **DECODER}, "qkv_format", "bshd", {*CORES, "self_attention", "inter_attention"}),
        (
            {"fuse_wgrad_accumulation": True, "fuse_qkv_params": True, **DECODER},
            "fuse_wgrad_accumulation",
            True,
            LINEARS,
        ),
        ({"bias": False, **DECODER}, "use_bias", False, LINEARS),
        ({"activation": "swiglu"}, "activation", "swiglu", {MLP}),
        ({"rotary_pos_interleaved": True}, "rotary_pos_interleaved", True, {"self_attention"}),
        (
            {"self_attn_mask_type": "no_mask"},
            "attn_mask_type",
            "no_mask",
            {"self_attention", "self_attention.core_attention"},
        ),
    ],
)
def test_arguments_reach_every_part(settings: dict[str, Any], attribute: str, value: Any, where: set[str]) -> None:
    found = reached(te.TransformerLayer(64, 128, 4, **settings), attribute)
    assert {path for path, one in found.items() if one == value} == where


def test_qkv_weights_may_be_interleaved_or_not(same_bits) -> None:
    """Heads of q, k and v in turn, or all of q before all of k: the same layer, its rows in another order."""
    x, (one, other) = (
        numbers(1, 24, 2, 64).bfloat16(),
        (layer_of(fuse_qkv_params=True, qkv_weight_interleaved=interleaved) for interleaved in (True, False)),
    )
    other.load_state_dict(one.state_dict())
    qkv, mixed = other.self_attention.layernorm_qkv, one.self_attention.layernorm_qkv
    with torch.no_grad():
        for name in ("weight", "bias"):
            heads = mixed.get_parameter(name).unflatten(0, (4, 3, 16))
            qkv.get_parameter(name).copy_(heads.transpose(0, 1).flatten(0, 2))
    same_bits(one(x), other(x))
    assert not torch.equal(qkv.weight, mixed.weight)


def test_weights_are_drawn_by_their_methods_inside_the_tracker() -> None:
    inside: list[bool] = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name: str = "") -> Iterator[None]:
            inside.append(True)
            yield
            inside.pop()

    def method(value: float) -> Any:
        def fill(weight: torch.Tensor) -> None:
            assert inside == [True]
            torch.nn.init.constant_(weight, value)

        return fill

    layer = te.TransformerLayer(
        64,
        128,
        4,
        init_method=method(1.0),
        output_layer_init_method=method(2.0),
        get_rng_state_tracker=Tracker,
        layer_type="decoder",
    )
    for name, p in layer.named_parameters():
        if name.endswith("weight") and not name.endswith("norm_weight"):
            assert bool((p == (2.0 if "proj" in name or "fc2" in name else 1.0)).all()), name


def test_microbatches_reach_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decoder, whose parts are modules, of an encoder in halves, as one, and with a hook on its MLP."""
    for small, kind in ((0, "decoder"), (0, "encoder"), (1 << 25, "encoder"), (0, "hooked"), (0, "post-norm")):
        monkeypatch.setattr(halves, "SMALL", small)
        layer = layer_of(
            layer_type="decoder" if kind == "decoder" else "encoder",
            apply_residual_connection_post_layernorm=kind == "post-norm",
        )
        if kind == "hooked":
            layer.layernorm_mlp.register_forward_hook(lambda module, inputs, out: None)
        x = numbers(1, 24, 2, 64).bfloat16().requires_grad_()
        parts = [part for part in layer.modules() if hasattr(part, "_store")]
        parts = [part for part in parts if part.fp8_weights]
        for first in (None, True):
            with te.autocast(recipe=RECIPE):
                layer(x, encoder_output=x if kind == "decoder" else None, is_first_microbatch=first)
            assert [len(part._store.casts) for part in parts] == [
                0 if first is None else len(part.roles.gemms) for part in parts
            ], (kind, first)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"layer_type": "both"}, ValueError, "layer_type='both'; one of"),
        (
            {"parallel_attention_mlp": True, "layer_type": "decoder"},
            ValueError,
            "TransformerLayer: parallel_attention_mlp=True with layer_type='decoder'; 'encoder' is accepted.",
        ),
        (
            {"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True},
            ValueError,
            "parallel_attention_mlp=True with apply_residual_connection_post_layernorm=True; False is accepted.",
        ),
        (
            {"parallel_attention_mlp": True, "output_layernorm": True},
            ValueError,
            "parallel_attention_mlp=True with output_layernorm=True; False is accepted.",
        ),
        ({"drop_path_rate": 1.1}, ValueError, "drop_path_rate=1.1; a number from 0 to 1 is accepted"),
        ({"hidden_dropout": 1.5}, ValueError, "hidden_dropout=1.5; 0 <= p < 1"),
        ({"sequence_parallel": 1}, TypeError, "sequence_parallel=1; True and False are accepted"),
        ({"activation": "tanh"}, ValueError, "activation='tanh'"),
    ],
)
def test_constructor_refusals(arguments: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        layer_of(**arguments)


def test_transformer_engines_arguments_keep_their_places(same_bits) -> None:
    layer, x = layer_of(), numbers(4, 8, 2, 64).bfloat16()
    same_bits(
        layer(x, None, "causal", None, None, None, None, None, None, None, None, False, None, None, "no_bias"), layer(x)
    )
    with pytest.raises(
        ValueError, match=r"TransformerLayer: window_size=\(-1, 4\) with self_attn_mask_type='causal'; "
    ):
        layer(x, None, "causal", (-1, 4))
    with pytest.raises(ValueError, match="alibi_slopes with core_attention_bias_type='no_bias'"):
        layer(x, alibi_slopes=torch.ones(4))


@pytest.mark.parametrize("small", [0, 1 << 25])
def test_a_mask_type_of_forward_replaces_the_layers(small: int, same_bits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "SMALL", small)
    x, other = numbers(4, 8, 2, 64).bfloat16(), numbers(5, 8, 2, 64).bfloat16()
    for settings in ({}, {"output_layernorm": True}, {"layer_type": "decoder", "enc_dec_attn_mask_type": "causal"}):
        causal, full = layer_of(**settings), layer_of(**settings, self_attn_mask_type="no_mask")
        arguments = {"encoder_output": other} if "layer_type" in settings else {}
        same_bits(causal(x, self_attn_mask_type="no_mask", **arguments), full(x, **arguments))
        same_bits(full(x, self_attn_mask_type="causal", **arguments), causal(x, **arguments))
        assert not torch.equal(full(x, **arguments), causal(x, **arguments))
    decoder = layer_of(layer_type="decoder")
    across = layer_of(layer_type="decoder", enc_dec_attn_mask_type="causal")
    found = decoder(x, encoder_output=other, enc_dec_attn_mask_type="causal")
    same_bits(found, across(x, encoder_output=other))
    assert not torch.equal(found, decoder(x, encoder_output=other))
    mask = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    mask[1, ..., 5:] = True
    masked = decoder(
        x, encoder_output=other, enc_dec_attn_mask=(torch.zeros_like(mask), mask), enc_dec_attn_mask_type="padding"
    )
    shorter = decoder(x[:, 1:], encoder_output=other[:5, 1:])
    same_bits(masked[:, 1:], shorter)


@pytest.mark.parametrize("settings", [{}, {"layer_type": "decoder"}, {"output_layernorm": True}])
@pytest.mark.parametrize("small", [0, 1 << 25])
def test_nothing_is_dropped_in_evaluation(
    settings: dict[str, Any], small: int, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "SMALL", small)
    x = numbers(4, 8, 2, 64).bfloat16()
    arguments = {"encoder_output": x} if "layer_type" in settings else {}
    dropping = layer_of(**settings, hidden_dropout=0.3, attention_dropout=0.3)
    expected = layer_of(**settings)(x, **arguments)
    assert not torch.equal(dropping(x, **arguments), expected)
    same_bits(dropping.eval()(x, **arguments), expected)
    for rate in ("hidden_dropout", "attention_dropout"):
        assert not torch.equal(layer_of(**settings, **{rate: 0.3})(x, **arguments), expected), rate


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_angles_reach_attention(layout: str, interleaved: bool, same_bits) -> None:
    """Of queries and keys, one for both or one each; the layer is its formula over its submodules with them."""
    layer = layer_of(rotary_pos_interleaved=interleaved, attn_input_format=layout)
    x = numbers(4, 8, 8, 64).bfloat16()
    one, other = numbers(5, 8, 1, 1, 16), numbers(6, 8, 1, 1, 16)
    found = []
    for angles in (None, one, (one, other), (other, one), (other, other)):
        y, bias = layer.self_attention(x, rotary_pos_emb=angles)
        h = x + (y + bias)
        y, bias = layer.layernorm_mlp(h)
        found.append(layer(x, rotary_pos_emb=angles))
        same_bits(found[-1], h + (y + bias))
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    same_bits(layer(x, rotary_pos_emb=(one, one)), found[1])


@pytest.mark.parametrize("settings", [{}, {"layer_type": "decoder"}])
def test_attention_alone_may_be_recomputed(
    settings: dict[str, Any], same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    attend = library.twin.attention
    monkeypatch.setattr(library.twin, "attention", lambda *args: (runs.append(1), attend(*args))[1])
    x, found = numbers(4, 8, 2, 64).bfloat16(), []
    arguments = {"encoder_output": x} if settings else {}
    for recompute in (False, True):
        layer, y = layer_of(**settings, attention_dropout=0.2), x.clone().requires_grad_()
        runs.clear()
        layer(y, checkpoint_core_attention=recompute, **arguments).float().square().sum().backward()
        assert len(runs) == (2 if settings else 1) * (2 if recompute else 1)
        found.append([y.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        same_bits(a, b)


def test_an_input_of_another_width_is_explained() -> None:
    for settings in ({}, {"output_layernorm": True}, {"layer_type": "decoder"}):
        x = numbers(4, 8, 2, 48).bfloat16()
        arguments = {"encoder_output": x} if "layer_type" in settings else {}
        with pytest.raises(ValueError, match=r"hidden_states has shape \[8, 2, 48\]; \[sequence, batch, 64\]"):
            layer_of(**settings)(x, **arguments)


def test_encoder_and_decoder_know_their_inputs() -> None:
    x = torch.zeros(4, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="layer_type='encoder' takes no encoder_output"):
        layer_of()(x, encoder_output=x)
    with pytest.raises(ValueError, match="layer_type='decoder' takes an encoder_output"):
        layer_of(layer_type="decoder")(x)


def test_an_encoder_has_no_cross_attention_to_tell() -> None:
    layer, x = layer_of(), numbers(4, 8, 2, 64).bfloat16()
    for name, value, shown in (
        ("enc_dec_attn_mask", torch.zeros(2, 1, 1, 8, dtype=torch.bool), "a tensor"),
        ("enc_dec_attn_mask_type", "causal", "'causal'"),
        ("enc_dec_window_size", (2, 0), r"\(2, 0\)"),
    ):
        with pytest.raises(ValueError, match=f"TransformerLayer: {name} is {shown} with layer_type='encoder'"):
            layer(x, **{name: value})


def test_an_attention_without_a_norm_cannot_return_its_output() -> None:
    with pytest.raises(ValueError, match="MultiheadAttention: return_layernorm_output=True with input_layernorm=False"):
        te.MultiheadAttention(64, 4, return_layernorm_output=True)
