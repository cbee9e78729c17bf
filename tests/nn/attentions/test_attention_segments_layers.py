"""Layers whose attention takes keys in segments: in training, with a cache, and in a generator's words.

Segments have 128 keys here, which the tests let the ops accept, so that short texts have several.
"""

import copy
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.inference_cases import BF16, CHANNELS, HIDDEN, Decoder, fp8, numbers
from shared.text_models import check, model_of
from torch._subclasses import FakeTensorMode

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.ops.attentions import attention_options

twin = torch.ops.twin
SHORT = 128


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_options, "KEY_SEGMENTS", (SHORT, *attention_options.KEY_SEGMENTS))


def in_segments(model: Any) -> Any:
    """A copy of a model."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, te.DotProductAttention):
            module.key_segment = SHORT
    return model


def test_who_passes_it_on() -> None:
    layer = te.TransformerLayer(64, 128, 4, layer_type="decoder", key_segment=4096)
    for attention in (layer.self_attention, layer.inter_attention, te.MultiheadAttention(64, 4, key_segment=4096)):
        assert attention.core_attention.key_segment == 4096
    assert te.DotProductAttention(4, 16, key_segment=4096).key_segment == 4096
    assert te.TransformerLayer(64, 128, 4).self_attention.core_attention.key_segment is None


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_layer_has_the_words_of_the_op(dropout: float, recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    core = in_segments(te.DotProductAttention(4, 16, num_gqa_groups=2, attention_dropout=dropout))
    leaves = [numbers(i, 300, 2, heads, 16).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    grad = numbers(4, 300, 2, 64)
    take, states = core.random_state, []

    def taken(*args: Any) -> Any:
        state = take(*args)
        states.append(None if state is None else state.clone())
        return state

    monkeypatch.setattr(core, "random_state", taken)
    out = core(*leaves, checkpoint_core_attention=recomputes)
    out.backward(grad)
    (state,) = states
    before = None if state is None else state.clone()
    q, k, v = (x.detach().permute(1, 2, 0, 3) for x in leaves)
    rest = [0.25, "causal", -1, -1, None, dropout, state, *[None] * 9, SHORT]
    with torch.no_grad():
        expected = twin.attention(q, k, v, *rest)
        rest[6] = before
        of_grad = grad.view(300, 2, 4, 16).permute(1, 2, 0, 3)
        grads = twin.attention_backward(of_grad, q, k, v, *expected, *rest)
    assert_same_bits(out, expected[0].permute(2, 0, 1, 3).flatten(2))
    for leaf, one in zip(leaves, grads, strict=True):
        assert_same_bits(leaf.grad, one.permute(2, 0, 1, 3))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_block_and_its_modules(hooked: bool) -> None:
    layer = in_segments(te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, params_dtype=BF16))
    plain = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, params_dtype=BF16)
    plain.load_state_dict(layer.state_dict())
    x = numbers(1, 200, 2, 64)
    layer.eval(), plain.eval()
    expected = layer(x)
    assert not torch.equal(expected, plain(x))
    assert_same_bits(expected[:SHORT], plain(x)[:SHORT])
    if hooked:
        layer.self_attention.core_attention.register_forward_hook(lambda *args: None)
    for how in ({}, {"checkpoint_core_attention": True}):
        assert_same_bits(layer(x, **how), expected)


PAGED = {"is_paged": True, "total_num_pages": 40, "page_size": 16}


@pytest.mark.parametrize(
    ("options", "cache"),
    [({}, {}), ({}, PAGED), ({}, {**PAGED, "total_num_pages": 6, "page_size": 128}), ({"window_size": (70, 0)}, PAGED)],
    ids=["rows", "pages", "large pages", "window"],
)
@torch.no_grad()
def test_a_cache_gives_the_words_of_one_forward(options: dict[str, Any], cache: dict[str, Any]) -> None:
    plain = Decoder(**options)
    model = in_segments(plain)
    x = plain.numbers(5, 141)
    whole = model(x)
    assert (whole != plain(x)).any()
    found = model.stepped(x, (20, *[1] * 12, 3, 100, *[1] * 6), model.params(**cache))
    assert_same_bits(found, whole)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("codes", [False, True])
def test_a_generator_writes_what_the_trainer_sees(codes: bool, in_fp8: bool) -> None:
    model = in_segments(model_of("plain"))
    if codes:
        te.keys_and_values_in_fp8(model)
    prompt = [2 + (7 * n * n) % 40 for n in range(126)]
    with fp8(in_fp8):
        for graphs in (False, True):
            made = te.Generator(model, max_batch_size=2, max_sequence_length=160, cuda_graphs=graphs)
            found = made.generate([prompt, prompt[:40]], 6, [te.Sampling(0.8, seed=3), te.Sampling()])
            check(model, prompt, found[0], 6, te.Sampling(0.8, seed=3))
            check(model, prompt[:40], found[1], 6, te.Sampling())


def test_packed_sequences_have_the_words_of_each_alone() -> None:
    core = in_segments(te.DotProductAttention(2, CHANNELS, qkv_format="thd", attn_mask_type="padding_causal"))
    alone = in_segments(te.DotProductAttention(2, CHANNELS, attn_mask_type="causal"))
    q, k, v = (numbers(i, 350, 2, CHANNELS) for i in range(3))
    ends = torch.tensor([0, 150, 350], dtype=torch.int32)
    found = core(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    for first, end in ((0, 150), (150, 350)):
        of_one = [x[first:end, None] for x in (q, k, v)]
        assert_same_bits(found[first:end], alone(*of_one)[:, 0])


def test_a_compiler_sees_it() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 300, 16, dtype=BF16)
        out, m, inv = twin.attention(q, q, q, 0.25, "causal", -1, -1, None, 0.0, None, *[None] * 9, SHORT)
    assert (out.shape, m.shape, inv.shape) == ((1, 2, 300, 16), (1, 2, 300), (1, 2, 300))


def test_what_is_refused() -> None:
    for wrong in (0, 128, 2048):
        with pytest.raises(ValueError, match=rf"^DotProductAttention: key_segment={wrong}; None or 4096 is accepted"):
            te.DotProductAttention(2, 16, key_segment=wrong)
    with pytest.raises(TypeError, match=r"^TransformerLayer: key_segment='4096'; None or 4096 is accepted"):
        te.TransformerLayer(64, 128, 4, key_segment="4096")
    sentence = r"^DotProductAttention: key_segment=4096 with attention_backend='cudnn' is not offered; 'exact' is acc"
    with pytest.raises(NotImplementedError, match=sentence):
        te.DotProductAttention(2, 16, attention_backend="cudnn", key_segment=4096)
    layer = te.MultiheadAttention(HIDDEN, 4, params_dtype=BF16, key_segment=4096)
    before = torch.get_rng_state()
    with (
        te.autocast(recipe=te.DelayedScaling(fp8_dpa=True)),
        pytest.raises(
            NotImplementedError, match=r"^MultiheadAttention: key_segment=4096 under a recipe with fp8_dpa=True is not"
        ),
    ):
        layer(numbers(1, 16, 2, HIDDEN))
    assert torch.equal(torch.get_rng_state(), before)
