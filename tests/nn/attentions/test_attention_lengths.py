"""Sequences of different lengths: each has the bits that it has alone, in "sbhd", "bshd" and "thd"."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits

import reference as te

BF16 = torch.bfloat16
MASK_TYPES = ("padding", "padding_causal", "padding_causal_bottom_right")
ALONE = dict(zip(MASK_TYPES, ("no_mask", "causal", "causal_bottom_right"), strict=True))


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def alone(
    attn_mask_type: str, window: Any, groups: int, sequences: list[list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """out, dq, dk, dv `[s, ..]` of each sequence by itself."""
    layer, found = te.DotProductAttention(4, 16, groups, attn_mask_type=ALONE[attn_mask_type], window_size=window), []
    for q, k, v, g in sequences:
        q, k, v = (t[:, None].clone().requires_grad_() for t in (q, k, v))
        out = layer(q, k, v)
        out.backward(g[:, None].flatten(2))
        found.append([t[:, 0] for t in (out, q.grad, k.grad, v.grad)])
    return found


def sequences_of(queries: list[int], keys: list[int], groups: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    return [
        [
            numbers(10 * n + m, s, h, 16).to(dtype)
            for m, (s, h) in enumerate(((sq, 4), (skv, groups), (skv, groups), (sq, 4)))
        ]
        for n, (sq, skv) in enumerate(zip(queries, keys, strict=True))
    ]


def placed(parts: list[torch.Tensor], starts: list[int], total: int, filler: float) -> torch.Tensor:
    out = torch.full((total, *parts[0].shape[1:]), filler, dtype=parts[0].dtype)
    for part, start in zip(parts, starts, strict=True):
        out[start : start + part.shape[0]] = part
    return out


QUERIES, KEYS = [140, 1, 0, 130, 37], [150, 260, 3, 129, 37]


@pytest.mark.sample(5)
@pytest.mark.parametrize("window", [None, (40, 0), (50, 20)])
@pytest.mark.parametrize("attn_mask_type", MASK_TYPES)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
def test_packed_sequences_are_sequences_alone(attn_mask_type: str, window: Any, gaps: bool, groups: int) -> None:
    """In every bit, with NaN between them; tokens of no sequence give +0."""
    sequences = sequences_of(QUERIES, KEYS, groups, BF16 if gaps else torch.float16)
    expected = alone(attn_mask_type, window, groups, [one for one in sequences if len(one[0])])
    cu_q, cu_kv = ends(QUERIES), ends(KEYS)
    pads = [5, 0, 2, 7, 3] if gaps else [0] * 5
    padded_q, padded_kv = (ends([n + pad for n, pad in zip(some, pads, strict=True)]) for some in (QUERIES, KEYS))
    more: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "max_seqlen_q": 150, "max_seqlen_kv": 264}
    if gaps:
        more |= {"cu_seqlens_q_padded": padded_q, "cu_seqlens_kv_padded": padded_kv}
    starts = [padded_q[:-1].tolist(), *[padded_kv[:-1].tolist()] * 2, padded_q[:-1].tolist()]
    totals = [int(padded_q[-1]) + 4 * gaps, *[int(padded_kv[-1]) + 4 * gaps] * 2, int(padded_q[-1]) + 4 * gaps]
    q, k, v, g = (
        placed([one[m] for one in sequences], starts[m], totals[m], float("nan")).requires_grad_() for m in range(4)
    )
    layer = te.DotProductAttention(4, 16, groups, qkv_format="thd", attn_mask_type=attn_mask_type, window_size=window)
    out = layer(q, k, v, **more)
    assert out.shape == (totals[0], 64)
    out.backward(g.detach().flatten(1))
    used = [n for n, count in enumerate(QUERIES) if count]
    for m, found in enumerate((out, q.grad, k.grad, v.grad)):
        at = starts[int(m > 1)]
        rest = torch.ones(found.shape[0], dtype=torch.bool)
        for n, want in zip(used, expected, strict=True):
            assert_same_bits(found[at[n] : at[n] + want[m].shape[0]], want[m], f"{m} of sequence {n}")
            rest[at[n] : at[n] + want[m].shape[0]] = False
        assert_same_bits(found[rest], torch.zeros_like(found[rest]), f"{m} of no sequence")
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        del more[name]
    assert_same_bits(layer(q, k, v, **more), out, "the longest lengths are found")


@pytest.mark.parametrize("attn_mask_type", MASK_TYPES)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_padded_sequences_are_sequences_alone(attn_mask_type: str, layout: str) -> None:
    sequences = sequences_of(QUERIES, KEYS, 2, BF16)
    expected = alone(attn_mask_type, (60, 0), 2, [one for one in sequences if len(one[0])])
    longest = (150, 264, 264, 150)
    batch = [torch.stack([placed([one[m]], [0], longest[m], 0.5) for one in sequences], 1) for m in range(4)]
    q, k, v, g = ((t if layout == "sbhd" else t.transpose(0, 1)).detach().requires_grad_() for t in batch)
    layer = te.DotProductAttention(4, 16, 2, qkv_format=layout, attn_mask_type=attn_mask_type, window_size=(60, 0))
    more = {"cu_seqlens_q": ends(QUERIES), "cu_seqlens_kv": ends(KEYS), "max_seqlen_q": 150}
    out = layer(q, k, v, **more)
    out.backward(g.detach().flatten(2))
    used = [n for n, count in enumerate(QUERIES) if count]
    for m, found in enumerate((out, q.grad, k.grad, v.grad)):
        found = found if layout == "bshd" else found.transpose(0, 1)
        for n, want in zip(used, expected, strict=True):
            assert_same_bits(found[n, : want[m].shape[0]], want[m], f"{m} of sequence {n}")
            assert not bool(found[n, want[m].shape[0] :].any())


def test_fp32_takes_lengths_too() -> None:
    sequences = sequences_of([20, 13], [25, 30], 4, torch.float32)
    expected = alone("padding_causal_bottom_right", None, 4, sequences)
    q, k, v = (torch.cat([one[m] for one in sequences]) for m in range(3))
    layer = te.DotProductAttention(4, 16, qkv_format="thd", attn_mask_type="padding_causal_bottom_right")
    out = layer(q, k, v, cu_seqlens_q=ends([20, 13]), cu_seqlens_kv=ends([25, 30]))
    assert torch.allclose(out, torch.cat([one[0] for one in expected]), atol=1e-5)


def test_a_bias_goes_with_lengths_and_recomputing_changes_no_bit() -> None:
    sequences = sequences_of([20, 13], [25, 30], 4, BF16)
    bias = numbers(7, 2, 1, 20, 30)
    layer = te.DotProductAttention(4, 16, qkv_format="thd", attn_mask_type="padding")
    more: dict[str, Any] = {"cu_seqlens_q": ends([20, 13]), "cu_seqlens_kv": ends([25, 30])}
    more |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    results = []
    for again in (False, True):
        q, k, v = (torch.cat([one[m] for one in sequences]).requires_grad_() for m in range(3))
        out = layer(q, k, v, checkpoint_core_attention=again, **more)
        out.sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    plain = te.DotProductAttention(4, 16, attn_mask_type="no_mask")
    for n, (start, count, keys) in enumerate(((0, 20, 25), (20, 13, 30))):
        q, k, v, _ = (t[:, None] for t in sequences[n])
        one = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias[n : n + 1, :, :count, :keys]}
        assert_same_bits(results[0][0][start : start + count], plain(q, k, v, **one)[:, 0])


@pytest.mark.parametrize("recomputes", [False, True])
def test_lengths_reach_a_layers_attention(recomputes: bool) -> None:
    """Of an encoder and of a decoder, the same as masks."""

    def trained(settings: dict[str, Any], **arguments: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        layer = te.TransformerLayer(
            64, 128, 4, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0, **settings
        )
        x = numbers(1, 20, 2, 64).to(BF16).requires_grad_()
        y = layer(x, checkpoint_core_attention=recomputes, **arguments)
        y.backward(torch.ones_like(y))
        return [y, x.grad, *(p.grad for p in layer.parameters())]

    own, other = ends([20, 13]), ends([7, 25])
    masks = [torch.arange(n) >= torch.tensor(some)[:, None] for n, some in ((20, [20, 13]), (25, [7, 25]))]
    of_q, of_kv = (mask.view(2, 1, 1, -1) for mask in masks)
    found = trained({"self_attn_mask_type": "padding_causal"}, cu_seqlens_q=own)
    want = trained({"self_attn_mask_type": "padding_causal"}, attention_mask=of_q)
    for a, b in zip(found, want, strict=True):
        assert_same_bits(a, b)
    settings = {"layer_type": "decoder", "self_attn_mask_type": "padding_causal", "enc_dec_attn_mask_type": "padding"}
    source = {"encoder_output": numbers(2, 25, 2, 64).to(BF16)}
    found = trained(settings, cu_seqlens_q=own, cu_seqlens_kv=other, **source)
    want = trained(settings, attention_mask=of_q, enc_dec_attn_mask=(of_q, of_kv), **source)
    for a, b in zip(found, want, strict=True):
        assert_same_bits(a, b)


def padded_call(**more: Any) -> None:
    layer, q = te.DotProductAttention(2, 16, attn_mask_type="padding"), numbers(1, 6, 2, 2, 16).to(BF16)
    cu = torch.tensor([0, 6, 9], dtype=torch.int32)
    layer(q, q, q, **{"cu_seqlens_q": cu, "cu_seqlens_kv": cu, **more})


def packed_call(**more: Any) -> None:
    layer = te.DotProductAttention(2, 16, attn_mask_type="padding", qkv_format="thd")
    cu, given = torch.tensor([0, 6, 9], dtype=torch.int32), numbers(1, 9, 2, 16).to(BF16)
    q = more.pop("q", given)
    layer(q, q, q, **{"cu_seqlens_q": cu, "cu_seqlens_kv": cu, **more})


CU = torch.tensor([0, 6, 9], dtype=torch.int32)
REFUSALS: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (padded_call, {"cu_seqlens_kv": None}, "cu_seqlens_kv=None; an int32 tensor [3] is accepted"),
    (padded_call, {"cu_seqlens_q": CU.long()}, "cu_seqlens_q is torch.int64 [3]; torch.int32 [3] is accepted"),
    (padded_call, {"cu_seqlens_q": CU[:2]}, "cu_seqlens_q is torch.int32 [2]; torch.int32 [3] is accepted"),
    (padded_call, {"cu_seqlens_q": CU + 1}, "cu_seqlens_q must start with 0 and not fall"),
    (padded_call, {"cu_seqlens_kv": CU.flip(0)}, "cu_seqlens_kv must start with 0 and not fall"),
    (padded_call, {"cu_seqlens_q": CU * 2}, "with lengths of at most 6"),
    (padded_call, {"max_seqlen_kv": 7}, "max_seqlen_kv=7; None or 6, the sequence's, is accepted"),
    (padded_call, {"max_seqlen_kv": "6"}, "max_seqlen_kv='6'; None or an int from 1"),
    (packed_call, {"cu_seqlens_q": None}, "cu_seqlens_q=None; qkv_format='thd' needs an int32 tensor [batch + 1]"),
    (packed_call, {"max_seqlen_q": 5}, "cu_seqlens_q must start with 0 and not fall, with lengths of at most 5"),
    (packed_call, {"cu_seqlens_q_padded": CU + 1}, "at most 9 tokens in all"),
    (packed_call, {"cu_seqlens_kv_padded": torch.tensor([0, 5, 9], dtype=torch.int32)}, "cu_seqlens_kv_padded leaves"),
    (packed_call, {"attn_mask_type": "no_mask"}, "with the mask type 'no_mask'; a padding type is accepted"),
    (packed_call, {"q": numbers(1, 9, 1, 2, 16).to(BF16)}, "query_layer is [9, 1, 2, 16]; a tensor [t, h, d] is acce"),
    (packed_call, {"qkv_format": "hdt"}, "qkv_format='hdt'; one of ('sbhd', 'bshd', 'thd') is accepted"),
]


@pytest.mark.parametrize(("call", "more", "sentence"), REFUSALS)
def test_refusals(call: Callable[..., None], more: dict[str, Any], sentence: str) -> None:
    call()
    with pytest.raises(
        (TypeError, ValueError, NotImplementedError), match="^DotProductAttention.*" + re.escape(sentence)
    ):
        call(**more)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("attn_mask_type", MASK_TYPES)
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_on_a_gpu_the_bits_are_the_same(attn_mask_type: str, layout: str) -> None:
    import optimized

    sequences = sequences_of(QUERIES, KEYS, 2, BF16)
    if layout == "thd":
        batch = [torch.cat([one[m] for one in sequences]) for m in range(4)]
    else:
        longest = (150, 264, 264, 150)
        batch = [torch.stack([placed([one[m]], [0], longest[m], 0.5) for one in sequences]) for m in range(4)]
    results = []
    for library, device in ((te, "cpu"), (optimized, "cuda")):
        layer = library.DotProductAttention(4, 16, 2, qkv_format=layout, attn_mask_type=attn_mask_type, device=device)
        q, k, v = (t.to(device, copy=True).requires_grad_() for t in batch[:3])
        more = {"cu_seqlens_q": ends(QUERIES).to(device), "cu_seqlens_kv": ends(KEYS).to(device)}
        with torch.cuda.device(0):
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error" if device == "cuda" else before)
            try:
                out = layer(q, k, v, max_seqlen_q=150, max_seqlen_kv=264, **more)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        out.backward(batch[3].to(device).flatten(-2))
        results.append([t.cpu() for t in (out, q.grad, k.grad, v.grad)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
