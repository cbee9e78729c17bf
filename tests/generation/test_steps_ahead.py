"""Where the host launches a step before it has read the one before, every word is the same, and nobody waits early."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.frozen_steps import Frozen
from shared.inference_cases import fp8
from shared.text_models import ROOM, alone, model_of, whole

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.generation.requests import Token
from reference.support import pinned

COUNT = 9


def generator(model: Any, **more: Any) -> te.Generator:
    common = {"max_batch_size": 3, "max_sequence_length": ROOM, "page_size": 16, "cuda_graphs": True}
    return te.Generator(model, **{**common, **more})


def until(text: list[int], stop: list[int]) -> list[int]:
    """A text up to a stop token."""
    return text[: next((i + 1 for i, token in enumerate(text) if token in stop), len(text))]


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], found: list[int]) -> list[float]:
    """Of the new tokens, by the trainer's loss."""
    text = [*prompt, *found]
    losses = te.cross_entropy(whole(model, text[:-1]), torch.tensor(text[1:]), reduction="none")
    return (-losses[len(prompt) - 1 :]).tolist()  # type: ignore[no-any-return]


def every_page_is_somebodys(made: te.Generator) -> None:
    """Pages are free or of a prefix that is kept: what an ended sequence's last step wrote belongs to nobody."""
    pages = made.pages
    owned = {page for name in pages.of for page in pages.of[name]}
    assert pages.of.keys() == made.schedule.kept.keys()
    assert len(pages.free) + len(owned) == pages.count
    assert not owned & set(pages.free)
    assert all(pages.lengths[name] == len(text) - 1 for name, text in made.schedule.kept.items())


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
@pytest.mark.sample(2)
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_steps_ahead_change_no_word(frozen: bool, in_fp8: bool, data: st.DataObject) -> None:
    """Stop tokens in the middle, limits, requests that come while others run, few pages, who is evicted or gone."""
    model, draw = model_of("plain"), data.draw
    page_size = draw(st.sampled_from([1, 4, 16]))
    least = -(-(8 + COUNT) // page_size)
    options = {"page_size": page_size, "total_num_pages": draw(st.integers(least, 3 * least))}
    made = generator(model, **options, max_batch_size=draw(st.integers(1, 4)))
    if frozen:
        Frozen(made)
    beginning = draw(st.lists(st.integers(2, 5), max_size=6))
    requests = [
        (
            [*beginning[: draw(st.integers(0, 6))], draw(st.integers(2, 9)), 3],
            draw(st.integers(1, COUNT)),
            te.Sampling(draw(st.sampled_from([0.0, 0.0, 0.8])), draw(st.sampled_from([0, 3])), seed=seed),
        )
        for seed in range(draw(st.integers(1, 6)))
    ]
    names: dict[int, int] = {}
    words: list[list[Token]] = [[] for _ in requests]
    gone = set()
    with fp8(in_fp8):
        texts = [alone(model, *one) for one in requests]
        stops = [[draw(st.sampled_from(text))] if draw(st.booleans()) else [] for text in texts]
        while len(names) < len(requests) or made.busy:
            while len(names) < len(requests) and (not made.busy or draw(st.integers(0, 2)) == 0):
                i = len(names)
                names[made.add(*requests[i], stop=stops[i])] = i
            for word in made.step():
                words[names[word.name]].append(word)
            what = draw(st.integers(0, 9))
            if made.running and what < 2:
                name = draw(st.sampled_from(sorted(made.running)))
                if what == 0:
                    made.evict(name)
                else:
                    made.cancel(name)
                    gone.add(names[name])
            elif what == 2:
                made.forget()
        for i, ((prompt, *_), stop, text) in enumerate(zip(requests, stops, words, strict=True)):
            tokens, found = until(texts[i], stop), [word.token for word in text]
            assert found == tokens[: len(found)]
            assert [word.logprob for word in text] == logprobs(model, prompt, found) if found else True
            assert [word.ended for word in text[:-1]] == [None] * (len(text) - 1)
            if i not in gone:
                assert len(found) == len(tokens)
                assert text[-1].ended == ("stop" if found[-1] in stop else "length")
    assert made.step() == []
    every_page_is_somebodys(made)


class Watched:
    """In which order steps were launched and read."""

    def __init__(self, made: te.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        inner, wait = made._forward, pinned.Fetched.wait

        def forward(tokens: torch.Tensor, cache: te.InferenceParams) -> torch.Tensor:
            self.events.append("launch")
            return inner(tokens, cache)

        def read(fetched: pinned.Fetched) -> list[torch.Tensor]:
            self.events.append("read")
            return wait(fetched)

        made._forward = forward
        monkeypatch.setattr(pinned.Fetched, "wait", read)


def test_a_step_is_launched_before_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last: it ends the request, so none follows."""
    model = model_of("plain")
    made = generator(model)
    watched = Watched(made, monkeypatch)
    made.add([3, 4, 5], 6)
    words = [[word.token for word in made.step()] for _ in range(7)]
    text = alone(model, [3, 4, 5], 6, te.Sampling())
    assert words == [[], *([token] for token in text)]
    assert not made.busy
    assert watched.events == ["launch", *["launch", "read"] * 5, "read"]


@pytest.mark.parametrize(
    ("first", "options"),
    [([3, 4, 5], {"max_batch_size": 1}), ([3, 4, 5, 6, 7, 8, 9, 9, 9], {"page_size": 4, "total_num_pages": 3})],
)
def test_who_waits_comes_in_when_somebodys_end_is_read(
    first: list[int], options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, while no slot is free or no page is, steps are launched ahead."""
    model, second, count = model_of("plain"), [9, 2], 3
    text = alone(model, first, count, te.Sampling())
    at = text.index(text[1]) + 1
    made = generator(model, **options)
    watched = Watched(made, monkeypatch)
    names = [made.add(first, count, stop=[text[1]]), made.add(second, 8)]
    words = []
    while made.busy:
        words += made.step()
    assert [x.token for x in words if x.name == names[0]] == text[:at]
    assert [x.token for x in words if x.name == names[1]] == alone(model, second, 8, te.Sampling())
    # The stop token is read when another step of its sequence is on its way, whose token nobody sees.
    assert watched.events[: 2 * at + 1] == ["launch", *["launch", "read"] * at]
    assert watched.events.count("launch") == watched.events.count("read") == at + 1 + 8
    every_page_is_somebodys(made)


def test_a_draft_needs_the_words_so_its_steps_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("plain")
    for options in ({"draft_tokens": 2}, {"cuda_graphs": False}):
        made = generator(model, **options)
        watched = Watched(made, monkeypatch)
        made.add([3, 4, 5], 4)
        words = []
        while made.busy:
            found = made.step()
            assert found
            words += found
        assert [word.token for word in words] == alone(model, [3, 4, 5], 4, te.Sampling())
        assert watched.events == ["launch", "read"] * (len(watched.events) // 2)
        monkeypatch.undo()


def test_who_is_cancelled_gets_no_word_that_was_on_its_way() -> None:
    model, prompts = model_of("plain"), [[2, 3, 4], [5, 4, 3, 2]]
    made = generator(model)
    names = [made.add(prompt, 6) for prompt in prompts]
    words = made.step() + made.step()
    made.evict(names[1])  # which reads what is on its way: words for the next call
    made.cancel(names[0])
    while made.busy:
        words += made.step()
    assert [word.token for word in words if word.name == names[0]] == alone(model, prompts[0], 1, te.Sampling())
    assert [word.token for word in words if word.name == names[1]] == alone(model, prompts[1], 6, te.Sampling())


def test_an_error_loses_no_word() -> None:
    """In any launch: what was on its way is computed again."""
    model, prompts = model_of("plain"), [[2, 3, 4], [5, 4, 3, 2]]
    for failing in range(1, 9):
        made, calls = generator(model), [0]
        inner = made._forward

        def fails(tokens: torch.Tensor, cache: Any, inner: Any = inner, calls: Any = calls, at: int = failing) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise RuntimeError("here")
            return inner(tokens, cache)

        made._forward = fails
        names = [made.add(prompt, 3 + i, te.Sampling(0.9, seed=i)) for i, prompt in enumerate(prompts)]
        words: dict[int, list[int]] = {name: [] for name in names}
        while made.busy:
            try:
                for one in made.step():
                    words[one.name].append(one.token)
            except RuntimeError:
                assert not made.running
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            assert words[name] == alone(model, prompt, 3 + i, te.Sampling(0.9, seed=i))


def test_who_is_evicted_may_have_ended_with_the_step_on_its_way() -> None:
    model = model_of("plain")
    made = generator(model)
    names = [made.add(prompt, 2) for prompt in ([2, 3], [4, 5, 6])]
    words = [*made.step(), *made.step()]
    for name in names:  # the first reads the last token of both
        made.evict(name)
    while made.busy:
        words += made.step()
    for name, prompt in zip(names, ([2, 3], [4, 5, 6]), strict=True):
        assert [one.token for one in words if one.name == name] == alone(model, prompt, 2, te.Sampling())
    made.evict(names[0])  # it is done, and stays so
    assert not made.busy


@pytest.mark.parametrize("where", ["evict", "step", "fits"])
def test_an_error_in_between_leaves_each_request_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the generator goes on, with every word."""
    model, prompts = model_of("plain"), ([2, 3], list(range(2, 22)))
    made = generator(model)
    names = [made.add(prompt, 5) for prompt in prompts]
    words: list[Token] = []
    if where != "fits":
        words += [*made.step(), *made.step()]

    def fails(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if where == "fits":
            patched.setattr(made.schedule, "fits", fails)
        else:
            patched.setattr(pinned.Fetched, "wait", fails)
        with pytest.raises(KeyboardInterrupt):
            made.evict(names[0]) if where == "evict" else made.step()
        assert not made._graphed._graphs  # type: ignore[union-attr]
    assert [one.name for one in made.waiting] == names
    while made.busy:
        words += made.step()
    for name, prompt in zip(names, prompts, strict=True):
        assert [one.token for one in words if one.name == name] == alone(model, prompt, 5, te.Sampling())


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_gpu_gives_the_same_words_with_stops_and_few_slots(in_fp8: bool) -> None:
    here = model_of("plain")
    there = copy.deepcopy(here).cuda()
    prompts = [[2, 3, 4], list(range(2, 40)), [5], [*range(2, 39), 3], [7, 7]]
    each = [te.Sampling(), te.Sampling(0.8, 10, 0.9, 3), te.Sampling(1.0, seed=4), te.Sampling(), te.Sampling(2.0)]
    with fp8(in_fp8):
        texts = [alone(here, prompt, 14, one) for prompt, one in zip(prompts, each, strict=True)]
        stop = [texts[0][5], texts[2][3]]
        for pages in (64, 12):
            made = generator(there, total_num_pages=pages)
            for _ in range(2):
                found = made.generate(prompts, 14, each, stop)
                for prompt, text, done in zip(prompts, texts, found, strict=True):
                    assert done.tokens == until(text, stop)
                    assert done.logprobs == logprobs(here, prompt, done.tokens)
