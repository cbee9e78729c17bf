"""notebooks/puzzles.py: every solution passes, every stub is named as unsolved, a wrong word is found and shown."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "notebooks"
sys.path.append(str(FOLDER))
puzzles = importlib.import_module("puzzles")
solutions = importlib.import_module("puzzles_solutions")
NAMES = list(puzzles.PUZZLES)


def stubs():
    """The functions that puzzles.ipynb leaves to the reader, by puzzle."""
    cells = json.loads((FOLDER / "puzzles.ipynb").read_text("utf-8"))["cells"]
    found = {}
    space = {"torch": torch, "puzzles": type("Collected", (), {"check": staticmethod(found.__setitem__)})}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "puzzles.check(" in source:
            exec(source, space)
    return found


def spoilt(answer, at):
    """The answer, but in its call number `at` the last word (of the first result) has another lowest bit."""
    calls = 0

    def flip(got):
        if isinstance(got, tuple):
            return (flip(got[0]), *got[1:])
        if isinstance(got, int):
            return got ^ 1
        if isinstance(got, list):
            return [*got[:-1], got[-1] ^ 1]
        if isinstance(got, float):
            got = torch.tensor(got)
        got = got.clone()
        words = got.view(puzzles.INTEGERS[got.element_size()])
        words[(-1,) * words.dim()] ^= 1
        return got

    def changed(*args):
        nonlocal calls
        calls += 1
        got = answer(*args)
        return flip(got) if calls == at else got

    return changed


def test_every_puzzle_has_a_number_a_solution_and_a_stub():
    assert [int(name.split()[0]) for name in NAMES] == list(range(1, len(NAMES) + 1))
    assert len(NAMES) >= 12
    assert list(solutions.SOLUTIONS) == NAMES == list(stubs())


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(name):
    verdict = puzzles.grade(name, solutions.SOLUTIONS[name])
    assert verdict.solved, verdict.sentence
    assert verdict.sentence.startswith(f"{name}: solved, all ")


@pytest.mark.parametrize("name", NAMES)
def test_the_stub_is_not_solved_yet(name):
    assert puzzles.grade(name, stubs()[name]) == puzzles.Verdict(False, f"{name}: not solved yet.")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_bit_is_found_and_named(name):
    verdict = puzzles.grade(name, spoilt(solutions.SOLUTIONS[name], 2 if name == "13 softmax_step" else 1))
    assert not verdict.solved
    assert " words are wrong. The first is " in verdict.sentence
    assert ": got " in verdict.sentence
    assert "expected " in verdict.sentence


def test_the_sentence_names_place_word_and_value():
    def almost(code):
        return 3.5 if code == 0x45 else solutions.decode(code)

    sentence = puzzles.grade("1 decode", almost).sentence
    assert sentence == (
        "1 decode: 1 of 256 words are wrong. The first is code 0x45: got 0x40600000 (3.5), expected 0x40500000 (3.25)."
    )


def test_a_wrong_word_of_a_matrix_has_an_index():
    def almost(a, b):
        got = solutions.fast(a, b)
        got[3, 5] = 1.0
        return got

    sentence = puzzles.grade("8 fast", almost).sentence
    assert sentence.startswith(
        "8 fast: 2 of 496 words are wrong. The first is E4M3 × E4M3, 96×80×528, fast, index [3, 5]"
    )
    assert "got 0x3F800000 (1)" in sentence


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("8 fast", lambda a, b: a.double() @ b.double().T, "the answer is torch.float64, torch.float32 is expected."),
        ("8 fast", lambda a, b: torch.zeros(3), "the answer has shape [3], [24, 16] is expected."),
        ("2 encode", lambda x: 256, "the answer is 256, a code from 0 to 255 is expected."),
        ("1 decode", lambda code: "one", "code 0x00: the answer is 'one', torch.float32 is expected."),
        (
            "1 decode",
            lambda code: None if code == 5 else 0.0,
            "code 0x05: the answer is None; is there a path without `return`?",
        ),
    ],
)
def test_a_wrong_type_or_shape_is_named(name, answer, words):
    verdict = puzzles.grade(name, answer)
    assert not verdict.solved
    assert verdict.sentence.startswith(f"{name}: ")
    assert verdict.sentence.endswith(words)


def test_an_error_in_the_answer_says_in_which_puzzle():
    with pytest.raises(ZeroDivisionError) as caught:
        puzzles.grade("1 decode", lambda code: 1 / 0)
    assert caught.value.__notes__ == ["(while puzzle 1 decode called your function)"]


def test_an_unknown_puzzle_is_refused():
    with pytest.raises(ValueError, match=r"there is no puzzle '99'; the puzzles are 1 decode, 2 encode"):
        puzzles.grade("99", lambda: None)


def test_words_that_no_h200_recorded_are_refused(monkeypatch):
    puzzles.h200.cache_clear()
    monkeypatch.setattr(torch.ops.twin, "dbias", lambda grad: grad.sum(0), raising=False)
    with pytest.raises(RuntimeError, match="does not give the recorded words of dbias/fp32"):
        puzzles.h200("dbias", "fp32 [1000, 48]", "dbias")


def test_check_prints_and_remembers(capsys):
    puzzles.check("1 decode", lambda code: None)
    puzzles.check("6 term", solutions.term)
    assert capsys.readouterr().out == "1 decode: not solved yet.\n6 term: solved, all 8,670 words agree.\n"
    assert puzzles.RESULTS == {"1 decode": False, "6 term": True}


@pytest.mark.parametrize("results", [{}, {"6 term": True}, {"9 split": False, "1 decode": True}])
def test_the_scoreboard_works_from_any_state(results, monkeypatch, capsys):
    """In any order, and however few cells were run."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(puzzles, "RESULTS", results)
    cells = json.loads((FOLDER / "puzzles.ipynb").read_text("utf-8"))["cells"]
    space = {"plt": pyplot, "puzzles": puzzles, "pictures": importlib.import_module("pictures")}
    exec("".join(cells[-1]["source"]), space)
    pyplot.close("all")
    said = f"{sum(results.values())} of {len(NAMES)} solved, {len(results)} tried"
    assert capsys.readouterr().out.strip() == said
