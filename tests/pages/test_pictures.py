"""notebooks/pictures.py: claims speak of changes and raise only in CI, and controls move the picture."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))
pictures = importlib.import_module("pictures")
LESSONS = {
    "a": ["import x", "SIZE = 8\nprint(SIZE)", "guess = 3\nprint(guess)"],
    "b": ["import y", "HEIGHT = 1\nprint('something else')"],
}


def test_a_lesson_as_it_is_has_no_changes():
    assert pictures.changes(LESSONS["a"], LESSONS) == []
    assert pictures.changes([], {}) == []


def test_a_changed_line_is_named_and_a_guess_is_not():
    ran = ["import x", "SIZE = 16\nprint(SIZE)", "guess = 4\nprint(guess)", "1 + 1"]
    assert pictures.changes(ran, LESSONS) == ["`SIZE = 16` in place of `SIZE = 8`"]


def test_a_cell_that_is_as_before_again_has_not_changed():
    ran = ["import x", "SIZE = 16\nprint(SIZE)", "SIZE = 8\nprint(SIZE)"]
    assert pictures.changes(ran, LESSONS) == []


def test_a_claim_that_holds_is_ticked(capsys):
    pictures.claim(True, "1 is less than 2.")
    assert capsys.readouterr().out == "✓ 1 is less than 2.\n"


def test_a_claim_that_fails_raises_in_ci_only(capsys, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    pictures.claim(False, "2 is less than 1.")
    said = "✗ With the lesson's numbers: 2 is less than 1. This run found something else."
    assert capsys.readouterr().out == said + "\n"
    monkeypatch.setenv("CI", "1")
    with pytest.raises(AssertionError, match="2 is less than 1"):
        pictures.claim(False, "2 is less than 1.")


def test_a_claim_after_a_change_says_what_changed(capsys, monkeypatch):
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr(pictures, "_ran", lambda: ["import x", "SIZE = 16\nprint(SIZE)"])
    monkeypatch.setattr(pictures, "LESSONS", LESSONS)
    pictures.claim(False, "SIZE is 8.")
    assert capsys.readouterr().out == (
        "✗ With the lesson's numbers: SIZE is 8.\n  Not with yours: `SIZE = 16` in place of `SIZE = 8`.\n"
    )


def test_without_a_front_end_the_default_picture_is_drawn():
    drawn = []
    pictures.play(lambda size=3, kind="x": drawn.append((size, kind)), size=(1, 9))
    assert drawn == [(3, "x")]


def test_a_slider_moves_the_picture():
    pytest.importorskip("ipywidgets")
    drawn = []

    def draw(size=3, step=0.5, kind="x"):
        drawn.append((size, step, kind))

    made, _ = pictures.widgets(draw, {"size": (1, 9), "step": float, "kind": ["x", "w"]})
    made["size"].value = 5
    made["kind"].value = "w"
    made["step"].value = -7.25
    assert drawn == [(3, 0.5, "x"), (5, 0.5, "x"), (5, 0.5, "w"), (5, -7.25, "w")]


def test_a_control_that_is_no_parameter_is_refused():
    def draw(size=3):
        pass

    with pytest.raises(ValueError, match="play: control 'other'; a parameter of draw with a default is accepted"):
        pictures.play(draw, other=(1, 2))
