"""A request's words are those of the trainer's forward and of a loop without a cache, whoever else is in the batch."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.inference_cases import BF16, Decoder, fp8
from shared.text_models import ROOM, VOCABULARY, Model, alone, check, model_of, whole

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.generation.requests import Completion

OF_ONE_TOKEN = [te.recipe.Float8RowwiseScaling(), te.recipe.MXFP8BlockScaling()]


def generator(model: Model, **more: Any) -> te.Generator:
    return te.Generator(model, **{"max_batch_size": 3, "max_sequence_length": ROOM, "page_size": 16, **more})


@pytest.mark.parametrize("recipe", [None, "delayed", *OF_ONE_TOKEN], ids=repr)
@pytest.mark.parametrize("name", ["plain", "window", "batch first"])
def test_a_rows_logits_do_not_depend_on_later_tokens(name: str, recipe: Any) -> None:
    """So one forward of a text says what a loop of forwards says, one for each token."""
    model, text = model_of(name), [2 + 7 * i % 40 for i in range(40)]
    with torch.no_grad(), fp8(recipe is not None) if recipe in (None, "delayed") else te.autocast(recipe=recipe):
        rows = whole(model, text)
        for length in (1, 2, 9, 39):
            assert_same_bits(whole(model, text[:length]), rows[:length], f"{length}")


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
@pytest.mark.sample(3)
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "batch first"])
def test_words_do_not_depend_on_the_schedule(name: str, in_fp8: bool, data: st.DataObject) -> None:
    """Requests come and are evicted whenever; pages, slots and drafts are any; prompts share what they begin with."""
    model, draw = model_of(name), data.draw
    beginning = draw(st.lists(st.integers(2, 5), min_size=0, max_size=20))
    ends = st.lists(st.integers(2, 5), min_size=1, max_size=6)
    prompts = [beginning[: draw(st.integers(0, 20))] + draw(ends) for _ in range(draw(st.integers(1, 5)))]
    prompts[0] = prompts[0][:1]
    empty = draw(st.booleans())
    if empty:  # of text; every text then begins with token 1
        prompts.append([])
    count = draw(st.integers(1, 7))
    each = [
        te.Sampling(
            draw(st.sampled_from([0.0, 0.0, 0.7, 3.0])),
            draw(st.sampled_from([0, 3])),
            draw(st.sampled_from([0.8, 1.0])),
            seed,
        )
        for seed in range(len(prompts))
    ]
    page_size = draw(st.sampled_from([1, 4, 16, 128]))
    least = -(-(27 + count) // page_size)  # pages of the longest text
    made = generator(
        model,
        max_batch_size=draw(st.integers(1, 4)),
        page_size=page_size,
        total_num_pages=draw(st.integers(least, 3 * least)),
        draft_tokens=draw(st.sampled_from([0, 1, 4])),
        bos=1 if empty else None,
        cuda_graphs=draw(st.booleans()),
        prefill_tokens=draw(st.sampled_from([None, 1, 3, 7])),
    )
    requests = list(zip(prompts, each, strict=True))
    found: dict[int, tuple[list[int], list[float]]] = {}
    order: list[int] = []
    with fp8(in_fp8):
        while requests or made.busy:
            while requests and (not made.busy or draw(st.booleans())):
                order.append(made.add(requests[0][0], count, requests.pop(0)[1]))
                found[order[-1]] = ([], [])
            for one in made.step():
                found[one.name][0].append(one.token)
                found[one.name][1].append(one.logprob)
                assert (one.ended == "length") is (len(found[one.name][0]) == count)
            if made.running and draw(st.integers(0, 4)) == 0:
                made.evict(draw(st.sampled_from(sorted(made.running))))
        for name_, prompt, one in zip(order, prompts, each, strict=True):
            completion = Completion(*found[name_], "length")
            check(model, [1, *prompt] if empty else prompt, completion, count, one)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("draft", ["right", "wrong", "half", "lookup"])
def test_drafts_change_no_word_and_save_steps(draft: str, in_fp8: bool) -> None:
    model, prompt, count = model_of("plain"), [3, 4, 5, 3, 4], 12
    steps = {}
    with fp8(in_fp8):
        for one in (te.Sampling(), te.Sampling(0.9, seed=3)):
            expected = alone(model, prompt, count, one)
            text = prompt + expected

            def proposed(known: Sequence[int], most: int, text: list[int] = text) -> list[int]:
                right = text[len(known) : len(known) + most]
                wrong = [(token + 1) % VOCABULARY for token in right]
                return {"right": right, "wrong": wrong, "half": right[:2] + wrong[2:]}[draft]

            more = {} if draft == "lookup" else {"draft": proposed}
            made = generator(model, draft_tokens=4, **more)
            made.add(prompt, count, one)
            words: list[Any] = []
            steps = 0
            while made.busy:
                words += made.step()
                steps += 1
            assert [word.token for word in words] == expected
            assert [word.ended for word in words] == [None] * (count - 1) + ["length"]
            check(model, prompt, Completion([w.token for w in words], [w.logprob for w in words], "length"), count, one)
            if draft != "lookup":  # the first step has no draft, the others have 1 + 4 tokens, or 1 + 2, or 1
                assert steps == {"right": 4, "wrong": 12, "half": 5}[draft]


@pytest.mark.parametrize("drafted", [1, 2, 3, 4])
def test_a_step_gives_the_right_words_of_its_draft_and_one_more(drafted: int) -> None:
    """Of drafts of each length, from none to all of them."""
    model, prompt, count = model_of("plain"), [3, 4, 5, 3, 4], 9
    expected = alone(model, prompt, count, te.Sampling())
    text = prompt + expected
    for right in range(drafted + 1):

        def proposed(known: Sequence[int], most: int, right: int = right) -> list[int]:
            words = text[len(known) : len(known) + most]
            return words[:right] + [(token + 1) % VOCABULARY for token in words[right:]]

        made = generator(model, draft_tokens=drafted, draft=proposed)
        made.add(prompt, count, te.Sampling())
        given = []
        while made.busy:
            given.append([word.token for word in made.step()])
        assert [token for tokens in given for token in tokens] == expected
        # The first step reads the prompt.
        whole, rest = divmod(count - 1, right + 1)
        assert [len(one) for one in given] == [1] + [right + 1] * whole + [rest] * bool(rest)


def test_a_long_prompt_comes_in_pieces() -> None:
    """While it does, others get a token in each step."""
    model, long, short = model_of("plain"), list(range(2, 42)), [3, 4]
    made = generator(model, prefill_tokens=8)
    sizes = []
    inner = made._forward
    made._forward = lambda tokens, cache: sizes.append(len(tokens)) or inner(tokens, cache)
    first = made.add(short, 8)
    words = made.step()
    second = made.add(long, 3)
    while made.busy:
        words += made.step()
    assert sizes == [2, 9, 9, 9, 9, 9, 2, 2]  # 40 tokens in five pieces, the last of which gives a token
    assert [x.name for x in words] == [first] * 5 + [first, second] * 3
    for name, prompt, count in ((first, short, 8), (second, long, 3)):
        tokens = [x.token for x in words if x.name == name]
        assert tokens == alone(model, prompt, count, te.Sampling())
    with pytest.raises(ValueError, match=r"^Generator: prefill_tokens=0; None or 1 and more are accepted"):
        generator(model, prefill_tokens=0)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_model_drafts_for_all_sequences_at_once(in_fp8: bool) -> None:
    """The model itself guesses right, so that four steps with drafts give what 16 give; another one guesses wrong."""
    model, prompts = model_of("plain"), [[3, 4, 5], list(range(2, 30)), [9]]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.head.weight.neg_()
    options = {"max_batch_size": 3, "max_sequence_length": ROOM}
    with fp8(in_fp8):
        expected = [alone(model, prompt, 16, te.Sampling()) for prompt in prompts]
        for small, steps in ((model, 1 + 3), (other, 16)):
            draft = te.DraftModel(small, **options)
            made, count = generator(model, draft_tokens=4, draft=draft), 0
            names = [made.add(prompt, 16) for prompt in prompts]
            words: list[Any] = []
            while made.busy:
                words += made.step()
                count += 1
            assert count == steps
            assert [[x.token for x in words if x.name == name] for name in names] == expected
        assert draft([1] * (ROOM - 2), 4) == draft([1] * (ROOM - 2), 2)  # its cache has room for no more
        assert draft([1] * ROOM, 4) == []
        begun = te.DraftModel(small, bos=0, **options)  # which takes a place, too
        assert len(begun([1] * (ROOM - 2), 4)) == 1
        assert begun([1] * (ROOM - 1), 4) == []


def test_what_a_draft_refuses_does_not_stay_in_its_queue() -> None:
    draft = te.DraftModel(model_of("plain"), max_batch_size=2, max_sequence_length=ROOM)
    with pytest.raises(ValueError, match=r"^Generator.add: prompt is empty"):
        draft.many([[3, 4, 5], []], [2, 2])
    assert not draft.generator.busy
    assert len(draft([3, 4, 5], 2)) == 2


def test_a_stop_token_ends_a_request_and_a_draft_behind_it_is_forgotten() -> None:
    model, prompt = model_of("plain"), [3, 4, 5]
    text = alone(model, prompt, 10, te.Sampling())
    stop = text[4]
    expected = text[: text.index(stop) + 1]
    made = generator(model, draft_tokens=6, draft=lambda known, most: (prompt + text)[len(known) : len(known) + most])
    assert [(one.tokens, one.ended) for one in made.generate([prompt], 10, stop=[stop])] == [(expected, "stop")]
    (again,) = made.generate([prompt + text[:7]], 3)  # from what is in the cache
    assert again.tokens == text[7:10]


def test_a_prefix_is_computed_once() -> None:
    """Requests of one prompt wait for the first one's keys, and so do later ones."""
    model, prompt = model_of("plain"), list(range(2, 35))
    made, forwards = generator(model, max_batch_size=4), []
    inner = made._forward
    made._forward = lambda tokens, cache: forwards.append(len(tokens)) or inner(tokens, cache)
    each = [te.Sampling(1.0, seed=seed) for seed in range(3)]
    found = made.generate([prompt] * 3, 2, each)
    assert forwards == [33, 3, 2]  # the prompt; its next token beside two last tokens of the prompt; two
    for one, s in zip(found, each, strict=True):
        check(model, prompt, one, 2, s)
    forwards.clear()
    made.generate([prompt + found[0].tokens[:1] + [9]], 1)
    assert forwards == [1]
    assert len(made.cache.pages.free) + len({p for own in made.cache.pages.of.values() for p in own}) == 12 + 4


def test_memory_for_one_sequence_is_enough() -> None:
    """Three sequences share three pages: they are evicted and come again."""
    model, prompts = model_of("plain"), [[2, 3, 4], [5, 4, 3, 2], [3]]
    made, evicted = generator(model, page_size=4, total_num_pages=4), []
    inner = made.schedule.evict
    made.schedule.evict = lambda name: evicted.append(name) or inner(name)  # type: ignore[method-assign]
    for prompt, one in zip(prompts, made.generate(prompts, 12), strict=True):
        check(model, prompt, one, 12, te.Sampling())
    assert evicted


def test_an_error_in_a_forward_loses_no_request() -> None:
    model, prompts = model_of("plain"), [[2, 3, 4], [5, 4, 3, 2]]
    made = generator(model)
    inner, calls = made._forward, []

    def fails(tokens: torch.Tensor, cache: te.InferenceParams) -> torch.Tensor:
        calls.append(1)
        found = inner(tokens, cache)
        if len(calls) == 3:
            raise RuntimeError("here")
        return found

    made._forward = fails
    names = [made.add(prompt, 6) for prompt in prompts]
    words: dict[int, list[int]] = {name: [] for name in names}
    while made.busy:
        try:
            for one in made.step():
                words[one.name].append(one.token)
        except RuntimeError:
            assert [one.name for one in made.waiting] == names
    for name, prompt in zip(names, prompts, strict=True):
        assert words[name] == alone(model, prompt, 6, te.Sampling())


def test_a_cancelled_request_is_gone_and_changes_nobody() -> None:
    model, prompts = model_of("plain"), [[2, 3, 4], [5, 4, 3, 2], [6, 7]]
    made = generator(model, max_batch_size=2)
    names = [made.add(prompt, 8) for prompt in prompts]
    words = made.step()
    made.cancel(names[0])  # it runs
    words += made.step()
    more = made.add([9], 8)
    made.cancel(more)  # it waits
    made.cancel(more)
    while made.busy:
        words += made.step()
    for name, prompt in zip(names[1:], prompts[1:], strict=True):
        assert [x.token for x in words if x.name == name] == alone(model, prompt, 8, te.Sampling())
    assert {x.name for x in words} == set(names)
    assert len([x for x in words if x.name == names[0]]) == 1


def test_forget_lets_changed_weights_write_the_rest() -> None:
    """Without it, keys of the weights of before would stay: of what runs, and of prefixes that are kept."""
    model, prompt, one = copy.deepcopy(model_of("plain")), list(range(2, 30)), te.Sampling(1.0, seed=2)
    made = generator(model)
    made.generate([prompt], 2)
    made.add(prompt, 8, one)
    words = [word.token for _ in range(3) for word in made.step()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.125)
    made.forget()
    assert not made.running
    while made.busy:
        words += [word.token for word in made.step()]
    assert words[3:] == alone(model, prompt + words[:3], 5, one)
    check(model, prompt, made.generate([prompt], 8)[0], 8, te.Sampling())


@pytest.mark.parametrize("recipe", OF_ONE_TOKEN, ids=repr)
def test_recipes_whose_scales_are_of_one_token(recipe: Any) -> None:
    """Prompts in pieces, drafts, shared prefixes and fixed steps, with a cache of 16 bits and of FP8."""
    prompts, each = [list(range(2, 34)), [*range(2, 33), 7], [9] * 32], [te.Sampling(), te.Sampling(0.9, seed=1)]
    each.append(te.Sampling(1.0, top_k=9, seed=2))
    for model in (model_of("plain"), te.keys_and_values_in_fp8(copy.deepcopy(model_of("plain")))):
        with te.autocast(recipe=recipe):
            made = generator(model, prefill_tokens=20, draft_tokens=2, cuda_graphs=True)
            for prompt, found, one in zip(prompts, made.generate(prompts, 5, each), each, strict=True):
                check(model, prompt, found, 5, one)


def test_under_torch_autocast_with_fp32_parameters() -> None:
    model = Model(layers=1, params_dtype=torch.float32).eval()
    with torch.autocast("cpu", BF16):
        for prompt, one in zip([[2], [3, 4]], generator(model).generate([[2], [3, 4]], 4), strict=True):
            check(model, prompt, one, 4, te.Sampling())


def test_what_is_refused() -> None:
    model = model_of("plain")
    made = generator(model)
    for call, sentence in (
        (lambda: made.add([]), "Generator.add: prompt is empty; a token is accepted, or a Generator with bos."),
        (lambda: made.add([1], 0), "Generator.add: a text of 1 tokens with max_new_tokens=0; 1 or more are accepted"),
        (lambda: made.add([1], ROOM), f"Generator.add: a text of 1 tokens with max_new_tokens={ROOM}; "),
        (lambda: te.Generator(torch.nn.Linear(2, 2)), "Generator: model has 0 layers of attention, of 0 kinds"),
        (lambda: te.Generator(Decoder(self_attn_mask_type="no_mask")), r"Generator: model has 2 .* causal types are"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            call()  # type: ignore[no-untyped-call]
    assert not made.busy
    assert made.step() == []
    made.add([1])
    with pytest.raises(RuntimeError, match=r"^Generator.generate: other requests are not done; step\(\) until busy is"):
        made.generate([[2]])
    with (
        te.autocast(recipe=te.recipe.Float8CurrentScaling()),
        pytest.raises(ValueError, match=r"^Generator: the recipe Float8CurrentScaling, in which a token depends on"),
    ):
        made.step()
    with pytest.raises(ValueError, match=r"^Generator: model.training=True, in which a token depends on others or on"):
        generator(copy.deepcopy(model).train()).step()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_gpu_writes_the_same_words(in_fp8: bool, page_size: int) -> None:
    here = model_of("plain")
    there = copy.deepcopy(here).cuda()
    prompts = [[2, 3, 4], list(range(2, 40)), [5], [*range(2, 39), 3]]
    each = [te.Sampling(), te.Sampling(0.8, 10, 0.9, 3), te.Sampling(1.0, seed=4), te.Sampling()]
    with fp8(in_fp8):
        expected = generator(here, page_size=page_size).generate(prompts, 9, each)
        for _ in range(2):
            assert generator(there, page_size=page_size, draft_tokens=3).generate(prompts, 9, each) == expected
