"""The microscope's arithmetic and its puzzles are those of `reference`, of an H200, and of notebooks/puzzles.py.

Each test runs the page's own scripts in V8; those of what is finite run in a Chromium, too, where one is found.
"""

import importlib
import json
import math
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from shared import microscope
from shared.microscope import Engine, ask, base64_of, call

from optimized.recordings import steps
from reference.numbers import block_formats, formats, philox, tensor_core

FOLDER = microscope.FOLDER
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
sys.path.append(str(NOTEBOOKS))
puzzles = importlib.import_module("puzzles")
SOLUTIONS = importlib.import_module("puzzles_solutions").SOLUTIONS
NAMES = [name for name in puzzles.PUZZLES if int(name.split()[0]) <= 7]
FP8 = {fmt.name: fmt for fmt in formats.FORMATS}
MOST_BYTES = 300_000
WORDS = st.integers(0, 2**32 - 1)
CODES = st.integers(0, 255)
SCALES = st.floats(2.0**-30, 2.0**30, width=32)


@pytest.fixture(scope="module")
def v8(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with microscope.engine("V8", tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module", params=["V8", "Chromium"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with microscope.engine(request.param, tmp_path_factory.mktemp("profile")) as found:
        yield found


def words(tensor: torch.Tensor) -> list[int]:
    """The 32 bits of fp32 numbers; every NaN is None, as it is in JSON."""
    found = tensor.contiguous().view(torch.int32).numpy().view(np.uint32).tolist()
    return [None if nan else word for nan, word in zip(tensor.isnan().tolist(), found, strict=True)]


def bf16_words() -> torch.Tensor:
    return torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()


def values(name: str) -> torch.Tensor:
    """The value of every code of a format, by the definition."""
    if name in FP8:
        return formats.decode_table(FP8[name])
    if name == "E8M0":
        return block_formats.decode_e8m0(torch.arange(256, dtype=torch.uint8))
    return block_formats.decode_e2m1(torch.arange(16, dtype=torch.uint8)[:, None])[:, 0]


# ---- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E8M0", "E2M1"])
def test_every_code_has_its_value(engine: Engine, name: str) -> None:
    wanted = words(values(name))
    script = "(name, n) => Array.from({length: n}, (_, code) => numbers.decode(code, numbers[name]))"
    got = call(
        engine,
        f"(name, n) => ({script})(name, n).map((x) => Number.isNaN(x) ? null : numbers.wordOf(x))",
        name,
        len(wanted),
    )
    assert got == wanted


@pytest.mark.parametrize("name", FP8)
def test_every_code_has_its_fields(engine: Engine, name: str) -> None:
    got = call(engine, "(name) => Array.from({length: 256}, (_, code) => numbers.fields(code, numbers[name]))", name)
    for code, found in enumerate(got):
        wanted = FP8[name].fields(code)
        for part in ("code", "sign", "exponent", "mantissa", "kind"):
            assert found[part] == getattr(wanted, part), (name, code, part)


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E8M0", "E2M1"])
def test_every_bf16_word_has_its_code(engine: Engine, name: str) -> None:
    xs = bf16_words()
    if name in FP8:
        wanted = formats.cast(xs.bfloat16(), FP8[name]).view(torch.uint8)
    elif name == "E8M0":  # which has no sign: the page shows the code of |x|
        wanted = block_formats.e8m0_above(xs.abs())
    else:
        wanted = block_formats.encode_e2m1(xs)
    how = "numbers.e8m0Above(Math.abs(x))" if name == "E8M0" else f"numbers.cast(x, 1, numbers.{name})"
    got = ask(engine, f"Array.from({{length: 65536}}, (_, i) => ((x) => {how})(numbers.numberOf(i << 16)))")
    assert got == wanted.tolist()


@given(st.lists(WORDS, min_size=1, max_size=200), SCALES)
def test_fp32_words_times_a_scale_have_their_codes(v8: Engine, some: list[int], scale: float) -> None:
    xs = torch.from_numpy(np.array(some, np.uint32).view(np.float32))
    for name, fmt in FP8.items():
        got = call(
            v8,
            "(xs, scale, f) => xs.map((x) => numbers.cast(numbers.numberOf(x), scale, numbers[f]))",
            some,
            scale,
            name,
        )
        assert got == formats.cast(xs, fmt, scale).view(torch.uint8).tolist()
    got = call(v8, "(xs, scale) => xs.map((x) => numbers.cast(numbers.numberOf(x), scale, numbers.E2M1))", some, scale)
    assert got == block_formats.encode_e2m1(xs * torch.tensor(scale)).tolist()
    got = call(v8, "(xs) => xs.map((x) => numbers.e8m0Above(Math.abs(numbers.numberOf(x))))", some)
    assert got == block_formats.e8m0_above(xs.abs()).tolist()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(["E4M3", "E5M2", "E8M0", "E2M1"]))
def test_the_rounding_that_is_shown_is_that_of_the_cast(v8: Engine, x: float, name: str) -> None:
    found = call(v8, "(x, f) => numbers.rounding(x, numbers[f])", x, name)
    finite = sorted({abs(value) for value in values(name).tolist() if math.isfinite(value)})
    size, value, lower, upper = abs(x), abs(found["value"]), found["lower"], found["upper"]
    below = [each for each in finite if each <= size]
    above = [each for each in finite if each >= size]
    assert found["value"] == values(name)[found["code"]]
    if found["rule"] == "exact":
        assert value == size
    elif found["rule"] == "saturated":
        assert value == lower == finite[-1] < size
        assert upper is None  # infinity
    else:
        assert lower == (below[-1] if below else 0)
        assert upper == above[0]
        nearer = min(size - lower, upper - size)
        if found["rule"] == "up":
            assert (name, value) == ("E8M0", upper)
        elif found["rule"] == "tie":
            assert size - lower == upper - size
            assert value in (lower, upper)
            assert found["code"] & 1 == 0
        else:
            assert found["rule"] == "nearest"
            assert abs(value - size) == nearer
            assert size - lower != upper - size


@given(st.floats(width=32, allow_nan=False))
def test_numbers_are_written_as_python_writes_them(v8: Engine, x: float) -> None:
    word = int(np.float32(x).view(np.uint32))
    assert call(v8, "(word) => numbers.g(numbers.numberOf(word))", word) == f"{x:g}"


@pytest.mark.parametrize("x", [3.015625, 1234565.0, 8388607.5, -0.0, 99999.95, 1e-5, 1e300])
def test_halves_are_written_as_python_writes_them(v8: Engine, x: float) -> None:
    assert v8.run(f"numbers.g({x!r})") == f"{x:g}"


def test_the_normal_numbers_are_those_of_reference(engine: Engine) -> None:
    got = ask(engine, "Array.from(numbers.normal(65536, 31), numbers.wordOf)")
    assert got == words(philox.normal((1 << 16,), seed=31))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(FP8)), st.floats(-20, 20))
def test_what_a_cast_loses_is_what_cast_stats_counts(v8: Engine, seed: int, name: str, log: float) -> None:
    xs, scale = philox.normal((16, 64), seed=seed), torch.tensor(2.0**log)
    q, scale_inv = formats.cast(xs, FP8[name], scale), (1 / scale).reshape(1)
    counts, sums = torch.ops.twin.cast_stats(xs, q, scale_inv)
    found = call(
        v8, "(seed, s, f) => numbers.castStats(numbers.normal(1024, seed), s, numbers[f])", seed, scale.item(), name
    )
    assert [found["saturated"], found["underflowed"]] == counts[:2].tolist()
    # Both add 1024 squares in float64, none negative, in orders of their own: 1024 roundings of 2^-53 each.
    for part, wanted in zip(("signal", "noise"), sums[:2].tolist(), strict=True):
        assert math.isclose(found[part], wanted, rel_tol=2 * 1024 * 2.0**-53)


# ---- the tensor core ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_recorded_fp8_steps_give_the_words_of_an_h200(engine: Engine, every: int) -> None:
    """Every eighth row of each tile; all are a slow test."""
    compared = different = 0
    for case in steps():
        if case.a.element_size() != 1:
            continue
        for b, a, c, d in zip(case.b, *(x[:, ::every] for x in (case.a, case.c, case.d)), strict=True):
            sizes = (len(a), len(b), a.shape[1])
            got = call(engine, "tile", *map(base64_of, (a, b, c)), *sizes, *case.formats.upper().split("."))
            recorded = d.numpy().view(np.uint32).reshape(-1)
            compared += recorded.size
            different += int((np.array(got, np.uint64) != recorded).sum())
    assert compared > 100_000 // every
    assert different == 0


@given(
    st.lists(st.tuples(CODES, CODES), min_size=32, max_size=32),
    WORDS,
    st.sampled_from(sorted(FP8)),
    st.sampled_from(sorted(FP8)),
)
def test_any_step_and_its_parts_are_those_of_the_model(
    v8: Engine, codes: list[tuple[int, int]], c: int, a_name: str, b_name: str
) -> None:
    script = """(a, b, c, left, right) => {
      const found = numbers.step(a, b, c, numbers[left], numbers[right]);
      const {word, emax, unit, total, special, significand, power, kept} = found;
      return {word, emax, unit, total, special, significand: [...significand], power: [...power], kept: [...kept]};
    }"""
    a, b = (list(side) for side in zip(*codes, strict=True))
    found = call(v8, script, a, b, c, a_name, b_name)
    left, right = (
        torch.tensor([side], dtype=torch.uint8).view(FP8[name].dtype) for side, name in ((a, a_name), (b, b_name))
    )
    old = torch.from_numpy(np.array([[c]], np.uint32).view(np.float32))
    assert found["word"] == int(tensor_core.step(left, right, old).view(torch.int32)) & 0xFFFFFFFF
    if found["special"]:
        return
    terms = [FP8[a_name].value(x) * FP8[b_name].value(y) for x, y in codes] + [old.item()]  # exact in float64
    unit = Fraction(2) ** found["unit"]
    for term, significand, power, kept in zip(terms, found["significand"], found["power"], found["kept"], strict=True):
        assert Fraction(term) == significand * Fraction(2) ** power
        assert kept == int(Fraction(term) / unit)  # toward zero
    assert found["total"] == sum(found["kept"])
    assert found["unit"] == found["emax"] - 13


def test_the_page_has_the_words_that_its_script_writes() -> None:
    written = runpy.run_path(str(FOLDER / "write_recorded.py"))["script"]()
    assert written == (FOLDER / "recorded.js").read_text("utf-8")


def test_the_pages_own_examples_give_their_recorded_words(engine: Engine) -> None:
    got = ask(
        engine,
        """recorded.steps.map(({formats, a, b, c, d}) => {
          const [left, right] = formats.toUpperCase().split(".");
          return [tile(a, b, c, 1, 1, 32, left, right)[0], words(d)[0]];
        })""",
    )
    assert len(got) > 100
    assert all(found == wanted for found, wanted in got)


# ---- puzzles -----------------------------------------------------------------------------------------------------


def as_javascript(sentence: str) -> str:
    """The sentence in a language that has `undefined`, and one NaN."""
    return re.sub(r"0x[0-9A-F]{8} \(nan\)", "0x7FC00000 (nan)", sentence).replace("is None;", "is undefined;")


def verdict(engine: Engine, name: str, answer: str) -> Any:
    found = call(engine, f"(name) => puzzles.grade(name, {answer})", name)
    return puzzles.Verdict(found["solved"], found["sentence"])


@pytest.mark.parametrize("name", NAMES)
def test_a_right_answer_has_the_notebooks_verdict(engine: Engine, name: str) -> None:
    found = verdict(engine, name, f"solutions[{name!r}]")
    assert found.solved, found.sentence
    assert found == puzzles.grade(name, SOLUTIONS[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_solved_yet(engine: Engine, name: str) -> None:
    texts = (FOLDER / "puzzle_texts.js").read_text("utf-8")
    stub = re.search(rf'name: "{name}",.*?stub: `(.*?)`', texts, re.DOTALL)
    assert stub, name
    assert verdict(engine, name, f"({stub[1]})") == puzzles.Verdict(False, f"{name}: not solved yet.")


def test_the_puzzles_are_the_notebooks_first_seven(v8: Engine) -> None:
    titles = re.findall(r'name: "(.+?)"', (FOLDER / "puzzle_texts.js").read_text("utf-8"))
    assert ask(v8, "puzzles.names") == titles == NAMES == list(puzzles.PUZZLES)[:7]


FLOATS = st.floats(width=32)
# By puzzle: among how many calls some go wrong, and what is then put where in the answer (nowhere: in its place).
SPOILT: dict[str, tuple[int, st.SearchStrategy[tuple[list[int], Any]]]] = {
    "1 decode": (256, st.tuples(st.just([]), FLOATS | st.none())),
    "2 encode": (1 << 16, st.tuples(st.just([]), st.integers(-5, 300) | st.none())),
    "3 quantise": (1, st.tuples(st.integers(0, (1 << 16) - 1).map(lambda i: [i]), CODES)),
    "4 scale_update": (36, st.tuples(st.sampled_from([[0], [1, 0], [1, 2]]), FLOATS)),
    "5 bias_gradient": (4, st.tuples(st.integers(0, 47).map(lambda i: [i]), FLOATS)),
    "6 term": (
        4335,
        st.tuples(st.sampled_from([[0], [1]]), st.integers(-(2**31), 2**31)) | st.tuples(st.just([]), st.none()),
    ),
    "7 instruction": (6144, st.tuples(st.just([]), FLOATS | st.none())),
}


def put(got: Any, at: list[int], value: Any) -> Any:
    """An answer with another value in it."""
    if not at:
        return value
    if isinstance(got, tuple):
        return (put(got[0], [], torch.tensor(value)), got[1]) if at == [0] else (got[0], put(got[1], at[1:], value))
    got = got.clone() if isinstance(got, torch.Tensor) else list(got)
    got[at[0]] = value
    return got


PUT = """(answer, spoilt) => {
  let calls = 0;
  const others = {nan: NaN, inf: Infinity, "-inf": -Infinity, null: undefined};
  const number = (x) => (typeof x === "number" ? x : others[x]);
  return (...inputs) => {
    let got = answer(...inputs);
    const wrong = spoilt[calls++];
    if (!wrong) return got;
    const [at, value] = [wrong[0], number(wrong[1])];
    if (at.length === 0) return value;
    got = got.slice();
    if (at.length === 1) got[at[0]] = value;
    else { got[at[0]] = got[at[0]].slice(); got[at[0]][at[1]] = value; }
    return got;
  };
}"""


def in_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def spoil(answer: Callable[..., Any], wrong: dict[int, tuple[list[int], Any]]) -> Callable[..., Any]:
    calls = iter(range(1 << 17))

    def changed(*inputs: Any) -> Any:
        got = answer(*inputs)
        at = next(calls)
        return put(got, *wrong[at]) if at in wrong else got

    return changed


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4)
@given(data=st.data())
def test_a_wrong_answer_has_the_notebooks_verdict(v8: Engine, name: str, data: st.DataObject) -> None:
    calls, changes = SPOILT[name]
    wrong = data.draw(st.dictionaries(st.integers(0, calls - 1), changes, min_size=1, max_size=4))
    listed = json.dumps({at: [where, in_json(value)] for at, (where, value) in wrong.items()})
    found = verdict(v8, name, f"({PUT})(solutions[{name!r}], {listed})")
    wanted = puzzles.grade(name, spoil(SOLUTIONS[name], wrong))
    assert found == puzzles.Verdict(wanted.solved, as_javascript(wanted.sentence))


@pytest.mark.parametrize(
    ("name", "python", "javascript"),
    [
        ("1 decode", lambda code: "one", '() => "one"'),
        ("1 decode", lambda code: [1.0], "() => [1]"),
        ("2 encode", lambda x: "5", '() => "5"'),
        ("5 bias_gradient", lambda g: torch.zeros(3), "() => new Float32Array(3)"),
        ("6 term", lambda a, b: [1], "() => [1]"),
        ("6 term", lambda a, b: [math.nan, 1], "() => [NaN, 1]"),
        ("6 term", lambda a, b: "x", '() => "x"'),
        ("7 instruction", lambda a, b, c: "x", '() => "x"'),
    ],
)
def test_an_answer_of_a_wrong_kind_has_the_notebooks_verdict(
    v8: Engine, name: str, python: Callable[..., Any], javascript: str
) -> None:
    assert verdict(v8, name, f"({javascript})") == puzzles.grade(name, python)


# ---- files -------------------------------------------------------------------------------------------------------


def test_the_page_is_small_and_names_all_of_its_files() -> None:
    parts = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js"))
    assert sum(path.stat().st_size for path in parts) < MOST_BYTES
    page = (FOLDER / "index.html").read_text("utf-8")
    named = set(re.findall(r'(?:src|href)="([\w.]+\.(?:js|css))"', page))
    assert named == {path.name for path in parts} - {"index.html"}


def test_no_file_of_the_page_names_another_host() -> None:
    namespace = "http://www.w3.org/2000/svg"  # the name of SVG's elements, which nothing fetches
    for path in FOLDER.iterdir():
        if path.suffix in (".html", ".css", ".js"):
            text = path.read_text("utf-8").replace(namespace, "")
            assert not re.search(r"\w+://|(src|href)=.//|url\(|\bfetch\(|XMLHttpRequest|WebSocket|@import", text), (
                path.name
            )
