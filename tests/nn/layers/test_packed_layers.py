"""Layers over packed sequences ("thd"): each sequence has the outputs and gradients that it has alone, in every bit."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits

import reference as te

BF16 = torch.bfloat16
COUNTS, OTHERS, GAPS = [37, 1, 0, 130], [5, 140, 3, 129], [3, 0, 2, 1]
ALONE = {"padding": "no_mask", "padding_causal": "causal", "padding_causal_bottom_right": "causal_bottom_right"}


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).to(BF16)


def ends(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def spans(counts: list[int], starts: list[int]) -> list[slice]:
    return [slice(start, start + count) for start, count in zip(starts, counts, strict=False)]


def layer_of(kind: str, layout: str, masks: tuple[str, str], library: Any = te, **more: Any) -> Any:
    """A layer of 4 heads of 16 channels, with the same weights for the same kind."""
    torch.manual_seed(3)
    settings: dict[str, Any] = {"params_dtype": BF16, "attention_dropout": 0.0, "num_gqa_groups": 2, **more}
    if kind in ("encoder", "decoder"):
        settings |= {"attn_input_format": layout, "layer_type": kind, "self_attn_mask_type": masks[0]}
        settings |= {"enc_dec_attn_mask_type": masks[1]} if kind == "decoder" else {}
        return library.TransformerLayer(64, 96, 4, hidden_dropout=0.0, **settings)
    settings |= {"qkv_format": layout, "attn_mask_type": masks[0], "input_layernorm": True}
    return library.MultiheadAttention(64, 4, attention_type=kind, **settings)


def trained(layer: Any, x: torch.Tensor, grad: torch.Tensor, **more: Any) -> list[torch.Tensor]:
    """y, dx, and the gradient of the encoder's output, if there is one."""
    x = x.clone().requires_grad_()
    source = more.get("encoder_output")
    if source is not None:
        more["encoder_output"] = source = source.clone().requires_grad_()
    y = layer(x, **more)
    y.backward(grad)
    return [y.detach(), x.grad, *([] if source is None else [source.grad])]  # type: ignore[list-item]


@pytest.mark.sample(4)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("masks", [("padding", "padding"), ("padding_causal", "padding_causal_bottom_right")])
@pytest.mark.parametrize("kind", ["self", "cross", "encoder", "decoder"])
def test_packed_sequences_are_sequences_alone(kind: str, masks: tuple[str, str], gaps: bool, recomputes: bool) -> None:
    pads = GAPS if gaps else [0] * 4
    own, other = (ends([n + pad for n, pad in zip(some, pads, strict=True)]) for some in (COUNTS, OTHERS))
    x, grad, source = numbers(1, int(own[-1]), 64), numbers(2, int(own[-1]), 64), numbers(4, int(other[-1]), 64)
    crosses = kind in ("cross", "decoder")
    settings = {"qkv_weight_interleaved": gaps, "fuse_qkv_params": True}
    angles = torch.rand(200, 1, 1, 16, generator=torch.Generator().manual_seed(5))
    shared: dict[str, Any] = {"checkpoint_core_attention": recomputes, "rotary_pos_emb": angles}
    more = {**shared, "cu_seqlens_q": ends(COUNTS), **({"cu_seqlens_kv": ends(OTHERS)} if crosses else {})}
    if kind == "self":
        more["cu_seqlens_kv"] = more["cu_seqlens_q"]
    if gaps:
        more["cu_seqlens_q_padded"] = own
        more |= {"cu_seqlens_kv_padded": other} if crosses else {}
        more |= {"cu_seqlens_kv_padded": own} if kind == "self" else {}
    if crosses:
        more["encoder_output"] = source
    found = trained(layer_of(kind, "thd", masks, **settings), x, grad, **more)
    more |= {"max_seqlen_q": 133, **({"max_seqlen_kv": 150} if kind != "encoder" else {})}
    for a, b in zip(found, trained(layer_of(kind, "thd", masks, **settings), x, grad, **more), strict=True):
        assert_same_bits(a, b, "with the longest lengths given")
    alone = layer_of(kind, "sbhd", (ALONE[masks[0]], ALONE[masks[1]]), **settings)
    for one, theirs in zip(spans(COUNTS, own.tolist()), spans(OTHERS, other.tolist()), strict=True):
        if one.start == one.stop:
            continue
        of_source = {"encoder_output": source[theirs, None]} if crosses else {}
        want = trained(alone, x[one, None], grad[one, None], **shared, **of_source)
        for part, span, a, b in zip(("y", "dx", "dsource"), (one, one, theirs), found, want, strict=False):
            assert_same_bits(a[span], b[:, 0], f"{part} of {one}")


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_packed_sequences_of_one_length_are_a_batch(recipe: str | None) -> None:
    """In every bit, the parameters' gradients and FP8's scales included."""
    x, grad = numbers(1, 3 * 32, 64), numbers(2, 3 * 32, 64)
    chosen = {None: None, "delayed": te.DelayedScaling(), "current": te.recipe.Float8CurrentScaling()}[recipe]
    results = []
    for layout, shape in (("thd", (96, 64)), ("bshd", (3, 32, 64))):
        layer = layer_of("encoder", layout, ("padding_causal", "no_mask"))
        for _ in range(2):
            lengths = ends([32] * 3)
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                given = x.view(shape).clone().requires_grad_()
                y = layer(given, cu_seqlens_q=lengths)
            y.backward(grad.view(shape))
        results.append([t.flatten() for t in (y, given.grad, *(p.grad for p in layer.parameters()))])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def packed_layer(kind: str = "encoder", **more: Any) -> None:
    layer = layer_of(kind, "thd", ("padding", "padding"))
    cu, x = torch.tensor([0, 6, 9], dtype=torch.int32), more.pop("x", numbers(1, 9, 64))
    given = {"cu_seqlens_q": cu, **({"cu_seqlens_kv": cu} if kind != "encoder" else {})}
    layer(x, **given, **({"encoder_output": numbers(2, 9, 64)} if kind in ("decoder", "cross") else {}) | more)


CU = torch.tensor([0, 6, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "more", "sentence"),
    [
        ("encoder", {"x": numbers(1, 9, 1, 64)}, "hidden_states has shape [9, 1, 64]; [tokens, 64], with 'thd', is"),
        ("decoder", {"encoder_output": numbers(1, 9, 1, 64)}, "encoder_output has shape [9, 1, 64]; [tokens, 64]"),
        ("encoder", {"cu_seqlens_q_padded": CU[:2]}, "cu_seqlens_q_padded is torch.int32 [2]"),
        ("encoder", {"max_seqlen_q": 5}, "with lengths of at most 5"),
        ("encoder", {"self_attn_mask_type": "causal"}, "qkv_format='thd' with the mask type 'causal'; a padding type"),
        ("encoder", {"rotary_pos_emb": torch.zeros(5, 1, 1, 16)}, "with 6 positions or more"),
        ("self", {"attention_mask": "hidden"}, "attention_mask='hidden'; None, a bool tensor or two are accepted"),
    ],
)
def test_refusals(kind: str, more: dict[str, Any], sentence: str) -> None:
    packed_layer(kind)
    speaker = "MultiheadAttention" if kind in ("self", "cross") else "TransformerLayer"
    with pytest.raises((TypeError, ValueError), match=f"^{speaker}: .*" + re.escape(sentence)):
        packed_layer(kind, **more)


@pytest.mark.parametrize("kind", ["self", "cross", "encoder", "decoder"])
def test_packed_layers_need_lengths(kind: str) -> None:
    layer, x = layer_of(kind, "thd", ("padding", "padding")), numbers(1, 9, 64)
    more = {"encoder_output": numbers(2, 9, 64)} if kind in ("cross", "decoder") else {}
    with pytest.raises(ValueError, match=re.escape("cu_seqlens_q=None; qkv_format='thd' needs an int32 tensor")):
        layer(x, **more)
    if kind != "encoder":
        with pytest.raises(ValueError, match=re.escape("cu_seqlens_kv=None; qkv_format='thd' needs an int32 tensor")):
            layer(x, cu_seqlens_q=CU, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_on_a_gpu_the_bits_are_the_same(kind: str) -> None:
    import optimized

    own, other = ends(COUNTS), ends(OTHERS)
    x, grad, source = numbers(1, int(own[-1]), 64), numbers(2, int(own[-1]), 64), numbers(4, int(other[-1]), 64)
    angles = torch.rand(200, 1, 1, 16, generator=torch.Generator().manual_seed(5))
    weights = layer_of(kind, "thd", ("padding_causal", "padding")).state_dict()
    results = []
    for library, device in ((te, "cpu"), (optimized, "cuda")):
        layer = layer_of(kind, "thd", ("padding_causal", "padding"), library, device=device)
        layer.load_state_dict(weights)
        more = {"cu_seqlens_q": own.to(device), "rotary_pos_emb": angles.to(device), "max_seqlen_q": 130}
        if kind == "decoder":
            more |= {"cu_seqlens_kv": other.to(device), "encoder_output": source.to(device), "max_seqlen_kv": 140}
        found = trained(layer, x.to(device), grad.to(device), **more)
        results.append([t.cpu() for t in (*found, *(p.grad for p in layer.parameters()))])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
