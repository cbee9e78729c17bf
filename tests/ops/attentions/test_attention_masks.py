"""Which keys a query sees, however it is said (masks, lengths, packed, a cache), against attention written out.

Cases are drawn from all mask types, windows, biases, layouts and ways to say a sequence's length. The other side is
plain PyTorch in float64, one sequence after the other, and shares no code with the package.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits

import reference as te

BF16 = torch.bfloat16
HEADS, GROUPS, D = 4, 2, 16
MASK_TYPES = ("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding,causal", "arbitrary")
MASK_TYPES = (*MASK_TYPES, "padding_causal_bottom_right")
ANY_WINDOW, CAUSAL_WINDOW = st.sampled_from([None, (3, 2), (0, 4), (2, 0)]), st.sampled_from([None, (3, 0), (0, 0)])
SLOPES = [2.0 ** (-2 * (h + 1)) for h in range(HEADS)]  # ALiBi's, of four heads


class Case(NamedTuple):
    """One call: sizes of the tensors, lengths of the sequences, and what is asked for."""

    attn_mask_type: str
    window: Any
    bias: str
    sizes: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]
    layout: str
    said: str
    dtype: torch.dtype
    again: bool


@st.composite
def cases(draw: Any) -> Case:
    attn_mask_type = draw(st.sampled_from(MASK_TYPES))
    padded = "padding" in attn_mask_type
    window = draw(CAUSAL_WINDOW if "causal" in attn_mask_type else ANY_WINDOW)
    sizes = (draw(st.integers(1, 9)), draw(st.integers(1, 12)))
    batch = draw(st.integers(1, 3))
    lengths = tuple((draw(st.integers(0, sizes[0])), draw(st.integers(0, sizes[1]))) for _ in range(batch))
    alike = padded and draw(st.booleans())
    said = draw(st.sampled_from(["mask", "lengths", "both"])) if padded else draw(st.sampled_from(["mask", "both"]))
    layout = draw(st.sampled_from(["sbhd", "bshd", "thd"] if said != "mask" and padded else ["sbhd", "bshd"]))
    if alike:  # one mask for queries and keys
        sizes, lengths = (sizes[0], sizes[0]), tuple((q, q) for q, _ in lengths)
        said = "one mask" if said == "mask" else said
    bias = draw(st.sampled_from(["no_bias", "no_bias", "post_scale_bias", "alibi"]))
    dtype = draw(st.sampled_from([BF16, torch.float32]))
    return Case(
        attn_mask_type,
        window,
        bias,
        sizes,
        lengths if padded else (sizes,) * batch,
        layout,
        said,
        dtype,
        draw(st.booleans()),
    )


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def seen(case: Case, lq: int, lk: int, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `[lq, lk]` pairs attend, and how far each is from the diagonal."""
    i, j = torch.arange(lq)[:, None], torch.arange(lk)[None]
    top_left = case.attn_mask_type in ("causal", "padding_causal", "padding,causal")
    offset = j - i - (0 if top_left else lk - lq)
    sees = torch.ones(lq, lk, dtype=torch.bool) if hidden is None else ~hidden
    if "causal" in case.attn_mask_type:
        sees = sees & (offset <= 0)
    if case.window is not None:
        left, right = case.window
        sees = sees & (offset >= -left) & ((offset <= right) | ("causal" in case.attn_mask_type))
    return sees, offset


def written_out(
    case: Case, tensors: list[torch.Tensor], bias: torch.Tensor, hidden: torch.Tensor
) -> list[torch.Tensor]:
    """out, dq, dk and dv, `[b, s, h, d]` in float64; zero after each sequence."""
    q, k, v = (t.double().requires_grad_() for t in tensors[:3])
    outs = []
    for n, (lq, lk) in enumerate(case.lengths):
        own = hidden[n, 0] if case.attn_mask_type == "arbitrary" else None
        sees, offset = seen(case, lq, lk, own)
        out = torch.zeros(case.sizes[0], HEADS, D, dtype=torch.float64)
        for h in range(HEADS):
            g = h // (HEADS // GROUPS)
            scores = q[n, :lq, h] @ k[n, :lk, g].T / D**0.5
            if case.bias == "post_scale_bias":
                scores = scores + bias[0, h, :lq, :lk]
            elif case.bias == "alibi":
                scores = scores - SLOPES[h] * offset.abs()
            most = torch.where(sees, scores, -1e30).detach().amax(-1, keepdim=True) if lk else 0.0
            weights = torch.where(sees, scores - most, -torch.inf).exp()
            total = weights.sum(-1, keepdim=True)
            part = (weights / torch.where(total > 0, total, 1.0)) @ v[n, :lk, g]
            out = out.index_put((torch.arange(lq), torch.tensor(h)), part)
        outs.append(out)
    out = torch.stack(outs)
    out.backward(tensors[3].double())
    return [out.detach(), q.grad, k.grad, v.grad]


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def padding(lengths: list[int], size: int) -> torch.Tensor:
    return (torch.arange(size) >= torch.tensor(lengths)[:, None]).view(len(lengths), 1, 1, size)


def computed(case: Case, tensors: list[torch.Tensor], bias: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    """The same by the layer."""
    of_q, of_kv = [q for q, _ in case.lengths], [kv for _, kv in case.lengths]
    layer = te.DotProductAttention(HEADS, D, GROUPS, qkv_format=case.layout, attn_mask_type=case.attn_mask_type)
    more: dict[str, Any] = {"window_size": case.window, "checkpoint_core_attention": case.again}
    masks = (padding(of_q, case.sizes[0]), padding(of_kv, case.sizes[1]))
    if case.attn_mask_type == "arbitrary":
        more["attention_mask"] = hidden
    elif case.said in ("one mask", "mask", "both"):
        more["attention_mask"] = masks[0] if case.said == "one mask" else masks
    if case.said in ("lengths", "both"):
        more |= {"cu_seqlens_q": ends(of_q), "cu_seqlens_kv": ends(of_kv)}
        more |= {"max_seqlen_q": case.sizes[0], "max_seqlen_kv": case.sizes[1]}
    if case.bias != "no_bias":
        more["core_attention_bias_type"] = case.bias
    if case.bias == "post_scale_bias":
        more["core_attention_bias"] = bias.float()
    lengths = (of_q, of_kv, of_kv, of_q)

    def laid(t: torch.Tensor, n: int) -> torch.Tensor:
        if case.layout == "thd":
            return torch.cat([t[m, :count] for m, count in enumerate(lengths[n])])
        return t.transpose(0, 1) if case.layout == "sbhd" else t

    def back(t: torch.Tensor, n: int) -> torch.Tensor:
        if case.layout != "thd":
            return t.transpose(0, 1) if case.layout == "sbhd" else t
        out, at = torch.zeros(len(case.lengths), case.sizes[int(n in (2, 3))], *t.shape[1:], dtype=t.dtype), 0
        for m, count in enumerate(of_kv if n in (2, 3) else of_q):
            out[m, :count], at = t[at : at + count], at + count
        return out

    q, k, v, g = (laid(t.detach(), n).to(case.dtype).contiguous() for n, t in enumerate(tensors))
    given = [t.requires_grad_() for t in (q, k, v)]
    out = layer(*given, **more)
    out.backward(g.flatten(-2))
    found = [out.detach().unflatten(-1, (HEADS, D)), *(t.grad for t in given)]
    return [back(t, n).double() for n, t in enumerate(found)]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(case=cases())
def test_every_way_to_say_it_is_the_attention_written_out(case: Case) -> None:
    batch = len(case.lengths)
    shapes = [(case.sizes[0], HEADS), *[(case.sizes[1], GROUPS)] * 2, (case.sizes[0], HEADS)]
    tensors = [numbers(n, batch, *shape, D).to(BF16) for n, shape in enumerate(shapes)]
    for n, (lq, _) in enumerate(case.lengths):  # what is padding has no gradient that comes in
        tensors[3][n, lq:] = 0
    bias = numbers(5, 1, HEADS, *case.sizes)
    hidden = numbers(6, batch, 1, *case.sizes) > 0.5
    # Weights, outputs and gradients are rounded to 8 bits, some three times; a wrong diagonal is an error of order 1.
    bound = 0.06 if case.dtype == BF16 else 1e-4
    for name, found, want in zip(
        ("out", "dq", "dk", "dv"),
        computed(case, tensors, bias, hidden),
        written_out(case, tensors, bias, hidden),
        strict=True,
    ):
        assert float((found - want).abs().max()) <= bound * max(1.0, float(want.abs().max())), name


CROSS = ((3, 6), (4, 8), (4, 2), (0, 5))


def of_cross(recipe: Any = None, **more: Any) -> list[torch.Tensor]:
    """out, dq, dk and dv of cross-attention under a type that aligns at the bottom right."""
    layer = te.DotProductAttention(2, 16, attn_mask_type="padding_causal_bottom_right", attention_type="cross")
    given = [numbers(n, s, 4, 2, 16).to(BF16).requires_grad_() for n, s in enumerate((4, 8, 8))]
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(*given, **more)
    out.backward(numbers(4, 4, 4, 32).to(BF16))
    return [out.detach(), *(t.grad for t in given)]


def cross_masks() -> tuple[torch.Tensor, torch.Tensor]:
    return padding([q for q, _ in CROSS], 4), padding([kv for _, kv in CROSS], 8)


def cross_lengths() -> dict[str, torch.Tensor]:
    return {"cu_seqlens_q": ends([q for q, _ in CROSS]), "cu_seqlens_kv": ends([kv for _, kv in CROSS])}


@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("recipe", [None, te.DelayedScaling(fp8_dpa=True)], ids=["16 bits", "FP8"])
def test_two_masks_and_their_lengths_give_the_same_bits(recipe: Any, window: Any) -> None:
    by_masks = of_cross(recipe, attention_mask=cross_masks(), window_size=window)
    by_lengths = of_cross(recipe, window_size=window, **cross_lengths())
    for name, a, b in zip(("out", "dq", "dk", "dv"), by_masks, by_lengths, strict=True):
        assert_same_bits(a, b, name)
    # Not the diagonal of the padded sizes, which both had in common with a mask over all pairs.
    i, j = torch.arange(4)[:, None], torch.arange(8)[None]
    padded = cross_masks()[0].transpose(2, 3) | cross_masks()[1] | (j > i + 4)
    assert not torch.equal(by_masks[0], of_cross(recipe, attention_mask=padded, attn_mask_type="arbitrary")[0])


@pytest.mark.parametrize("fused", [False, True], ids=["module by module", "fused"])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_decoder_takes_masks_and_lengths_alike(fused: bool, fp8: bool) -> None:
    """Its cross-attention is fused with masks, and runs module by module with lengths."""
    results = []
    for own in ({"enc_dec_attn_mask": cross_masks(), "attention_mask": cross_masks()[0]}, cross_lengths()):
        torch.manual_seed(1)
        layer = te.TransformerLayer(
            32, 64, 2, layer_type="decoder", self_attn_mask_type="padding_causal", params_dtype=BF16,
            enc_dec_attn_mask_type="padding_causal_bottom_right", hidden_dropout=0.0, attention_dropout=0.0,
            qk_norm_type=None if fused else "RMSNorm",
        )  # fmt: skip
        x, source = (numbers(n, s, 4, 32).to(BF16).requires_grad_() for n, s in ((1, 4), (2, 8)))
        with te.autocast(enabled=fp8):
            y = layer(x, encoder_output=source, **own)
        y.backward(numbers(3, 4, 4, 32).to(BF16))
        results.append([y.detach(), x.grad, source.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_a_mask_with_holes_has_no_length() -> None:
    """Where the diagonal would need one it is refused; elsewhere, and in one mask, holes mean what they did."""
    q, k = numbers(1, 4, 1, 2, 16).to(BF16), numbers(2, 8, 1, 2, 16).to(BF16)
    holes = torch.zeros(1, 1, 1, 8, dtype=torch.bool)
    holes[..., 0] = holes[..., 3] = True
    plain = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    layer = te.DotProductAttention(2, 16)
    needs: list[dict[str, Any]] = [{"attn_mask_type": "padding_causal_bottom_right"}]
    needs += [{"attn_mask_type": "padding", "window_size": (3, 3)}]
    needs += [{"attn_mask_type": "padding", "core_attention_bias_type": "alibi"}]
    for more in needs:
        with pytest.raises(ValueError, match=r"DotProductAttention: attention_mask of the keys hides elements before"):
            layer(q, k, k, (plain, holes), **more)
    i, j = torch.arange(4)[:, None], torch.arange(8)[None]
    for attn_mask_type, hidden in (("padding", holes.expand(1, 1, 4, 8)), ("padding_causal", holes | (j > i))):
        want = layer(q, k, k, hidden, attn_mask_type="arbitrary")
        assert_same_bits(layer(q, k, k, (plain, holes), attn_mask_type=attn_mask_type), want, attn_mask_type)
    i = torch.arange(8)[:, None]
    want = layer(k, k, k, holes | holes.transpose(2, 3) | (j > i), attn_mask_type="arbitrary")
    for mask in (holes, (holes, holes)):
        assert_same_bits(layer(k, k, k, mask, attn_mask_type="padding_causal_bottom_right"), want)


def test_a_mask_of_one_entry_is_every_entrys() -> None:
    q, k = numbers(1, 4, 3, 2, 16).to(BF16), numbers(2, 8, 3, 2, 16).to(BF16)
    masks = padding([3], 4), padding([5], 8)
    layer = te.DotProductAttention(2, 16, attn_mask_type="padding_causal_bottom_right")
    want = layer(q, k, k, tuple(one.repeat(3, 1, 1, 1) for one in masks))
    assert_same_bits(layer(q, k, k, masks), want)


@pytest.mark.parametrize("attn_mask_type", ["no_mask", "causal", "causal_bottom_right", "arbitrary"])
def test_what_a_mask_type_does_not_read_is_checked_all_the_same(attn_mask_type: str) -> None:
    q, cu = numbers(1, 4, 2, 2, 16).to(BF16), ends([2, 3])
    layer = te.DotProductAttention(2, 16, attn_mask_type=attn_mask_type)
    mask = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 4, "max_seqlen_kv": 4}
    given |= {"cu_seqlens_q_padded": cu, "cu_seqlens_kv_padded": cu}
    assert_same_bits(layer(q, q, q, mask, **given), layer(q, q, q, mask))
    for name, value in (("cu_seqlens_kv", cu.long()), ("cu_seqlens_q_padded", cu[:2]), ("max_seqlen_q", 5)):
        with pytest.raises(ValueError, match=f"DotProductAttention: {name}"):
            layer(q, q, q, mask, **{**given, name: value})


def test_with_a_padding_type_lengths_count_and_the_masks_shape_is_checked() -> None:
    q, cu = numbers(1, 4, 2, 2, 16).to(BF16), ends([2, 3])
    layer = te.DotProductAttention(2, 16, attn_mask_type="padding")
    both = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    want = layer(q, q, q, **both)
    assert_same_bits(layer(q, q, q, padding([4, 4], 4), **both), want)
    assert_same_bits(layer(q, q, q, padding([2, 3], 4)), want)
    assert_same_bits(layer(q, q, q, padding([2, 3], 4), max_seqlen_q=4, max_seqlen_kv=4), want)
    with pytest.raises(ValueError, match=r"attention_mask of the queries is torch.bool \[2, 1, 1, 5\]"):
        layer(q, q, q, padding([4, 4], 5), **both)


def test_an_encoder_has_one_length() -> None:
    layer = te.TransformerLayer(32, 64, 2, params_dtype=BF16, self_attn_mask_type="padding").eval()
    x, cu = numbers(1, 4, 2, 32).to(BF16), ends([2, 3])
    want = layer(x, cu_seqlens_q=cu)
    assert_same_bits(layer(x, cu_seqlens_q=cu, cu_seqlens_kv=cu.clone(), max_seqlen_q=4, max_seqlen_kv=4), want)
    for more in ({"cu_seqlens_kv": ends([2, 4])}, {"cu_seqlens_kv": ends([2])}, {"max_seqlen_kv": 4}):
        with pytest.raises(ValueError, match=r"TransformerLayer: \w+_kv differs from \w+_q, and an encoder has one"):
            layer(x, cu_seqlens_q=cu, **more)


@pytest.mark.parametrize("attn_mask_type", ["causal", "padding_causal_bottom_right", "no_mask"])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_a_cache_aligns_each_sequence_at_its_own_end(attn_mask_type: str, window: Any) -> None:
    """Three sequences with 3, 2 and 1 tokens in the cache get 1, 2 and 3 more."""
    before, after = (3, 2, 1), (1, 2, 3)
    qkv = [numbers(n, 3, 4, 2, D).to(BF16) for n in range(3)]  # [b, 4 tokens, h, d]
    layer = te.DotProductAttention(2, D, qkv_format="bshd", attn_mask_type=attn_mask_type, window_size=window).eval()
    cache = te.InferenceParams(3, 8, 2, D, BF16)
    with torch.no_grad():
        cache.pre_step(dict(enumerate(before)))
        cache.allocate_memory(1)
        layer(*(t[:, :3].clone() for t in qkv), inference_params=cache)
        cache.pre_step(dict(enumerate(after)))
        news = [torch.stack([torch.cat([t[b, n:], t[b, :n]])[:3] for b, n in enumerate(before)]) for t in qkv]
        out = layer(*news, inference_params=cache).unflatten(-1, (2, D))
    for b, (start, count) in enumerate(zip(before, after, strict=True)):
        q, k, v = (t[b].double() for t in qkv)
        i, j = torch.arange(start, 4)[:, None], torch.arange(4)[None]
        sees = (j <= i) if attn_mask_type != "no_mask" else torch.ones(count, 4, dtype=torch.bool)
        if window is not None:
            sees = sees & (j >= i - 2) & (j <= i)
        for h in range(2):
            scores = (q[start:, h] @ k[:, h].T / D**0.5).masked_fill(~sees, -torch.inf)
            want = scores.softmax(-1) @ v[:, h]
            assert float((out[b, :count, h].double() - want).abs().max()) < 0.04


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        (None, {}),
        (None, {"window_size": (2, 0)}),
        (None, {"core_attention_bias_type": "alibi"}),
        (te.DelayedScaling(fp8_dpa=True), {}),
        (te.DelayedScaling(fp8_dpa=True), {"window_size": (2, 0)}),
    ],
)
def test_on_a_gpu_two_masks_give_the_same_bits(recipe: Any, more: dict[str, Any]) -> None:
    """Without waiting for the device."""
    import optimized

    results = []
    for library, device in ((te, "cpu"), (optimized, "cuda")):
        layer = library.DotProductAttention(
            2, 16, attn_mask_type="padding_causal_bottom_right", attention_type="cross", device=device
        )
        q, k, v = (numbers(n, s, 4, 2, 16).to(device, BF16).requires_grad_() for n, s in enumerate((4, 8, 8)))
        masks = tuple(one.to(device) for one in cross_masks())
        before = torch.cuda.get_sync_debug_mode()
        with library.autocast(enabled=recipe is not None, recipe=recipe):
            layer(q, k, v, masks, **more)  # makes what it keeps
            torch.cuda.set_sync_debug_mode("error" if device == "cuda" else before)
            try:
                out = layer(q, k, v, masks, **more)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        out.backward(numbers(4, 4, 4, 32).to(device, BF16))
        results.append([t.cpu() for t in (out, q.grad, k.grad, v.grad)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
