"""A cache in pages, and new tokens that are packed: the words of the cache without pages, and of one forward."""

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.inference_cases import BF16, CHANNELS, HIDDEN, MIXED, OPTIONS, ROOM, Decoder, alone, fp8, mixed

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.nn.attentions.pages import Pages

SHAPES: dict[str, dict[str, Any]] = {
    **{name: OPTIONS[name] for name in ("block", "window", "modules, batch first", "as many heads")},
    "fp16": {"params_dtype": torch.float16},
}


def paged(model: Decoder, page_size: int, pages: int = 0, batch: int = 3, **more: Any) -> te.InferenceParams:
    count = pages or batch * -(-ROOM // page_size)
    return model.params(batch, is_paged=True, total_num_pages=count, page_size=page_size, **more)


def spoil(cache: te.InferenceParams) -> None:
    """NaN in every row of every page in which no token lies."""
    assert cache.pages is not None
    used = {row for name in cache.pages.lengths for row in cache.pages.rows(name, 0)}
    free = [row for row in range(cache.pages.count * cache.pages.size) if row not in used]
    for both in cache.cache.values():
        for one in both:
            one.flatten(0, 1)[free] = torch.nan


def packed(model: Decoder, cache: te.InferenceParams, steps: list[dict[str, int]]) -> dict[str, torch.Tensor]:
    """What each sequence gives, [tokens, hidden], step by step; the new tokens of a step are one row."""
    texts = {name: model.numbers(ord(name), 140, 1).squeeze(1 - model.dim) for name in "abcdef"}
    outs: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    for step in steps:
        spoil(cache)
        cache.pre_step(step)
        parts = [texts[name][cache.sequences[name] - n : cache.sequences[name]] for name, n in step.items()]
        y = model(torch.cat(parts).unsqueeze(1 - model.dim), inference_params=cache).squeeze(1 - model.dim)
        for name, part in zip(step, y.split(list(step.values())), strict=True):
            outs[name].append(part)
    return {name: torch.cat(parts) for name, parts in outs.items() if parts}


@pytest.mark.sample(6)
@pytest.mark.parametrize("page_size", [1, 16, 100, 128, ROOM])
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_pages_and_packed_tokens_change_no_word(name: str, in_fp8: bool, page_size: int) -> None:
    model = Decoder(**SHAPES[name])
    with torch.no_grad(), fp8(in_fp8):
        found = mixed(model, paged(model, page_size), poison=False)
        together = packed(model, paged(model, page_size, qkv_format="thd"), MIXED)
        for one, words in found.items():
            expected = alone(model, one, len(words))
            assert_same_bits(words, expected)
            assert_same_bits(together[one], expected)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_layers_of_thd(in_fp8: bool, observed: bool) -> None:
    """They read packed tokens as they lie; as blocks, and by their parts where one is observed."""
    model = Decoder()
    thd = Decoder(attn_input_format="thd")
    thd.load_state_dict(model.state_dict())
    if observed:
        thd.layers[0].self_attention.proj.register_forward_hook(lambda *_: None)
    text = model.numbers(3, 40, 1)[:, 0]
    cache = paged(model, 16, qkv_format="thd")
    with torch.no_grad(), fp8(in_fp8):
        outs: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
        for step in ({"a": 20}, {"a": 1, "b": 5}, {"b": 3, "a": 1}, {"a": 1, "b": 1}):
            cache.pre_step(step)
            parts = [text[cache.sequences[name] - n : cache.sequences[name]] for name, n in step.items()]
            y = thd(torch.cat(parts), inference_params=cache)
            for name, part in zip(step, y.split(list(step.values())), strict=True):
                outs[name].append(part)
        for parts in outs.values():
            found = torch.cat(parts)
            assert_same_bits(found, model(text[: len(found), None])[:, 0])


def test_attention_of_thd_by_itself() -> None:
    core = te.DotProductAttention(4, CHANNELS, num_gqa_groups=2, qkv_format="thd", attn_mask_type="causal")
    alone = te.DotProductAttention(4, CHANNELS, num_gqa_groups=2, qkv_format="bshd")
    q, k, v = (torch.randn(9, heads, CHANNELS).to(BF16) for heads in (4, 2, 2))
    cache = te.InferenceParams(2, 20, 2, CHANNELS, BF16, qkv_format="thd")
    cache.allocate_memory(1)
    with torch.no_grad():
        outs = []
        for first, last in ((0, 6), (6, 7), (7, 9)):
            cache.pre_step({"a": last - first})
            outs.append(core(*(x[first:last] for x in (q, k, v)), inference_params=cache))
        assert_same_bits(torch.cat(outs), alone(q[None], k[None], v[None])[0])
        plain = te.InferenceParams(2, 20, 2, CHANNELS, BF16)
        plain.allocate_memory(1)
        plain.pre_step({"a": 9})
        with pytest.raises(
            NotImplementedError, match=r"'thd' with InferenceParams\(qkv_format='thd'\) \(pre_step gives"
        ):
            core(q, k, v, inference_params=plain)
        cache.pre_step({"b": 9})
        with pytest.raises(ValueError, match=r"query_layer is \[1, 9, 4, 16\]; a tensor \[t, h, d\] is accepted"):
            core(q[None], k[None], v[None], inference_params=cache)


def test_a_decoder_of_thd_is_refused() -> None:
    layer = te.TransformerLayer(HIDDEN, 128, 4, layer_type="decoder", attn_input_format="thd", params_dtype=BF16).eval()
    cache, x = te.InferenceParams(2, 8, 4, CHANNELS, BF16, qkv_format="thd"), torch.zeros(5, HIDDEN, dtype=BF16)
    cache.pre_step({0: 5})
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attn_input_format='thd' in a decoder is not offer"):
        layer(x, encoder_output=x, inference_params=cache)


def test_packed_tokens_without_pages() -> None:
    """A page is then a whole sequence."""
    model = Decoder()
    with torch.no_grad():
        cache = model.params(qkv_format="thd")
        for one, words in packed(model, cache, MIXED).items():
            assert_same_bits(words, alone(model, one, len(words)))
    assert [t.shape for t in cache.cache[2]] == [(3, ROOM, 2, CHANNELS)] * 2
    assert not cache.is_paged


def test_parts_that_are_observed() -> None:
    model = Decoder(layers=1)
    model.layers[0].self_attention.proj.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        for one, words in packed(model, paged(model, 16, qkv_format="thd"), MIXED).items():
            assert_same_bits(words, alone(model, one, len(words)))


def test_attention_by_itself() -> None:
    core = te.DotProductAttention(4, CHANNELS, num_gqa_groups=2, qkv_format="bshd")
    q, k, v = (torch.randn(1, 9, heads, CHANNELS).to(BF16) for heads in (4, 2, 2))
    cache = te.InferenceParams(2, 20, 2, CHANNELS, BF16, is_paged=True, total_num_pages=5, page_size=4)
    cache.allocate_memory(1)
    assert [t.shape for t in cache.cache[1]] == [(5, 4, 2, CHANNELS)] * 2
    with torch.no_grad():
        outs = []
        for first, last in ((0, 6), (6, 7), (7, 9)):
            cache.pre_step({"a": last - first})
            outs.append(core(*(x[:, first:last] for x in (q, k, v)), inference_params=cache))
        assert_same_bits(torch.cat(outs, 1), core(q, k, v))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("shared", [1, 15, 16, 20])
def test_a_shared_prefix_is_copied_before_it_is_written(shared: int, page_size: int) -> None:
    """b begins with a's first tokens, both go on, a ends, c begins with b's; nothing of a prefix is computed again."""
    model = Decoder(layers=1)
    cache = paged(model, page_size, qkv_format="thd")
    assert cache.pages is not None
    texts = {name: model.numbers(ord(name), 40, 1)[:, 0] for name in "abc"}
    for name in "bc":
        texts[name][:shared] = texts["a"][:shared]
    outs: dict[str, list[torch.Tensor]] = {name: [] for name in "abc"}

    def step(**new: int) -> None:
        spoil(cache)
        cache.pre_step(new)
        parts = [texts[name][cache.sequences[name] - n : cache.sequences[name]] for name, n in new.items()]
        y = model(torch.cat(parts)[:, None], inference_params=cache)[:, 0]
        for name, part in zip(new, y.split(list(new.values())), strict=True):
            outs[name].append(part)

    with torch.no_grad():
        step(a=20)
        before = len(cache.pages.free)
        cache.share("b", "a", shared)
        assert len(cache.pages.free) == before
        step(b=3, a=1)
        step(a=2, b=1)
        cache.share("kept", "b", shared)
        step(b=2)
        step(b=1)
        cache.share("c", "kept", shared)
        cache.drop("kept")
        step(c=4, b=1)
        expected = {name: model(text[:, None])[:, 0] for name, text in texts.items()}
    for name, parts in outs.items():
        found, first = torch.cat(parts), 0 if name == "a" else shared
        assert_same_bits(found, expected[name][first : first + len(found)])
    assert cache.sequences == {"c": shared + 4, "b": shared + 8}


def test_a_sequence_that_was_cut_goes_on_from_there() -> None:
    model = Decoder()
    text, other = (model.numbers(seed, 30, 1)[:, 0] for seed in (1, 2))
    with torch.no_grad():
        cache = paged(model, 4, qkv_format="thd")
        cache.pre_step({"a": 20})
        model(torch.cat([text[:17], other[:3]])[:, None], inference_params=cache)
        cache.cut("a", 17)
        spoil(cache)
        assert cache.sequences == {"a": 17}
        cache.pre_step({"a": 5})
        found = model(text[17:22, None], inference_params=cache)
        assert_same_bits(found, model(text[:22, None])[17:])


def test_attributes_and_lengths() -> None:
    cache = te.InferenceParams(
        2, 20, 2, CHANNELS, BF16, is_paged=True, total_num_pages=7, page_size=4, qkv_format="thd"
    )
    assert (cache.is_paged, cache.page_size, cache.total_num_pages) == (True, 4, 7)
    assert cache.output_qkv_format == "thd_2_bshd"
    assert repr(cache).endswith("total_num_pages=7, page_size=4)")
    assert cache.pre_step({"x": 5, "y": 2}) == {"x": 5, "y": 2}
    assert cache.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert cache.pre_step({"y": 3, "z": 1}) == {"y": 5, "z": 1}
    assert cache.get_seqlens_pre_step().tolist() == [2, 0]
    assert cache.positions.tolist() == [2, 3, 4, 0]
    cache.reset()
    assert cache.pages is not None
    assert len(cache.pages.free) == 7


REFUSED: list[tuple[Any, str]] = [
    (
        lambda cache: cache.pre_step({"a": 9, "b": 5}),
        "InferenceParams.pre_step: 4 pages are needed beside those in use",
    ),
    (lambda cache: cache.pre_step({"a": 18}), "InferenceParams.pre_step: sequence 'a' has 3 tokens and gets 18"),
    (
        lambda cache: cache.share("b", "a", 4),
        "InferenceParams.share: sequence='b', source='a' and tokens=4; a new name",
    ),
    (
        lambda cache: cache.share("a", "a", 1),
        "InferenceParams.share: sequence='a', source='a' and tokens=1; a new name",
    ),
    (
        lambda cache: cache.share("b", "c", 1),
        "InferenceParams.share: sequence='b', source='c' and tokens=1; a new name",
    ),
    (lambda cache: cache.cut("a", 0), "InferenceParams.cut: sequence='a' and tokens=0; one of the sequences {'a': 3}"),
    (lambda cache: cache.cut("b", 1), "InferenceParams.cut: sequence='b' and tokens=1; one of the sequences {'a': 3}"),
    (lambda cache: cache.drop("b"), "InferenceParams.drop: sequence='b'; one of ['a'] is accepted."),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[sentence[:60] for _, sentence in REFUSED])
def test_what_is_refused_changes_nothing(call: Any, sentence: str) -> None:
    cache = te.InferenceParams(2, 20, 2, CHANNELS, BF16, is_paged=True, total_num_pages=3, page_size=4)
    cache.pre_step({"a": 3})
    before = copy.deepcopy(vars(cache.pages))
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        call(cache)
    assert vars(cache.pages) == before
    assert cache.sequences == {"a": 3}


@pytest.mark.parametrize("call", ["share", "cut", "drop"])
def test_without_pages_nothing_is_shared(call: str) -> None:
    cache = te.InferenceParams(2, 20, 2, CHANNELS, BF16)
    with pytest.raises(ValueError, match=f"^InferenceParams.{call}: is_paged=False; True is accepted, or qkv_format"):
        getattr(cache, call)(*{"share": ("b", "a", 1), "cut": ("a", 1), "drop": ("a",)}[call])


def test_packed_tokens_are_a_batch_of_one() -> None:
    model = Decoder(layers=1)
    cache = paged(model, 16, qkv_format="thd")
    cache.pre_step({"a": 3, "b": 2})
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"a batch of 2 with 3 new tokens; 1 with 5, as pre_step said"),
    ):
        model(torch.zeros(3, 2, HIDDEN, dtype=BF16), inference_params=cache)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pages_are_never_shared_by_mistake(data: st.DataObject) -> None:
    """Tokens are written to rows as `extend` says: each sequence reads its own, and pages are counted as `needed`."""
    pages, memory = Pages(9, data.draw(st.integers(1, 4))), {}
    texts: dict[int, list[int]] = {}
    for turn in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["extend", "share", "cut", "drop"]))
        name = data.draw(st.integers(0, 3))
        if kind == "extend":
            new = data.draw(st.integers(1, 6))
            needed, free = pages.needed({name: new}), len(pages.free)
            if needed > free:
                continue
            start = len(texts.setdefault(name, []))
            for at, to in pages.extend(name, new):
                for i in range(pages.size):
                    memory[to * pages.size + i] = memory.get(at * pages.size + i)
            assert free - len(pages.free) == needed
            texts[name] += [100 * turn + i for i in range(new)]
            memory |= dict(zip(pages.rows(name, start), texts[name][start:], strict=True))
        elif kind == "share" and texts and name not in texts:
            source = data.draw(st.sampled_from(sorted(texts)))
            tokens = data.draw(st.integers(1, len(texts[source])))
            pages.share(name, source, tokens)
            texts[name] = texts[source][:tokens]
        elif kind == "cut" and name in texts:
            texts[name] = texts[name][: data.draw(st.integers(1, len(texts[name])))]
            pages.cut(name, len(texts[name]))
        elif kind == "drop" and name in texts:
            pages.drop(name)
            del texts[name]
        for one, text in texts.items():
            assert [memory[row] for row in pages.rows(one, 0)] == text
    used = {page for own in pages.of.values() for page in own}
    assert sorted(pages.free) == sorted(set(range(9)) - used)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_pages_on_a_gpu(name: str, in_fp8: bool, page_size: int) -> None:
    here = Decoder(**SHAPES[name])
    there = copy.deepcopy(here).cuda()
    with torch.no_grad(), fp8(in_fp8):
        expected = packed(here, paged(here, page_size, qkv_format="thd"), MIXED)
        cache = paged(there, page_size, qkv_format="thd")
        for _ in range(2):
            for one, words in packed(there, cache, MIXED).items():
                assert_same_bits(words.cpu(), expected[one])
            cache.reset()
        for one, words in mixed(there, paged(there, page_size), poison=False).items():
            assert_same_bits(words.cpu(), expected[one])
