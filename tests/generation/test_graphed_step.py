"""A step of one token is replayed for other tokens, places and batch sizes, and no word changes."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.frozen_steps import Frozen
from shared.inference_cases import fp8
from shared.text_models import ROOM, alone, check, model_of

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.generation.graphed_step import GraphedStep, rows_of
from reference.generation.sampling import Drawing
from reference.nn.attentions.fixed_step import FixedStep

PROMPTS = [[2, 3, 4], list(range(2, 40)), [5], [*range(2, 39), 3], [7, 7]]
EACH = [te.Sampling(), te.Sampling(0.8, 10, 0.9, 3), te.Sampling(1.0, seed=4), te.Sampling(), te.Sampling(2.0, seed=9)]


def generator(model: Any, **more: Any) -> te.Generator:
    common = {"max_batch_size": 5, "max_sequence_length": ROOM, "page_size": 16, "cuda_graphs": True}
    return te.Generator(model, **{**common, **more})


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "batch first"])
def test_a_captured_step_serves_all(name: str, in_fp8: bool) -> None:
    model = model_of(name)
    with fp8(in_fp8):
        made = generator(model)
        frozen = Frozen(made)
        found = made.generate(PROMPTS, 14, EACH)
        for prompt, one, s in zip(PROMPTS, found, EACH, strict=True):
            check(model, prompt, one, 14, s)
        assert frozen.captures == 1
        assert frozen.replays > 9  # all but the prompts' steps, and the first of one token each


def test_batches_of_other_sizes_have_graphs_of_their_own() -> None:
    """Requests of 6 to 22 tokens: batches of 5, 4, ... sequences, in steps of 5, 4, 4, 2 and 1 rows.

    With the second sequence goes the last limit to what is drawn, so that steps of 4 rows are of two kinds.
    """
    model = model_of("plain")
    made = generator(model)
    frozen = Frozen(made)
    names = [made.add(prompt, 6 + 4 * i, one) for i, (prompt, one) in enumerate(zip(PROMPTS, EACH, strict=True))]
    words: dict[int, list[int]] = {name: [] for name in names}
    while made.busy:
        for word in made.step():
            words[word.name].append(word.token)
    for i, (name, prompt, one) in enumerate(zip(names, PROMPTS, EACH, strict=True)):
        assert words[name] == alone(model, prompt, 6 + 4 * i, one)
    assert frozen.captures == 5  # of 5, 4, 4, 2 and 1 rows


def test_changed_weights_and_another_recipe_are_captured_anew() -> None:
    model, prompt = copy.deepcopy(model_of("plain")), [3, 4, 5]
    made = generator(model)
    frozen = Frozen(made)
    for in_fp8, captures in ((False, 1), (True, 2), (False, 2)):
        with fp8(in_fp8):
            check(model, prompt, made.generate([prompt], 5)[0], 5, te.Sampling())
        assert frozen.captures == captures
    with torch.no_grad():
        model.head.weight.neg_()
    made.forget()
    check(model, prompt, made.generate([prompt], 5)[0], 5, te.Sampling())
    assert frozen.captures == 3


@pytest.mark.parametrize(("sequences", "most", "rows"), [(1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 6, 6), (6, 6, 6)])
def test_rows(sequences: int, most: int, rows: int) -> None:
    assert rows_of(sequences, most) == rows


def test_a_cache_refuses_to_hold_what_is_no_step_of_one_token() -> None:
    made = generator(model_of("plain"))
    sentence = r"^InferenceParams.hold: 1 tokens and rows=0 with packed=True after a pre_step of \[1\]; one token of"
    made.cache.pre_step({"a": 1})
    with pytest.raises(ValueError, match=sentence):
        made.cache.hold([3], 0)
    with pytest.raises(ValueError, match=r"^InferenceParams.hold: 2 tokens and rows=4 .*; one token of each sequence"):
        made.cache.hold([3, 4], 4)


class _Counts:
    """Counts captures of graphs."""

    def __init__(self, made: te.Generator) -> None:
        assert made._graphed is not None
        self.captures = 0
        capture = made._graphed.capture

        def counted(tokens: FixedStep, drawing: Drawing | None) -> Callable[[], object]:
            self.captures += 1
            return capture(tokens, drawing)

        made._graphed.capture = counted  # type: ignore[method-assign]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "batch first"])
def test_words_on_a_gpu_are_equal_with_and_without_graphs(name: str, in_fp8: bool, page_size: int) -> None:
    here = model_of(name)
    there = copy.deepcopy(here).cuda()
    with fp8(in_fp8):
        expected = generator(here, page_size=page_size).generate(PROMPTS, 14, EACH)
        assert generator(there, page_size=page_size, cuda_graphs=False).generate(PROMPTS, 14, EACH) == expected
        made = generator(there, page_size=page_size)
        counts = _Counts(made)
        for _ in range(2):
            assert made.generate(PROMPTS, 14, EACH) == expected
        assert counts.captures >= 1
        with torch.no_grad():  # a forward without FP8 kept in between, and weights in place
            there.head.weight.mul_(-1)
            here = copy.deepcopy(here)
            here.head.weight.mul_(-1)
        made.forget()
        assert made.generate(PROMPTS, 9, EACH) == generator(here, page_size=page_size).generate(PROMPTS, 9, EACH)


@pytest.mark.gpu
def test_a_forward_that_waits_for_the_gpu_is_refused_in_a_sentence() -> None:
    there = copy.deepcopy(model_of("plain")).cuda()

    def waits(tokens: torch.Tensor, cache: te.InferenceParams) -> torch.Tensor:
        found: torch.Tensor = there(tokens, inference_params=cache)
        return found if float(found.sum()) < 1e30 else -found

    made = generator(there, forward=waits)
    with pytest.raises(RuntimeError, match=r"^Generator: cuda_graphs=True, and a step of 1 tokens cannot be captured"):
        made.generate([[2, 3]], 6)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.rand(1, device="cuda")  # the generator is in no capture


def test_only_a_gpu_has_graphs() -> None:
    made = generator(model_of("plain"))
    assert isinstance(made._graphed, GraphedStep)
    assert not made._graphed.can_capture(torch.device("cpu"))
    assert generator(model_of("plain"), cuda_graphs=False)._graphed is None


def test_a_step_of_fixed_tensors_forgets_what_the_step_before_it_had() -> None:
    """Its page table is written where it changes; sequences may come, go, move to other rows, and lose pages."""
    rows, columns, size, draw = 4, 3, 4, random.Random(1)
    used = FixedStep(rows, columns, size, torch.device("cpu"))
    for _ in range(40):
        count = draw.randint(1, rows)
        pages = [[draw.randrange(3) for _ in range(draw.randint(1, columns))] for _ in range(count)]
        lengths = [draw.randint(size * (len(one) - 1) + 1, size * len(one)) for one in pages]
        tokens = [draw.randrange(50) for _ in pages]
        given = (tokens, torch.tensor(tokens + tokens[:1] * (rows - count)), None)  # the last: they are there already
        fill = [*range(count), *[0] * (rows - count)]
        for one in given:
            used.fill(one, lengths, pages)
            table = [[*pages[i], *[0] * (columns - len(pages[i]))] for i in fill]
            positions, into, _, _, found, steps, ends, starts = used.tensors
            assert found.tolist() == table
            assert used.tokens.tolist() == [tokens[i] for i in fill]
            assert used.places.tolist() == positions.tolist() == [lengths[i] - 1 for i in fill]
            last = [(pages[i], lengths[i] - 1) for i in fill]
            assert into.tolist() == [size * own[at // size] + at % size for own, at in last]
            assert ends.tolist() == [lengths[i] for i in fill]
            assert (steps.tolist(), starts.tolist()) == ([1] * rows, list(range(rows + 1)))
            # A page table is changed where it lies, as `Pages.extend` does.
            pages[0][-1] += draw.randint(0, 1)
            if len(pages[0]) < columns:
                pages[0].append(draw.randrange(3))
