"""A cache of keys and values: a prompt and the tokens after it give, bit by bit, what all of them at once give.

On a Hopper GPU it gives the words of the CPU, step by step, and in a CUDA graph.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.inference_cases import BF16, CHANNELS, HIDDEN, OPTIONS, ROOM, STEPS, Decoder, alone, fp8, mixed, numbers

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.float8.float8_tensor import Float8Tensor


def histories(model: torch.nn.Module) -> list[torch.Tensor]:
    metas = [one.fp8_meta["scaling_fwd"] for one in model.modules() if getattr(one, "fp8_meta", None)]
    return [tensor for meta in metas for tensor in (meta.scale, meta.amax_history)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_give_the_words_of_the_whole(name: str, in_fp8: bool) -> None:
    model = Decoder(**OPTIONS[name])
    model = model.trained() if in_fp8 and name != "fp16" else model
    twin = copy.deepcopy(model)
    x = model.numbers(9, sum(STEPS))
    with torch.no_grad(), fp8(in_fp8):
        if name == "fp16":  # where nothing is padded, it means the same
            for layer in twin.layers:
                layer.self_attn_mask_type = "causal"
        whole = twin(x)
        assert_same_bits(model.stepped(x), whole)
    for mine, theirs in zip(histories(model), histories(twin), strict=True):  # the amaxes, too
        assert_same_bits(mine, theirs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", ["block", "window", "modules, batch first"])
def test_sequences_of_all_lengths_come_and_go(name: str, in_fp8: bool) -> None:
    model = Decoder(**OPTIONS[name])
    with torch.no_grad(), fp8(in_fp8):
        cache = model.params()
        for _, found in sorted(mixed(model, cache).items()):
            assert bool(found.isfinite().all())
        cache.reset()
        for name, found in mixed(model, cache).items():
            assert_same_bits(found, alone(model, name, len(found)))


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_sequences_come_and_go_where_a_part_is_observed(mask: str) -> None:
    """Attention then runs by its parts: the words are those of the block, whatever the mask."""
    words = []
    for observed in (False, True):
        model = Decoder(layers=1, self_attn_mask_type=mask)
        if observed:
            model.layers[0].self_attention.proj.register_forward_hook(lambda *_: None)
        with torch.no_grad():
            words.append(mixed(model, model.params()))
    for name, found in words[0].items():
        assert_same_bits(words[1][name], found)


def test_without_a_causal_rule_a_query_sees_its_whole_step() -> None:
    model = Decoder(layers=1, self_attn_mask_type="no_mask")
    x = model.numbers(3, 12, 1)
    with torch.no_grad():
        cache = model.params(1)
        for begin, end in ((0, 7), (7, 8), (8, 10), (10, 12)):
            cache.pre_step({"only": end - begin})
            y = model(x[begin:end], inference_params=cache)
            assert_same_bits(y, model(x[:end])[begin:])
        both = model.params(2)
        both.pre_step({"a": 5, "b": 3})
        y = model(x[:5].expand(5, 2, HIDDEN), inference_params=both)
        assert_same_bits(y[:3, 1], model(x[:3])[:, 0])
        assert_same_bits(y[:, 0], model(x[:5])[:, 0])


def test_a_window_that_looks_ahead() -> None:
    model = Decoder(layers=1, self_attn_mask_type="no_mask", window_size=(2, 1))
    x = model.numbers(3, 12, 1)
    with torch.no_grad():
        both, each = model.params(2), model.params(1)
        both.pre_step({"a": 6, "b": 4})
        y = model(x[:6].expand(6, 2, HIDDEN), inference_params=both)
        each.pre_step({"b": 4})
        assert_same_bits(y[:4, 1], model(x[:4], inference_params=each)[:, 0])
        both.pre_step({"a": 3, "b": 2})
        y = model(x[4:7].expand(3, 2, HIDDEN), inference_params=both)
        each.pre_step({"b": 2})
        assert_same_bits(y[:2, 1], model(x[4:6], inference_params=each)[:, 0])


def test_weights_kept_in_fp8_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with te.quantized_model_init():
        model = Decoder()
    model.trained()
    weights = [one for one in model.parameters() if isinstance(one, Float8Tensor)]
    assert len(weights) == 8
    x = model.numbers(9, sum(STEPS))
    state = model.layers[0].self_attention.layernorm_qkv.fp8_meta["scaling_fwd"]
    assert state.scale[1] != 1
    state.amax_history[0] = 0
    monkeypatch.setattr(Float8Tensor, "dequantize", lambda weight: pytest.fail("a weight was converted"))
    with torch.inference_mode(), fp8():
        assert_same_bits(model.stepped(x), model(x))
    assert state.amax_history[0, 0] > 0
    assert state.amax_history[0, 1] == 0  # no weight was cast


def test_current_scaling_sees_other_amaxes() -> None:
    """The scale of a step is that of its tokens, so it is not the whole's; the step by itself is well defined."""
    model = Decoder()
    x = model.numbers(9, 24)
    with torch.no_grad(), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        steps = (20, 1, 1, 2)
        found, whole = model.stepped(x, steps), model(x)
        assert not torch.equal(found, whole)
        assert_same_bits(found, model.stepped(x, steps))


def test_under_torch_autocast_the_cache_has_its_dtype() -> None:
    model = Decoder(params_dtype=torch.float32)
    x = model.numbers(9, 24)
    model.dtype = BF16
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert_same_bits(model.stepped(x, (20, 1, 1, 2)), model(x))


def test_fp32() -> None:
    """Attention is PyTorch's there; only its rounding can differ."""
    model = Decoder(params_dtype=torch.float32)
    x = model.numbers(9, 24)
    with torch.no_grad():
        found, whole = model.stepped(x, (20, 1, 1, 2)), model(x)
        assert (found - whole).norm() < 1e-5 * whole.norm()  # some hundred roundings of 2^-24
        for name, one in mixed(model, model.params()).items():
            assert (one - alone(model, name, len(one))).norm() < 1e-5 * one.norm()


def test_the_first_cast_of_the_weights_can_be_kept() -> None:
    model = Decoder().trained()
    x = model.numbers(9, 12)
    with torch.no_grad(), fp8():
        cache, outs = model.params(), []
        for begin, end in ((0, 9), (9, 10), (10, 12)):
            cache.pre_step(dict.fromkeys(range(2), end - begin))
            outs.append(model(x[begin:end], inference_params=cache, is_first_microbatch=begin == 0))
        assert_same_bits(torch.cat(outs), model(x))


def test_the_pages_program_writes_what_it_would_without_a_cache() -> None:
    page = (Path(__file__).parents[3] / "docs" / "inference.md").read_text("utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 2
    found: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(3)
    exec("\n".join(programs), found)
    prompt = torch.randint(0, 256, (5, 3))
    text = found["write"](prompt, 20)
    assert len(text) == 25
    with torch.no_grad():
        assert torch.equal(found["model"](text)[4:-1].argmax(-1), text[5:])
    (done,) = found["generator"].generate([prompt[:, 0].tolist()], 20)
    assert done.tokens == text[5:, 0].tolist()


def test_memory_is_allocated_once() -> None:
    model = Decoder()
    cache = model.params()
    assert cache.cache == {}
    x = model.numbers(9, sum(STEPS))
    with torch.inference_mode():
        first = model.stepped(x, cache=cache)
    kept = [t.data_ptr() for pair in cache.cache.values() for t in pair]
    assert len(kept) == 4
    assert [t.shape for t in cache.cache[2]] == [(3, ROOM, 2, CHANNELS)] * 2
    cache.reset()
    assert cache.sequences == {}
    with torch.no_grad():  # what was made in inference mode can be changed outside of it
        assert_same_bits(model.stepped(x, cache=cache), first)
    assert [t.data_ptr() for pair in cache.cache.values() for t in pair] == kept


def test_lengths() -> None:
    cache = te.InferenceParams(3, 20, 2, CHANNELS, BF16)
    assert cache.batch_size == 0
    assert cache.pre_step({"x": 4, "y": 2}) == {"x": 4, "y": 2}
    assert cache.get_seqlens_pre_step().tolist() == [0, 0, 0]
    for name in (1, 2):
        cache.allocate_memory(name)
        cache._ran.add(name)
    assert cache.pre_step({"y": 3, "z": 7}) == {"y": 5, "z": 7}
    assert cache.get_seqlens_pre_step().tolist()[:2] == [2, 0]
    assert (cache.batch_size, list(cache.sequences)) == (2, ["y", "z"])
    assert repr(cache).startswith("InferenceParams(max_batch_size=3, max_sequence_length=20, num_heads_kv=2, ")


def test_attention_by_itself_needs_its_memory() -> None:
    core = te.DotProductAttention(4, CHANNELS, num_gqa_groups=2, layer_number=5, qkv_format="bshd")
    q, k, v = numbers(1, 2, 9, 4, CHANNELS), numbers(2, 2, 9, 2, CHANNELS), numbers(3, 2, 9, 2, CHANNELS)
    cache = te.InferenceParams(2, 20, 2, CHANNELS, BF16)
    with torch.no_grad():
        cache.pre_step({0: 8, 1: 8})
        with pytest.raises(ValueError, match=r"layer_number=5 has no cache; one of \[\] is accepted, or alloc"):
            core(q[:, :8], k[:, :8], v[:, :8], inference_params=cache)
        cache.allocate_memory(5)
        first = core(q[:, :8], k[:, :8], v[:, :8], inference_params=cache)
        cache.pre_step({0: 1, 1: 1})
        second = core(q[:, 8:], k[:, 8:], v[:, 8:], inference_params=cache)
        assert_same_bits(torch.cat([first, second], 1), core(q, k, v))


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0; an int from 1 "),
        ({"max_sequence_length": "8"}, "max_sequence_length='8'; an int from 1 "),
        ({"num_heads_kv": None}, "num_heads_kv=None; an int from 1 "),
        ({"head_dim_k": 12}, "head_dim_k=12; a multiple of 8 from 8 to 256 is accepted"),
        ({"head_dim_k": None}, "head_dim_k=None; a multiple of 8"),
        ({"head_dim_v": 12}, "head_dim_v=12; None or a multiple of 8 from 8 to 256 is accepted"),
        ({"dtype": None}, "dtype=None; float32, bfloat16 and float16 are accepted"),
        ({"dtype": torch.float8_e4m3fn}, "dtype=torch.float8_e4m3fn; float32, "),
        ({"is_paged": True}, "total_num_pages=None and page_size=None with is_paged=True; both are accepted with True"),
        ({"page_size": 64}, "total_num_pages=None and page_size=64 with is_paged=False; both are accepted with True"),
        ({"is_paged": 1}, "is_paged=1; True and False are accepted"),
        ({"page_size": 0}, "page_size=0; None or an int from 1 "),
        ({"qkv_format": "thd", "dtype": torch.float32}, "dtype=torch.float32 in pages, or with qkv_format='thd'; bf"),
        ({"custom_cache_manager": object}, "custom_cache_manager=<class 'object'> is not offered"),
        ({"max_ctx_len": 0}, "max_ctx_len=0; None or an int from 1 "),
        ({"qkv_format": "hd"}, "qkv_format='hd'; one of "),
    ],
)
def test_a_cache_that_is_refused(given: dict[str, Any], sentence: str) -> None:
    sizes = {"max_batch_size": 2, "max_sequence_length": 8, "num_heads_kv": 2, "head_dim_k": 16, "dtype": BF16}
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        te.InferenceParams(**{**sizes, **given})
    assert str(error.value).startswith(f"InferenceParams: {sentence}")
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ({}, "step_dict={}; a dict from sequences to their new tokens is accepted"),
        ([1, 1], r"step_dict=\[1, 1\]; a dict"),
        ({0: 1.0}, "step_dict={0: 1.0}; a dict"),
        ({0: 1, 1: 1, 2: 1, 3: 1}, "step_dict has 4 sequences; max_batch_size=3 are accepted"),
        ({0: 1, 1: 0}, "sequence 1 has 4 tokens and gets 0; 1 or more are accepted"),
        ({0: 157}, "sequence 0 has 4 tokens and gets 157; .* max_sequence_length=160 of them together"),
        ({"new": 161}, "sequence 'new' has 0 tokens and gets 161; "),
    ],
)
def test_a_step_that_is_refused_changes_nothing(step: Any, sentence: str) -> None:
    model = Decoder()
    cache, x = model.params(), model.numbers(1, 5)
    with torch.no_grad():
        cache.pre_step({0: 4, 1: 4})
        model(x[:4], inference_params=cache)
        before = copy.deepcopy(cache.cache)
        with pytest.raises((TypeError, ValueError), match=f"InferenceParams.pre_step: {sentence}"):
            cache.pre_step(step)
        for number, pair in cache.cache.items():
            for mine, theirs in zip(pair, before[number], strict=True):
                assert_same_bits(mine, theirs)
        cache.pre_step({0: 1, 1: 1})
        assert_same_bits(model(x[4:], inference_params=cache), model(x)[4:])


def test_a_step_whose_forward_is_missing() -> None:
    model = Decoder()
    cache, x = model.params(), model.numbers(1, 4)
    with torch.no_grad():
        cache.pre_step({0: 4, 1: 4})
        model(x, inference_params=cache)
        cache.pre_step({0: 1, 1: 1})
        model.layers[0](x[:1], inference_params=cache)
        with pytest.raises(RuntimeError, match=r"the layers \[2\] have not run since the last pre_step, so .* reset"):
            cache.pre_step({0: 1, 1: 1})
        model.layers[1](x[:1], inference_params=cache)
        cache.pre_step({0: 1, 1: 1})


def refusals() -> list[tuple[str, Callable[[Decoder, te.InferenceParams, torch.Tensor], Any], str]]:
    """Name, a call after a prompt of 4 tokens of two sequences and a `pre_step` of one more, and its sentence."""
    half = te.InferenceParams(3, ROOM, 2, CHANNELS, torch.float16)
    half.pre_step({0: 1, 1: 1})
    other = te.InferenceParams(3, ROOM, 4, CHANNELS, BF16)
    other.pre_step({0: 1, 1: 1})

    def call(**more: Any) -> Callable[[Decoder, te.InferenceParams, torch.Tensor], Any]:
        return lambda model, cache, x: model.layers[0](x[:1], **{"inference_params": cache, **more})

    def elsewhere(**options: Any) -> Callable[[Decoder, te.InferenceParams, torch.Tensor], Any]:
        made = te.TransformerLayer(HIDDEN, 128, 4, num_gqa_groups=2, params_dtype=BF16, **options).eval()
        return lambda model, cache, x: made(x[:1], inference_params=cache)

    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    angles = te.RotaryPositionEmbedding(CHANNELS)(4)
    return [
        ("another type", call(inference_params={}), "inference_params={}; None or InferenceParams is accepted"),
        ("dtype", call(inference_params=half), "are torch.bfloat16 on cpu and the cache is torch.float16 on cpu; one "),
        (
            "heads",
            call(inference_params=other),
            r"num_gqa_groups=2 and heads of 16 \(keys\) and 16 \(values\) channels, and inference",
        ),
        ("mask", call(attention_mask=mask), "attention_mask with inference_params; None is accepted"),
        ("mask type", call(self_attn_mask_type="arbitrary"), "the mask type 'arbitrary' is not offered; 'self', "),
        ("cudnn", elsewhere(attention_backend="cudnn"), "attention_backend='cudnn' and the mask type"),
        ("angles", call(rotary_pos_emb=angles), "with 5 positions or more"),
        (
            "tokens",
            lambda model, cache, x: model(x[:2], inference_params=cache),
            "a batch of 2 with 2 new tokens; 2 ",
        ),
        (
            "batch",
            lambda model, cache, x: model(x[:1, :1], inference_params=cache),
            "a batch of 1 with 1 new tokens",
        ),
        (
            "layer",
            elsewhere(layer_number=3),
            r"layer_number=3 has no cache, and .* one of \[1, 2\] is accepted",
        ),
        ("one number twice", elsewhere(layer_number=2), "layer_number=2 is another layer's; a layer_number of its own"),
        ("no number", elsewhere(), "layer_number=1 is another layer's"),
    ]


@pytest.mark.parametrize(("call", "sentence"), [pytest.param(*one[1:], id=one[0]) for one in refusals()])
def test_a_forward_that_is_refused_changes_nothing(call: Any, sentence: str) -> None:
    model = Decoder()
    cache, x = model.params(), model.numbers(1, 5)
    with torch.no_grad(), fp8():
        cache.pre_step({0: 4, 1: 4})
        model(x[:4], inference_params=cache)
        cache.pre_step({0: 1, 1: 1})
        before, amaxes = copy.deepcopy(cache.cache), [one.clone() for one in histories(model)]
        with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError), match=sentence) as error:
            call(model, cache, x)
        assert str(error.value).startswith("TransformerLayer: ")
        assert str(error.value).endswith(".")
        assert cache.cache.keys() == before.keys()
        for mine, theirs in zip(histories(model), amaxes, strict=True):
            assert_same_bits(mine, theirs)
        assert_same_bits(model(x[4:], inference_params=cache), model(x)[4:])


def test_cross_attention_is_refused_and_a_decoder_caches_its_own() -> None:
    cross = te.MultiheadAttention(HIDDEN, 4, attention_type="cross", params_dtype=BF16)
    cache, x, source = te.InferenceParams(2, 8, 4, CHANNELS, BF16), numbers(1, 5, 2, HIDDEN), numbers(2, 3, 2, HIDDEN)
    cache.pre_step({0: 5, 1: 5})
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="MultiheadAttention: inference_params with attention_type='c"):
            cross(x, encoder_output=source, inference_params=cache)
        layer = te.TransformerLayer(HIDDEN, 128, 4, layer_type="decoder", params_dtype=BF16).eval()
        cache.reset()
        outs = []
        for begin, end in ((0, 3), (3, 4), (4, 5)):
            cache.pre_step({0: end - begin, 1: end - begin})
            outs.append(layer(x[begin:end], encoder_output=source, inference_params=cache))
        assert_same_bits(torch.cat(outs), layer(x, encoder_output=source))


def test_torch_compile_is_refused() -> None:
    model = Decoder(layers=1)
    cache = model.params()
    cache.pre_step({0: 2, 1: 2})
    with torch.no_grad(), pytest.raises(Exception, match=r"inference_params under torch.compile is not offered"):
        torch.compile(model, backend="eager", fullgraph=True)(model.numbers(1, 2), inference_params=cache)


@pytest.mark.parametrize("kind", ["layer", "block", "core"])
def test_outside_of_no_grad_the_gradients_end_at_the_cache(kind: str) -> None:
    """The words are those inside of it; a backward that reaches them says why it can't go on."""
    torch.manual_seed(1)
    layer: Any = {
        "layer": lambda: te.TransformerLayer(64, 128, 4, params_dtype=BF16),
        "block": lambda: te.MultiheadAttention(64, 4, params_dtype=BF16, return_bias=True, input_layernorm=True),
        "core": lambda: te.DotProductAttention(4, 16),
    }[kind]().eval()
    x = torch.randn(6, 2, *((4, 16) if kind == "core" else (64,))).to(BF16)
    results = []
    for grad in (True, False):
        cache, outs = te.InferenceParams(2, 8, 4, 16, BF16), []
        cache.allocate_memory(1)
        leaf = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            for first, last in ((0, 5), (5, 6)):
                cache.pre_step(dict.fromkeys(range(2), last - first))
                part = leaf[first:last]
                out = layer(*[part] * (3 if kind == "core" else 1), inference_params=cache)
                outs.append(out[0] if isinstance(out, tuple) else out)
        results.append(outs)
        assert all(out.requires_grad is grad for out in outs)
        assert not any(t.requires_grad for pair in cache.cache.values() for t in pair)
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    with pytest.raises(RuntimeError, match="a backward has reached a forward with a cache, which keeps nothing for"):
        results[0][1].sum().backward()


def test_outside_of_no_grad_a_model_without_gradients_has_none() -> None:
    layer = te.TransformerLayer(64, 128, 4, params_dtype=BF16).eval().requires_grad_(False)
    cache = te.InferenceParams(2, 8, 4, 16, BF16)
    cache.pre_step({0: 3})
    assert not layer(torch.randn(3, 1, 64).to(BF16), inference_params=cache).requires_grad


def pair(**options: Any) -> tuple[Decoder, Decoder]:
    """The same model on both sides."""
    here = Decoder(**options)
    return here, copy.deepcopy(here).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps(name: str, in_fp8: bool) -> None:
    here, there = pair(**OPTIONS[name])
    x = here.numbers(9, sum(STEPS))
    with torch.no_grad(), fp8(in_fp8):
        expected, cache = here.stepped(x), there.params()
        for _ in range(3):  # the last time from tapes
            assert_same_bits(there.stepped(x.cuda(), cache=cache).cpu(), expected)
            cache.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", ["block", "window", "modules, batch first"])
def test_sequences_of_all_lengths(name: str, in_fp8: bool) -> None:
    here, there = pair(**OPTIONS[name])
    with torch.no_grad(), fp8(in_fp8):
        found = mixed(there, there.params())
        for one, words in mixed(here, here.params()).items():
            assert_same_bits(found[one].cpu(), words)
            assert_same_bits(found[one].cpu(), alone(here, one, len(words)))


@pytest.mark.gpu
def test_weights_kept_in_fp8() -> None:
    with te.quantized_model_init():
        here, there = pair()
    x = here.numbers(9, sum(STEPS))
    with torch.inference_mode(), fp8():
        assert_same_bits(there.stepped(x.cuda()).cpu(), here.stepped(x))


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_graph_of_one_step_is_replayed_for_all(in_fp8: bool) -> None:
    here, there = pair()
    x = here.numbers(9, 150)
    held = torch.empty_like(x[:1]).cuda()
    with torch.no_grad(), fp8(in_fp8):
        expected = here(x)
        cache = there.params()
        cache.pre_step({"a": 100, "b": 100})
        assert_same_bits(there(x[:100].cuda(), inference_params=cache).cpu(), expected[:100])
        cache.pre_step({"a": 1, "b": 1})
        held.copy_(x[100:101])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # the same step again and again
                there(held, inference_params=cache)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = there(held, inference_params=cache)
        for at in range(100, 150):
            if at > 100:
                cache.pre_step({"a": 1, "b": 1})
                held.copy_(x[at : at + 1])
            graph.replay()
            assert_same_bits(y.cpu(), expected[at : at + 1])
    assert cache.sequences == {"a": 150, "b": 150}
