"""A step that only moves the same sequences on leaves everything as a step that is said in full."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.text_models import ROOM, check, model_of

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.generation.requests import Completion
from reference.nn.attentions.fixed_step import FixedStep
from reference.nn.attentions.kv_cache import InferenceParams
from reference.nn.attentions.pages import Pages
from reference.support import pinned


def cache(**options: Any) -> InferenceParams:
    sizes = {"total_num_pages": 24, "page_size": 4, **options}
    return InferenceParams(4, 20, 1, 16, torch.bfloat16, is_paged=True, qkv_format="thd", device="cpu", **sizes)


def state(pages: Pages) -> Any:
    return {name: (pages.lengths[name], pages.of[name]) for name in pages.of}, pages.free, pages._owners


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sequences_grow_as_if_each_were_extended(data: st.DataObject) -> None:
    draw = data.draw
    pages = Pages(draw(st.integers(6, 14)), draw(st.sampled_from([1, 3, 4])))
    for name in range(draw(st.integers(1, 4))):
        if pages.needed({name: 3}) <= len(pages.free):
            pages.extend(name, draw(st.integers(1, 3)))
    for step in range(12):
        what = draw(st.integers(0, 9))
        if what == 0:
            source = draw(st.sampled_from(sorted(pages.of)))
            pages.share(100 + step, source, draw(st.integers(1, pages.lengths[source])))
        elif what == 1 and len(pages.of) > 1:
            pages.drop(draw(st.sampled_from(sorted(pages.of))))
        names = sorted(pages.of)
        other = copy.deepcopy(pages)
        found = pages.grow(names)
        if found is None:
            shared = any(pages._owners[pages.of[n][-1]] > 1 and pages.lengths[n] % pages.size for n in names)
            assert shared or pages.needed(dict.fromkeys(names, 1)) > len(pages.free)
            assert state(pages) == state(other)
            continue
        before = {name: len(other.of[name]) for name in names}
        assert all(other.extend(name, 1) == [] for name in names)
        assert state(pages) == state(other)
        assert found[0] == [pages.lengths[name] for name in names]
        assert [names[i] for i in found[1]] == [name for name in names if len(pages.of[name]) > before[name]]


def test_a_cache_goes_on_or_says_that_it_has_not() -> None:
    one, other = cache(), cache()
    for each in (one, other):
        each.pre_step({"a": 3, "b": 1})
    assert not one.step_again(["a", "b"])  # after a prompt
    for each in (one, other):
        each.pre_step({"a": 1, "b": 1})
    for _ in range(6):
        assert one.step_again(["a", "b"])
        other.pre_step({"a": 1, "b": 1})
        assert one.sequences == other.sequences
        assert one.sequences_pre_step == other.sequences_pre_step
        assert state(one.pages) == state(other.pages)  # type: ignore[arg-type]
        assert one.positions.tolist() == other.positions.tolist()
    assert not one.step_again(["a"])
    assert not one.step_again(["b", "a"])
    assert not one.step_again([])
    while max(one.sequences.values()) < 20:
        assert one.step_again(["a", "b"])
    assert not one.step_again(["a", "b"])
    with pytest.raises(ValueError, match="max_sequence_length"):
        one.pre_step({"a": 1, "b": 1})
    one.drop("b")
    assert not one.step_again(["a", "b"])


def test_a_layer_that_did_not_run_is_refused_in_full() -> None:
    one = cache()
    one.allocate_memory(1)
    one.pre_step({"a": 1})
    assert not one.step_again(["a"])
    one.replayed()
    assert one.step_again(["a"])


def test_lengths_before_the_step_are_there_whenever_somebody_asks() -> None:
    one = cache()
    one.pre_step({"a": 3, "b": 1})
    one.pre_step({"a": 1, "b": 1})
    assert one.step_again(["a", "b"])
    kept = one.pre_step_seqlens
    assert kept[:2].tolist() == one.get_seqlens_pre_step()[:2].tolist() == [4, 2]
    assert one.step_again(["a", "b"])
    assert kept[:2].tolist() == [5, 3]  # as a graph reads it, where it lies
    one.pre_step({"b": 2})
    assert kept[:1].tolist() == [4]


def test_a_step_that_ended_leaves_what_the_next_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns, size = 4, 3, 4
    used, copies = FixedStep(rows, columns, size, torch.device("cpu")), list[int]()
    fill = pinned.fill

    def counted(target: torch.Tensor, x: torch.Tensor) -> None:
        copies.append(x.numel())
        fill(target, x)

    monkeypatch.setattr(pinned, "fill", counted)
    pages, lengths = [[0], [1], [2]], [1, 2, 3]
    used.fill([7, 8, 9], lengths, pages)
    for step in range(7):
        used.end(torch.arange(rows) + step, torch.full((rows,), 0.5 + step))
        used.ended()
        assert used.tokens.tolist() == [step + i for i in range(rows)]
        tokens, losses = used.parted(used.found.clone())
        assert tokens.tolist() == used.tokens.tolist()
        assert losses.tolist() == [0.5 + step] * rows
        lengths = [n + 1 for n in lengths]
        changed = [i for i, n in enumerate(lengths) if n > size * len(pages[i])]
        for i in changed:
            pages[i].append(3 + step + i)
        copies.clear()
        used.fill(None, lengths, pages if changed else [], changed)
        assert len(copies) == (1 if changed else 0)
        fresh = FixedStep(rows, columns, size, torch.device("cpu"))
        fresh.fill(None, lengths, pages)
        for a, b in zip([used.places, *used.tensors], [fresh.places, *fresh.tensors], strict=True):
            assert (a is None and b is None) or a.tolist() == b.tolist()


def test_a_step_that_goes_on_makes_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has found, to the host."""
    model = model_of("plain")
    made = te.Generator(model, max_batch_size=2, max_sequence_length=ROOM, page_size=16, cuda_graphs=True)
    names, events = [made.add([3, 4, 5], 12), made.add([6, 7], 12)], list[str]()
    words: dict[int, list[Any]] = {name: [] for name in names}
    fill, begin = pinned.fill, pinned.Fetched.__init__

    def filled(*given: Any) -> None:
        events.append("to the device")
        fill(*given)

    def fetched(self: Any, *tensors: torch.Tensor) -> None:
        events.extend(["to the host"] * len(tensors))
        begin(self, *tensors)

    monkeypatch.setattr(pinned, "fill", filled)
    monkeypatch.setattr(pinned.Fetched, "__init__", fetched)
    for step in range(20):
        events.clear()
        for word in made.step():
            words[word.name].append(word)
        if 3 < step < 11:  # the prompts' pages have room until then
            assert events == ["to the host"], step
    for name, prompt in zip(names, ([3, 4, 5], [6, 7]), strict=True):
        found = Completion([w.token for w in words[name]], [w.logprob for w in words[name]], "length")
        check(model, prompt, found, 12, te.Sampling())
