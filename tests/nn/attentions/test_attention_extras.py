"""`DotProductAttention`'s packed inputs, `return_max_logit` and `pad_between_seqs`."""

import inspect
import math
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.linear_cases import numbers

import reference as te
from reference.arguments import OFF
from reference.nn.attentions import attention_bias, attention_lengths, dot_product_attention, multihead_attention
from reference.nn.attentions.attention_extras import Extras
from reference.nn.transformer import transformer_layer

BF16 = torch.bfloat16
HEADS, CHANNELS = 4, 16
SHAPES = {"sbhd": (9, 2), "bshd": (2, 9), "thd": (9,)}
ENDS = torch.tensor([0, 3, 9], dtype=torch.int32)
LENGTHS = {"cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS}


def layer_of(layout: str = "sbhd", **more: Any) -> Any:
    mask = "padding_causal" if layout == "thd" else "causal"
    return te.DotProductAttention(HEADS, CHANNELS, qkv_format=layout, attn_mask_type=mask, **more)


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("layout", SHAPES)
def test_packed_inputs_are_their_parts(layout: str, dim: int) -> None:
    """Output and gradients of qkv_layer, and of kv_layer, have the bits of three tensors."""
    layer, more = layer_of(layout), LENGTHS if layout == "thd" else {}
    parts = [numbers(n, *SHAPES[layout], HEADS, CHANNELS).to(BF16) for n in range(3)]
    results = []
    for packed in (0, 2, 3):
        leaves = parts[: 3 - packed] + ([torch.stack(parts[3 - packed :], dim)] if packed else [])
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        names = {0: (), 2: ("kv_layer",), 3: ("qkv_layer",)}[packed]
        plain, last = leaves[: len(leaves) - len(names)], leaves[len(leaves) - len(names) :]
        how = {**more, "qkv_interleave_dim": dim} if packed else more
        out = layer(*plain, **dict(zip(names, last, strict=True)), **how)
        grads = list(torch.autograd.grad(out, leaves, torch.ones_like(out)))
        results.append([out, *grads[: len(plain)], *(grads[-1].unbind(dim) if packed else [])])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b)


def test_packed_inputs_are_refused() -> None:
    layer, q = layer_of(), numbers(1, 9, 2, HEADS, CHANNELS).to(BF16)
    three, two = torch.stack([q, q, q], -3), torch.stack([q, q], -3)
    with pytest.raises(ValueError, match="qkv_interleave_dim=-2 without qkv_layer and kv_layer, whose layout it is"):
        layer(q, q, q, qkv_interleave_dim=-2)
    alone = "the tensors that it contains, with the other packed tensor or with inference_params; "
    for arguments, sentence in (
        ({"query_layer": q, "qkv_layer": three}, f"qkv_layer with {alone}it alone is accepted"),
        ({"qkv_layer": three, "kv_layer": two}, f"qkv_layer with {alone}it alone is accepted"),
        ({"query_layer": q, "key_layer": q, "kv_layer": two}, f"kv_layer with {alone}query_layer and kv_layer"),
        ({"qkv_layer": two}, r"qkv_layer is \[9, 2, 2, 4, 16\]; a tensor \[s, b, 3, h, d\] is accepted with 'sbhd'"),
        ({"query_layer": q, "kv_layer": three}, r"kv_layer is .*; a tensor \[s, b, 2, h, d\] is accepted"),
        ({"qkv_layer": three[..., ::2]}, "its last dimension contiguous"),
        ({"qkv_layer": "three"}, "qkv_layer is str; a tensor"),
        ({"kv_layer": two}, "query_layer"),
        ({"qkv_layer": three, "qkv_interleave_dim": -1}, "qkv_interleave_dim=-1; -3 and -2 are accepted"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            layer(**arguments)


def test_pad_between_seqs_goes_with_packed_sequences() -> None:
    x = numbers(1, 9, HEADS, CHANNELS).to(BF16)
    layer = layer_of("thd")
    expected = layer(x, x, x, **LENGTHS)
    same = {f"{name}_padded": LENGTHS[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    apart = {name: x + torch.tensor([0, *[1] * (len(x) - 1)], dtype=torch.int32) for name, x in same.items()}
    x = torch.cat([x, x[:1]])
    for flag, starts in ((True, same), (False, same), (False, {}), (None, {})):
        assert_same_bits(layer(x, x, x, **LENGTHS, **starts, pad_between_seqs=flag)[:-1], expected)
    assert_same_bits(layer(x, x, x, **LENGTHS, **apart, pad_between_seqs=True), layer(x, x, x, **LENGTHS, **apart))
    with pytest.raises(ValueError, match="pad_between_seqs=False with a cu_seqlens_q_padded that lets sequences begin"):
        layer(x, x, x, **LENGTHS, **apart, pad_between_seqs=False)
    with pytest.raises(ValueError, match="pad_between_seqs=True without cu_seqlens_q_padded and cu_seqlens_kv_padded"):
        layer(x, x, x, **LENGTHS, pad_between_seqs=True)
    y = x[:, None]
    with pytest.raises(ValueError, match="pad_between_seqs=True with the layout 'sbhd'; it goes with 'thd'"):
        layer_of()(y, y, y, pad_between_seqs=True)
    block = te.MultiheadAttention(64, 4, params_dtype=BF16)
    with pytest.raises(ValueError, match="MultiheadAttention: pad_between_seqs=True with the layout 'sbhd'"):
        block(numbers(1, 9, 2, 64).to(BF16), pad_between_seqs=True)


LOGITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no mask": ({"attn_mask_type": "no_mask"}, {}),
    "causal": ({"attn_mask_type": "causal"}, {}),
    "window": ({"attn_mask_type": "causal", "window_size": (3, 0)}, {}),
    "sinks": ({"attn_mask_type": "causal", "softmax_type": "off-by-one"}, {}),
    "dropout": ({"attn_mask_type": "causal", "attention_dropout": 0.4}, {}),
    "grouped heads": ({"attn_mask_type": "causal", "num_gqa_groups": 2}, {}),
    "bias": ({"attn_mask_type": "no_mask"}, {"core_attention_bias_type": "post_scale_bias"}),
    "recomputed": ({"attn_mask_type": "causal"}, {"checkpoint_core_attention": True}),
    "lengths": ({"attn_mask_type": "padding"}, {"cu_seqlens_q": torch.tensor([0, 5, 12], dtype=torch.int32)}),
}


@pytest.mark.parametrize("case", LOGITS)
def test_the_largest_logits(case: str) -> None:
    """Against the scores in float64; output and gradients have the bits of a layer without them."""
    settings, more = LOGITS[case]
    if "cu_seqlens_q" in more:
        more = {**more, "cu_seqlens_kv": more["cu_seqlens_q"]}
    length = 150 if case == "no mask" else 9
    layers = [te.DotProductAttention(HEADS, CHANNELS, **settings, return_max_logit=flag) for flag in (True, False)]
    groups = settings.get("num_gqa_groups", HEADS)
    sizes = ((1, HEADS), (2, groups), (3, groups))
    q, k, v = ((numbers(n, length, 2, h, CHANNELS) * 2).to(BF16).requires_grad_() for n, h in sizes)
    if "core_attention_bias_type" in more:
        more = {**more, "core_attention_bias": numbers(4, 1, HEADS, length, length)}
    results = []
    for layer in layers:
        torch.manual_seed(2)
        out = layer(q, k, v, **more)
        out, found = out if layer.return_max_logit else (out, None)
        results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
        if found is not None:
            logits = found
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    keys = k.detach().double().repeat_interleave(HEADS // groups, 2)
    scores = torch.einsum("ibhd,jbhd->bhij", q.detach().double(), keys) / math.sqrt(CHANNELS)
    scores = scores + more.get("core_attention_bias", 0)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    if settings["attn_mask_type"] == "causal":
        scores = scores.masked_fill(j > i, -math.inf)
    if "window_size" in settings:
        scores = scores.masked_fill(j < i - 3, -math.inf)
    if case == "lengths":
        ends = more["cu_seqlens_q"].diff()[:, None, None, None]
        scores = scores.masked_fill((i >= ends) | (j >= ends), -math.inf)
    assert not logits.requires_grad
    assert logits.dtype == BF16
    # Half a step of bf16, and less than 1e-4 of m's grid and the scores' sums in fp32.
    expected = scores.amax((0, 2, 3))
    assert ((logits.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-4).all()


def test_logits_of_nothing() -> None:
    layer = te.DotProductAttention(HEADS, CHANNELS, attn_mask_type="arbitrary", return_max_logit=True)
    x = numbers(1, 9, 2, HEADS, CHANNELS).to(BF16)
    mask = torch.zeros(1, HEADS, 9, 9, dtype=torch.bool)
    mask[:, 1] = True
    logits = layer(x, x, x, attention_mask=mask)[1]
    assert logits.isinf().tolist() == [False, True, False, False]
    assert logits[1] < 0
    empty = x[:0]
    assert layer_of(return_max_logit=True)(empty, empty, empty)[1].tolist() == [-math.inf] * HEADS
    spoilt = x.clone()
    spoilt[3, 0, 2, 0] = math.nan
    assert layer_of(return_max_logit=True)(spoilt, x, x)[1].isnan().tolist() == [False, False, True, False]


def test_logits_of_a_cache() -> None:
    layer = layer_of(return_max_logit=True).eval()
    x = numbers(1, 9, 2, HEADS, CHANNELS).to(BF16)
    cache = te.InferenceParams(2, 16, HEADS, CHANNELS, BF16)
    cache.allocate_memory(1)
    found = []
    for first, last in ((0, 5), (5, 6), (6, 9)):
        cache.pre_step(dict.fromkeys(range(2), last - first))
        part = x[first:last]
        found.append(layer(part, part, part, inference_params=cache)[1])
    whole = layer(x, x, x)[1]
    assert_same_bits(torch.stack(found).amax(0), whole)


def test_where_logits_are_refused() -> None:
    x = numbers(1, 9, 2, HEADS, CHANNELS)
    with pytest.raises(NotImplementedError, match=r"return_max_logit=True in torch.float32 .* shows no scores"):
        layer_of(return_max_logit=True)(x, x, x)
    with (
        te.autocast(recipe=te.DelayedScaling(fp8_dpa=True)),
        pytest.raises(NotImplementedError, match="return_max_logit=True under a recipe with fp8_dpa=True"),
    ):
        layer_of(return_max_logit=True)(*[x.to(BF16)] * 3)
    with pytest.raises(TypeError, match="return_max_logit=2; None, True and False are accepted"):
        layer_of(return_max_logit=2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["causal", "grouped heads", "sinks", "window"])
def test_the_largest_logits_on_a_gpu(case: str) -> None:
    import optimized

    settings, _ = LOGITS[case]
    groups = settings.get("num_gqa_groups", HEADS)
    tensors = [numbers(n, 300, 2, h, CHANNELS).to(BF16) for n, h in ((1, HEADS), (2, groups), (3, groups))]
    results = []
    for package, device in ((te, "cpu"), (optimized, "cuda")):
        layer = package.DotProductAttention(HEADS, CHANNELS, **settings, return_max_logit=True)
        results.append(layer(*[t.to(device) for t in tensors]))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b.cpu())


FORWARDS: dict[str, tuple[dict[str, Any], Any, tuple[int, ...]]] = {
    "DotProductAttention": (dot_product_attention._DEFAULTS, lambda: te.DotProductAttention(2, 16), (4, 1, 2, 16)),
    "MultiheadAttention": (multihead_attention._DEFAULTS, lambda: te.MultiheadAttention(32, 2), (4, 1, 32)),
    "TransformerLayer": (transformer_layer._DEFAULTS, lambda: te.TransformerLayer(32, 64, 2), (4, 1, 32)),
}


class Checked(Exception):
    """What a forward wanted to have checked."""


@pytest.mark.parametrize("name", FORWARDS)
def test_what_is_off_by_default_is_checked_once_one_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that gives none of it checks none of it; what one differs is handed on under its own name."""

    def checked(layer: str, layout: str, inference: Any, given: dict[str, Any], **more: Any) -> None:
        raise Checked(given)

    monkeypatch.setattr(Extras, "checked", staticmethod(checked))
    defaults, made, shape = FORWARDS[name]
    layer, x = made(), torch.ones(shape)
    given = (x, x, x) if name == "DotProductAttention" else (x,)
    layer(*given)
    layer(*given, **defaults)
    for argument in defaults:
        marker = object()
        with pytest.raises(Checked) as seen:
            layer(*given, **{argument: marker})
        assert seen.value.args == ({**defaults, argument: marker},)


@pytest.mark.parametrize("name", FORWARDS)
def test_every_argument_that_is_off_by_default_is_among_them(name: str) -> None:
    defaults, made, _ = FORWARDS[name]
    parameters = inspect.signature(made().forward).parameters
    assert {one for one in parameters if one in (*OFF, *attention_bias.NAMES, *attention_lengths.NAMES)} <= set(
        defaults
    )
    assert defaults == {one: parameters[one].default for one in defaults}
    assert all(default in OFF.get(one, (default,)) for one, default in defaults.items())
