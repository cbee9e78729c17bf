"""Attention where tensors have no numbers: a fake mode and the meta device give the shapes of a real run."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import reference as te
from reference.arguments import MASK_TYPES

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4, fp8_dpa=True)
HOW = ["one mask", "two masks", "lengths"]
PLACES: dict[str, Callable[[], Any]] = {"fake": FakeTensorMode, "meta": lambda: torch.device("meta")}
Shapes = list[tuple[torch.Size, torch.dtype]]


def ends(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bool)


def lengths(sequences: int, longest: int) -> torch.Tensor:
    return torch.arange(0, (sequences + 1) * longest, longest, dtype=torch.int32)


def masked(attn_mask_type: str, how: str, sq: int, skv: int) -> dict[str, Any]:
    """A forward's arguments for three sequences."""
    if attn_mask_type == "arbitrary":
        return {"attention_mask": ends(3, 1, sq, skv)}
    if "padding" not in attn_mask_type:
        return {}
    if how == "lengths":
        return {"cu_seqlens_q": lengths(3, sq), "cu_seqlens_kv": lengths(3, skv)}
    pair = (ends(3, 1, 1, sq), ends(3, 1, 1, skv))
    return {"attention_mask": pair if how == "two masks" else pair[0]}


def shapes_of(module: Any, given: list[torch.Tensor], fp8: bool, **more: Any) -> Shapes:
    """Shapes and dtypes of the output and of the gradients."""
    with te.autocast(enabled=fp8, recipe=RECIPE):
        y = module(*given, **more)
    y.float().sum().backward()
    tensors = [y, *(x.grad for x in given), *(p.grad for p in module.parameters())]
    return [(x.shape, x.dtype) for x in tensors]


def same_everywhere(place: str, run: Callable[[], Shapes]) -> None:
    with PLACES[place]():
        found = run()
    assert found == run()


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("attn_mask_type", MASK_TYPES)
def test_every_way_to_mask(attn_mask_type: str, place: str) -> None:
    ways = [(None, "no_bias"), ((4, 0), "no_bias"), (None, "alibi"), (None, "post_scale_bias")]
    for how, (window, bias) in itertools.product(HOW if "padding" in attn_mask_type else HOW[:1], ways):
        plain = window is None and bias == "no_bias"
        for dtype, fp8 in ((BF16, False), (torch.float32, False), (BF16, True))[: 3 if plain else 1]:

            def run() -> Shapes:
                core = te.DotProductAttention(2, 16, attn_mask_type=attn_mask_type, window_size=window)  # noqa: B023
                given = [torch.zeros(6, 3, 2, 16, dtype=dtype, requires_grad=True) for _ in range(3)]  # noqa: B023
                more = masked(attn_mask_type, how, 6, 6) | {"core_attention_bias_type": bias}  # noqa: B023
                if bias == "post_scale_bias":  # noqa: B023
                    more["core_attention_bias"] = torch.zeros(1, 2, 6, 6, dtype=dtype)  # noqa: B023
                return shapes_of(core, given, fp8, **more)  # noqa: B023

            same_everywhere(place, run)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("decoder", "how"), [(False, "one mask"), (False, "lengths"), (True, "two masks"), (True, "lengths")]
)
def test_layers_with_padding(decoder: bool, how: str, place: str) -> None:
    def run() -> Shapes:
        more: dict[str, Any] = masked("padding", "one mask" if how == "two masks" else how, 6, 6)
        if decoder:
            of_encoder = masked("padding", how, 6, 6)
            more["encoder_output"] = torch.zeros(6, 3, 32, dtype=BF16)
            more["enc_dec_attn_mask"] = of_encoder.get("attention_mask")
        mask_types: dict[str, Any] = {"self_attn_mask_type": "padding"}
        if decoder:
            mask_types |= {"layer_type": "decoder", "enc_dec_attn_mask_type": "padding"}
        layer = te.TransformerLayer(32, 64, 2, params_dtype=BF16, **mask_types)
        return shapes_of(layer, [torch.zeros(6, 3, 32, dtype=BF16, requires_grad=True)], False, **more)

    same_everywhere(place, run)


@pytest.mark.parametrize("place", PLACES)
def test_tokens_of_sequences_one_after_the_other(place: str) -> None:
    def run(longest: int | None = 6, padded: torch.Tensor | None = None, **more: Any) -> Shapes:
        core = te.DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal")
        given = [torch.zeros(18, 2, 16, dtype=BF16, requires_grad=True) for _ in range(3)]
        sizes = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        more |= {"cu_seqlens_q": lengths(3, 6), "cu_seqlens_kv": lengths(3, 6), "cu_seqlens_q_padded": padded}
        return shapes_of(core, given, False, **more, **sizes)

    same_everywhere(place, run)
    same_everywhere(place, lambda: run(pad_between_seqs=False, padded=lengths(3, 6)))
    where = {"fake": "in a fake mode", "meta": "on the meta device"}[place]
    sentence = f"^DotProductAttention: max_seqlen_q=None with qkv_format='thd' {where} is not offered: .* is accepted.$"
    with PLACES[place](), pytest.raises(NotImplementedError, match=sentence):
        run(None)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_rotations(layout: str, fused: bool, place: str) -> None:
    def run() -> Shapes:
        angles = te.RotaryPositionEmbedding(16)(6)
        t = torch.zeros(*((18,) if layout == "thd" else (6, 6)), 2, 16, dtype=BF16, requires_grad=True)
        more = {"cu_seqlens": lengths(3, 6)} if layout == "thd" else {}
        y = te.apply_rotary_pos_emb(t, angles, tensor_format=layout, fused=fused, **more)
        y.float().sum().backward()
        assert t.grad is not None
        return [(y.shape, y.dtype), (t.grad.shape, t.grad.dtype)]

    same_everywhere(place, run)


@pytest.mark.parametrize("place", PLACES)
def test_a_cache_of_keys_and_values(place: str) -> None:
    def run() -> Shapes:
        layer = te.TransformerLayer(32, 64, 2, layer_number=1, params_dtype=BF16).eval()
        cache = te.InferenceParams(3, 16, num_heads_kv=2, head_dim_k=16, dtype=BF16)
        cache.allocate_memory(1)
        cache.pre_step(dict.fromkeys(range(3), 4))
        with torch.no_grad():
            y = layer(torch.zeros(4, 3, 32, dtype=BF16), inference_params=cache)
        return [(y.shape, y.dtype)]

    same_everywhere(place, run)
