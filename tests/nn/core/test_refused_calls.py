"""A call that is refused has changed nothing: no amax, scale, history, random state or cached weight."""

from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.forward_cases import BF16, HEADS, HIDDEN, LAYERS, PADDING, RECIPE, X, assert_unchanged, describe, state

import reference as te
from reference.nn.core import checks
from reference.nn.transformer import halves


def refuse(layer: torch.nn.Module, good: dict[str, Any], bad: dict[str, Any]) -> None:
    """One sentence, which names an argument of `bad`, and nothing has changed."""
    what = ", ".join(f"{name}={describe(value)}"[:80] for name, value in bad.items())
    before = state(layer)
    try:
        layer(**{**good, **bad})
        text = "taken"
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        text = str(error)
    assert text.startswith(type(layer).__name__), f"{what}: {text}"
    assert text.endswith("."), f"{what}: {text}"
    assert any(name in text for name in bad), f"{what}: {text}"
    assert_unchanged(before, state(layer), what)


@pytest.mark.sample(8)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_refused_call_changes_nothing(name: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, good, bads = LAYERS[name]
    cached = {} if name in ("DotProductAttention", "LayerNorm", "RMSNorm") else {"is_first_microbatch": True}
    for small in (0, halves.SMALL) if name == "TransformerLayer" else (0,):
        monkeypatch.setattr(halves, "SMALL", small)
        fresh, used = make(), make()
        with te.autocast(enabled=fp8, recipe=RECIPE):
            used(**good, **cached)
            for bad in bads:
                refuse(fresh, good, bad)
                refuse(used, good, bad)


@pytest.mark.parametrize("name", LAYERS)
def test_the_good_calls_are_taken(name: str) -> None:
    make, good, _ = LAYERS[name]
    make()(**good)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("small", [0, halves.SMALL])
def test_sizes_that_fp8_does_not_take_are_seen_before_the_first_part_runs(
    small: int, hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "SMALL", small)
    for layer, name in (
        (te.TransformerLayer(HIDDEN, 72, HEADS, params_dtype=BF16), "ffn_hidden_size=72"),
        (te.TransformerLayer(HIDDEN, 64, 1, kv_channels=8, params_dtype=BF16), "out_features=24"),
        (te.MultiheadAttention(HIDDEN, 1, kv_channels=8, params_dtype=BF16), "out_features=24"),
    ):
        if hooked:
            next(layer.children()).register_forward_hook(lambda *_: None)
        layer(X)
        before = state(layer)
        with pytest.raises(ValueError, match=f"{name} under FP8 autocast"), te.autocast(recipe=RECIPE):
            layer(X)
        assert_unchanged(before, state(layer), name)


@pytest.mark.parametrize("make", [te.MultiheadAttention, te.TransformerLayer])
def test_what_cudnn_does_not_take_is_seen_before_the_first_part_runs(make: Any) -> None:
    sizes = (HIDDEN, HEADS) if make is te.MultiheadAttention else (HIDDEN, 64, HEADS)
    layer = make(*sizes, params_dtype=BF16, attention_backend="cudnn")
    padding = {"attn_mask_type" if make is te.MultiheadAttention else "self_attn_mask_type": "padding"}
    with te.autocast(recipe=RECIPE):
        for given, sentence in (
            ({}, "on cpu; 'cuda' is accepted"),
            ({**padding, "attention_mask": PADDING}, "with attn_mask_type='padding'"),
        ):
            before = state(layer)
            with pytest.raises((RuntimeError, ValueError), match=sentence):
                layer(X, **given)
            assert_unchanged(before, state(layer), sentence)
        with pytest.raises(TypeError, match=r"with torch\.float32; bfloat16 and float16 are accepted"):
            layer(X.float())
        assert_unchanged(before, state(layer), "fp32")


@pytest.mark.gpu
def test_more_heads_than_a_launch_takes_are_seen_before_the_first_part_runs() -> None:
    import optimized

    layer = optimized.TransformerLayer(16, 16, 1, params_dtype=BF16)
    with te.autocast(recipe=RECIPE):
        before = state(layer)
        with pytest.raises(
            ValueError, match="a batch of 65536 times num_attention_heads=1; a product of at most 65535"
        ):
            layer(torch.zeros(1, 65536, 16, dtype=BF16, device="cuda"))
        assert_unchanged(before, state(layer), "65536 heads")


def test_the_heads_of_all_sequences_count() -> None:
    here = torch.device("cuda")
    checks.check_grid("TransformerLayer", 255, 257, here)
    for batch, heads in ((256, 256), (1, 65536), (65536, 1), (1024, 65)):
        with pytest.raises(
            ValueError,
            match=f"TransformerLayer: a batch of {batch} times num_attention_heads={heads}; a product of at most 65535",
        ):
            checks.check_grid("TransformerLayer", batch, heads, here)


def test_what_a_pre_hook_brings_is_not_refused_beforehand() -> None:
    """A part whose weights are elsewhere until it runs."""
    layer = te.TransformerLayer(HIDDEN, 64, HEADS, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0)
    expected, part = layer(X), layer.layernorm_mlp
    weights = dict(part._parameters)
    part._parameters.update({name: torch.nn.Parameter(p.detach().to("meta")) for name, p in weights.items()})
    part.register_forward_pre_hook(lambda module, _: module._parameters.update(weights))
    assert part.fc1_weight.is_meta
    assert_same_bits(layer(X), expected)
