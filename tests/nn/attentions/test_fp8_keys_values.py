"""Keys and values in FP8: exact numbers, attention in its order over them, and trainers that see what servers do."""

import copy
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.inference_cases import BF16, CHANNELS, HIDDEN, Decoder, fp8, numbers
from shared.text_models import ROOM, VOCABULARY, check, model_of

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.nn.attentions.fp8_keys_values import codes_of, rounded
from reference.ops.attentions.attention_paged_codes import CODES, numbers_of, pages_of

EACH = [te.Sampling(), te.Sampling(0.8, seed=3), te.Sampling(1.0, top_k=9, seed=4)]
PROMPTS = [[2, 3, 4], list(range(2, 40)), [*range(2, 39), 3]]


def trained_with(name: str) -> Any:
    return te.keys_and_values_in_fp8(copy.deepcopy(model_of(name)))


def test_numbers_are_exact_and_rounding_twice_is_rounding_once() -> None:
    """All sizes of rows: a code times a power of two is a number of bf16; what it gives is its own rounding."""
    x = numbers(1, 300, 2, 32) * torch.exp2(torch.arange(-30, 120, 0.5)[:, None, None]).to(BF16)
    x[0, 0] = 0
    x[:, 1, :16] *= 2**-9  # some are below the least normal code of their row
    codes, scale_inv = codes_of(x)
    exact = codes.double() * scale_inv.double()[..., None]
    found = numbers_of(codes, scale_inv)
    assert torch.equal(found.double(), exact)
    assert torch.equal(torch.frexp(scale_inv).mantissa, torch.full_like(scale_inv, 0.5))
    assert_same_bits(rounded(found), found)
    assert ((exact - x.double()).abs() <= x.double().abs().amax(-1, keepdim=True) / 16).all()


def test_pages_are_dequantized_in_the_order_of_sequences() -> None:
    x = numbers(2, 5, 4, 2, 16)
    codes, scale_inv = codes_of(x)
    table = torch.tensor([[3, 1, 0], [4, 3, 2]], dtype=torch.int32)
    keys, values, own = pages_of(x, codes, codes.flip(0), scale_inv, scale_inv.flip(0), table, 7)
    assert own.tolist() == [[0, 1], [2, 3]]
    assert_same_bits(keys, rounded(x)[[3, 1, 4, 3]])
    assert_same_bits(values, rounded(x.flip(0))[[3, 1, 4, 3]])


def test_a_page_outside_of_the_cache_is_the_nearest_one() -> None:
    """A GPU's page numbers are not looked at before they are read."""
    x = numbers(2, 5, 4, 2, 16)
    codes, scale_inv = codes_of(x)
    for outside, nearest in ((5, 4), (2**31 - 1, 4), (-1, 0), (-(2**31), 0)):
        table = torch.tensor([[3, outside]], dtype=torch.int32)
        keys, _, _ = pages_of(x, codes, codes, scale_inv, scale_inv, table, 8)
        assert_same_bits(keys, rounded(x)[[3, nearest]], f"page {outside}")


@pytest.mark.sample(4)
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "batch first"])
@pytest.mark.parametrize("page_size", [4, 128])
def test_a_server_has_the_words_of_a_trainer_that_sees_its_numbers(name: str, in_fp8: bool, page_size: int) -> None:
    """Whether the server's model was told or its cache; a cache of 16 bits has them, too."""
    trainer, more = trained_with(name), {"max_batch_size": 3, "max_sequence_length": ROOM, "page_size": page_size}
    with fp8(in_fp8):
        made = te.Generator(trainer, draft_tokens=2, **more)
        found = made.generate(PROMPTS, 9, EACH)
        for prompt, one, s in zip(PROMPTS, found, EACH, strict=True):
            check(trainer, prompt, one, 9, s)
        assert {x.dtype for both in made.cache.cache.values() for x in both} == {CODES}
        for model, how in ((model_of(name), {"fp8_kv": True}), (trainer, {"fp8_kv": False})):
            for graphs in (False, True):
                assert te.Generator(model, cuda_graphs=graphs, **more, **how).generate(PROMPTS, 9, EACH) == found
        assert te.Generator(model_of(name), **more).generate(PROMPTS, 9, EACH) != found


def test_copied_pages_keep_their_scales() -> None:
    """Two texts share the beginning of a page and part within it."""
    trainer = trained_with("plain")
    made = te.Generator(trainer, max_batch_size=2, max_sequence_length=ROOM, page_size=8)
    prompt = list(range(2, 22))
    for end in (1, 5, 9):
        check(trainer, [*prompt, end], made.generate([[*prompt, end]], 6)[0], 6, te.Sampling())
    assert made.generate([[*prompt, 1], [*prompt, 7]], 3)[1].tokens == made.generate([[*prompt, 7]], 3)[0].tokens


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("core_alone", [False, True])
def test_gradients_go_straight_through(core_alone: bool, recomputes: bool, rotary: bool) -> None:
    """They are those of attention of the rounded keys and values, which reach the keys and values themselves."""
    if core_alone:
        core = te.DotProductAttention(4, 16, num_gqa_groups=2)
        q, k, v, grad = (numbers(i, 40, 2, heads, 16) for i, heads in enumerate((4, 2, 2, 4)))
        leaves = [x.clone().requires_grad_() for x in (q, rounded(k), rounded(v))]
        expected = core(*leaves, checkpoint_core_attention=recomputes)
        expected.backward(grad.flatten(2))
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        found = te.keys_and_values_in_fp8(core)(*own, checkpoint_core_attention=recomputes)
        found.backward(grad.flatten(2))
        assert_same_bits(found, expected)
        for one, two in zip(own, leaves, strict=True):
            assert_same_bits(one.grad, two.grad)
        return
    options = {"num_gqa_groups": 2, "attention_dropout": 0.0, "params_dtype": BF16, "fuse_qkv_params": True}
    layer = te.MultiheadAttention(HIDDEN, 4, **options)
    angles = te.RotaryPositionEmbedding(CHANNELS)(40) if rotary else None
    x, grad = numbers(7, 40, 2, HIDDEN), numbers(8, 40, 2, HIDDEN)
    te.keys_and_values_in_fp8(layer)
    more = {"rotary_pos_emb": angles, "checkpoint_core_attention": recomputes}
    layer(x, **more).backward(grad)
    found_grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    out = layer(x, **more)

    layer.zero_grad()
    mixed = layer.qkv(x)  # the same step by step
    q, k, v = mixed.view(40, 2, 2, 4, CHANNELS).split((2, 1, 1), dim=3)
    q, k, v = (t.reshape(40, 2, -1, CHANNELS) for t in (q, k, v))
    if angles is not None:
        q, k = (te.apply_rotary_pos_emb(t, angles) for t in (q, k))
    k, v = (t + (rounded(t.detach()) - t).detach() for t in (k.float(), v.float()))
    core = te.DotProductAttention(4, CHANNELS, num_gqa_groups=2)
    by_parts = layer.proj(core(q, k.to(BF16), v.to(BF16)))
    by_parts.backward(grad)
    assert_same_bits(out, by_parts)
    for one, two in zip(found_grads, (p.grad for p in layer.parameters() if p.grad is not None), strict=True):
        assert_same_bits(one, two)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^keys_and_values_in_fp8: model=Linear has no attention of this package"):
        te.keys_and_values_in_fp8(torch.nn.Linear(2, 2))
    layer = te.keys_and_values_in_fp8(te.MultiheadAttention(HIDDEN, 4, params_dtype=torch.float16))
    with pytest.raises(NotImplementedError, match=r"^MultiheadAttention: keys and values in FP8 with torch.float16"):
        layer(numbers(1, 4, 1, HIDDEN, dtype=torch.float16))
    core = te.keys_and_values_in_fp8(te.DotProductAttention(2, 24))
    with pytest.raises(NotImplementedError, match=r"^DotProductAttention: keys and .* heads of \(24, 24\) channels"):
        core(*[numbers(i, 4, 1, 2, 24) for i in range(3)])
    with pytest.raises(ValueError, match=r"^InferenceParams: fp8_kv=True with dtype=torch.float16, heads of 16 and"):
        te.InferenceParams(2, 8, 2, 16, torch.float16, is_paged=True, total_num_pages=2, page_size=4, fp8_kv=True)
    with pytest.raises(ValueError, match=r"^InferenceParams: fp8_kv=True .* and is_paged=False; bfloat16"):
        te.InferenceParams(2, 8, 2, 16, BF16, fp8_kv=True)
    recipe = te.DelayedScaling(fp8_dpa=True)
    core = te.keys_and_values_in_fp8(te.DotProductAttention(2, 16))
    with te.autocast(recipe=recipe), pytest.raises(NotImplementedError, match=r"^DotProductAttention: .* fp8_dpa=True"):
        core(*[numbers(i, 16, 1, 2, 16) for i in range(3)])


def test_it_can_be_undone() -> None:
    model = Decoder()
    x = model.numbers(3, 20)
    before = model(x)
    te.keys_and_values_in_fp8(model)
    assert not torch.equal(model(x), before)
    te.keys_and_values_in_fp8(model, False)
    assert_same_bits(model(x), before)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpu_has_the_same_words_and_gradients(graphs: bool, page_size: int) -> None:
    here = trained_with("plain")
    there = copy.deepcopy(here).cuda()
    more = {"max_batch_size": 3, "max_sequence_length": ROOM, "page_size": page_size}
    with fp8():
        expected = te.Generator(here, **more).generate(PROMPTS, 9, EACH)
        assert te.Generator(there, cuda_graphs=graphs, **more).generate(PROMPTS, 9, EACH) == expected
        text = torch.arange(40)[:, None].expand(40, 2).contiguous() % VOCABULARY
        for model, tokens in ((here, text), (there, text.cuda())):
            model.zero_grad()
            model(tokens).float().square().sum().backward()
    for one, two in zip(here.parameters(), there.parameters(), strict=True):
        assert_same_bits(two.grad.cpu(), one.grad)
