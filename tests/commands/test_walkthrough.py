"""`twin walkthrough`: the page that it writes, its steps, and the small language model that it trains."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimized import measure
from optimized.commands import (
    main,
    walkthrough,
)
from optimized.commands.report import Report
from optimized.commands.steps import Outcome, linear, recorded, speed, training, tutorial
from optimized.commands.steps.style import styled
from optimized.compare import Tally
from optimized.recordings import linear as linear_recordings
from optimized.recordings import tensor_core as recordings
from optimized.training import corpus, monitor
from optimized.training.settings import Settings
from optimized.training.trainer import Trainer
from reference.numbers import formats, tensor_core

TINY = replace(Settings(), steps=3, rows=2, hidden=32, sequence=16)


@pytest.mark.gpu
def test_walkthrough_on_both_sides(tmp_path: Path) -> None:
    assert main(["walkthrough", "--quick", "--output", str(tmp_path / "report.html")]) == 0
    assert "GPU = CPU in every word" in (tmp_path / "report.html").read_text()


@pytest.fixture
def fewer_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """`twin parity` replays all (tests/recordings/test_parity.py)."""
    listed, steps = list(recordings.products()), dict(itertools.islice(linear_recordings.CASES.items(), 2))
    monkeypatch.setattr(recordings, "products", lambda: iter(listed[::6]))
    monkeypatch.setattr(linear_recordings, "CASES", steps)


@pytest.mark.usefixtures("fewer_recordings")
def test_walkthrough_writes_one_self_contained_page(
    no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    assert main(["walkthrough", "--quick", "--steps", "2", "--output", str(path)]) == 0
    page = path.read_text()
    for title in (
        "The FP8 number line", "One Linear, four ways", "One layer, five ways", "The CPU predicts", "Training in bf16",
        "How fast is it?",
    ):  # fmt: skip
        assert title in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert "http" not in re.sub(r"data:[^\"]*", "", page)
    assert page.count("<img ") == page.count("data:image/svg+xml;base64,") >= 9
    powers = re.findall(r"2([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+) = (\d[\d.]*(?:e[+-]\d+)?)", page)
    assert powers
    for exponent, number in powers:  # a sentence that says what a power of two is
        value = 2.0 ** int(exponent.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))
        assert float(number) == pytest.approx(value, rel=0.05), (exponent, number)
    out = capsys.readouterr().out
    assert "0 different" in out
    assert "bits/byte" in out


def test_the_speed_is_the_recorded_one_without_a_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("title", "introduction")
    with styled():
        outcome = speed.run(report, live=True)
    page = report.html()
    assert outcome.step == "Speed"
    assert re.match(r"on one H200, recorded: FP8 is \d\.\d\d× faster than PyTorch's fastest way, ", outcome.result)
    assert "Recorded: NVIDIA H200" in page
    assert "TransformerLayer, FP8" in page
    monkeypatch.setattr(measure, "RESULTS", Path("/no/such/folder"))
    assert speed.run(report, live=False).result == "no recorded results in this installation"


def test_the_tutorials_layers_are_one_layer(no_gpu: None) -> None:
    """Equal where they must be, in 16 bits all equally near to float64; FP8 recovers after its first step."""
    ticks: list[int] = []
    found, exact, tally = tutorial.steps(lambda: ticks.append(1))
    assert len(ticks) == len(found) == 7
    assert tally.compared == 0
    assert tutorial.equalities(found).equal
    words = sum(tensor.numel() for tensor in found[1].results.values())
    assert tutorial.equalities(found).compared == 2 * words
    shown = list(tutorial.SHOWN.values())
    noise = {step.name: [tutorial.sqnr(exact[key], step.results[key]) for key in shown] for step in found}
    plain = noise.pop("plain PyTorch")
    for name, values in noise.items():
        near = [abs(a - b) for a, b in zip(plain, values, strict=True)]
        assert max(near) < 1 if "FP8" not in name else min(near) > 3, (name, near)
    first, second = (noise[f"TransformerLayer, FP8, step {n}"][shown.index("fc1.weight")] for n in (1, 2))
    assert second > first + 10


def test_the_tutorial_runs_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself, with the CPU as its own twin."""
    monkeypatch.setattr(tutorial, "hopper", lambda: torch.device("cpu"))
    _, _, tally = tutorial.steps()
    assert tally.equal
    assert tally.compared > 1_000_000


@pytest.mark.parametrize("there", [False, True])
def test_a_linear_runs_on_both_sides(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All words of the three steps of the library's, with the CPU as its own twin; without a GPU none is compared."""
    monkeypatch.setattr(linear, "hopper", lambda: torch.device("cpu") if there else None)
    found, tally = linear.variants()
    assert tally.compared == there * sum(x.numel() for one in found[1:] for x in one.results.values())
    assert tally.equal == there


def results(y: list[float]) -> tutorial.Results:
    """Of a layer whose dx and gradient are always the same."""
    return {"y": torch.tensor(y), "dx": torch.tensor([[3.0], [4.0]]), "fc1.weight": torch.tensor([-2.0, 0.5])}


def test_the_table_of_the_tutorial_counts_words_that_differ() -> None:
    """Of all tensors together, against the row above; the noise of a hundredth of the energy is 20 dB."""
    numbers = {"one": [1.0, 2, 3, 4], "two": [1.0, 2, 3, 4], "three": [1.0, 2.5, 2.75, 4], "four": [1.0, 2.5, 3, 4]}
    found = [tutorial.Step(name, results(y)) for name, y in numbers.items()]
    exact = {name: x.double() / 1.1 for name, x in found[0].results.items()}
    rows = tutorial.rows(found, exact)
    assert [row[:3] for row in rows] == [
        ["one", "", ""],
        ["two", "equal, every bit", "0"],
        ["three", "25 % of words differ", "0.5"],  # two of eight
        ["four", "12 % of words differ", "0.25"],
    ]
    assert rows[0][3:] == rows[1][3:] == ["20.0 dB"] * 3
    assert [row[4:] for row in rows] == [["20.0 dB"] * 2] * 4
    infinite = tutorial.rows(found[:1], {name: x.double() for name, x in found[0].results.items()})
    assert infinite == [["one", "", "", "inf dB", "inf dB", "inf dB"]]


@pytest.mark.parametrize(
    ("fused", "tally", "equal"),
    [
        (0.0, Tally(), True),
        (0.5, Tally(), False),
        (0.0, Tally(10, 0), True),
        (0.5, Tally(10, 0), False),
        (0.0, Tally(10, 1), False),
    ],
)
def test_the_tutorial_is_equal_if_both_comparisons_are(
    fused: float, tally: Tally, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused against unfused, and, where there is a GPU, against the GPU."""
    steps = [tutorial.Step("apart", results([1.0])), tutorial.Step("fused", results([1.0 + fused]), "apart")]
    steps += [tutorial.Step(f"FP8, {n}", results([2.0])) for n in range(3)]
    exact = {name: x.double() + 1 for name, x in steps[0].results.items()}
    monkeypatch.setattr(tutorial, "steps", lambda tick: (steps, exact, tally))
    monkeypatch.setattr(tutorial, "_write", lambda *given: None)
    report = Report("title", "introduction")
    outcome = tutorial.run(report, lambda name, total: lambda: None)
    assert outcome.equal == equal
    assert f"5 words compared, {int(fused > 0)} different" in outcome.result
    assert (f"GPU: {tally}" in outcome.result) == ("Hopper" in report.html()) == (tally.compared > 0)


@pytest.mark.usefixtures("fewer_recordings")
def test_walkthrough_fails_when_a_word_differs(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gemm = tensor_core.gemm
    monkeypatch.setattr(tensor_core, "gemm", lambda *given, **named: -gemm(*given, **named))
    monkeypatch.setattr(walkthrough, "_steps", lambda report, *rest: iter([recorded.run(report, rest[2])]))
    assert main(["walkthrough", "--quick", "--output", str(tmp_path / "r.html")]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_training_learns_and_is_watched() -> None:
    text = corpus.read(20)
    settings = replace(TINY, steps=30, warmup=5, rows=4)
    one = monitor.train(text, settings, True, None)
    assert one.losses[-1] < one.losses[0] - 1
    assert one.scale["layer 0 fc1", "weight"][1] == one.scale["layer 0 fc1", "weight"][2]  # step 0 updated nothing
    # Step 1 uses the amaxes of step 0: the first scale is 1, the second is largest / amax.
    for key in (("layer 0 QKV", "input"), ("layer 1 fc2", "input"), ("layer 1 proj", "weight")):
        assert one.scale[key][0] == 1.0
        assert one.scale[key][1] == np.float32(448) / np.float32(one.amax[key][0])
    key = ("layer 0 fc1", "grad_output")
    assert one.scale[key][1] == np.float32(57344) / np.float32(one.amax[key][0])
    assert one.codes["first step", "grad_output"].sum() == settings.rows * settings.sequence * settings.hidden
    # So the weights fill their range at the end, and at the beginning they did not.
    values = torch.tensor([abs(formats.E4M3.value(code)) for code in range(256)]).nan_to_num(0.0)
    largest = {
        moment: float(values[codes > 0].max()) for (moment, name), codes in one.codes.items() if name == "weight"
    }
    assert largest["first step"] < 1
    assert 224 < largest["last step"] <= 448


def test_training_and_writing_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And give the others back: what runs afterwards has as many as before."""
    found = []
    monkeypatch.setattr(Trainer, "train", lambda *_: found.append(torch.get_num_threads()) or torch.zeros(1))
    monkeypatch.setattr(Trainer, "sample", lambda *_: found.append(torch.get_num_threads()) or b"")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = monitor.train(corpus.read(5), replace(TINY, steps=1), False, None)
        monitor.write(run, b"a", 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert found == [1, 1]


def test_layers_of_the_model_are_what_runs_in_fp8() -> None:
    """Every product has its own FP8 state after a step, and the tables and the head have none."""
    trainer = Trainer(replace(TINY, precision="delayed"), corpus.read(5))
    trainer.train()
    model = trainer.model
    assert len(list(model.products())) == 4 * TINY.layers
    assert "scaling_fwd" not in model.head.fp8_meta
    for _, module, columns in model.products():
        assert module.fp8_meta["scaling_fwd"].amax_history.amax(0)[[columns[0], columns[1]]].all()


def test_training_compares_both_sides_word_for_word() -> None:
    """The comparison itself, with the CPU as its own twin: equal, until a parameter of one side is touched."""
    text = corpus.read(5)
    run = monitor.train(text, TINY, True, torch.device("cpu"))
    assert run.tally.equal
    assert run.losses == monitor.train(text, TINY, True, None).losses  # a second side changes nothing
    sides = [Trainer(TINY, text) for _ in range(2)]
    for side in sides:
        side.train()
    with torch.no_grad():
        sides[1].model.bytes.weight[0, 0] += 1
    monitor.compare(run.tally, *sides)
    assert run.tally.different == 1


def test_corpus_is_the_same_twice_and_in_order() -> None:
    paths = corpus.sources()
    assert paths == corpus.sources()
    assert not any("site-packages" in path.parts for path in paths)
    text = corpus.read(10)
    windows = text.batch(7, 3, 32, 8)
    assert windows.shape == (9, 32)
    assert torch.equal(windows, text.batch(7, 3, 32, 8))
    assert not torch.equal(windows, text.batch(7, 4, 32, 8))
    whole = text.data.tobytes()
    for window in windows.t():
        assert bytes(window.tolist()) in whole


def test_smoothing_is_a_mean_of_neighbours() -> None:
    assert training.smooth(np.array([1.0, 3.0, 5.0, 10.0, 0.0]), 1).tolist() == [2.0, 3.0, 6.0, 5.0, 5.0]
    assert training.smooth(np.array([1.0, 3.0]), 0).tolist() == [1.0, 3.0]


def test_report_escapes_what_it_is_given() -> None:
    report = Report("a < b", "")
    report.section("x & y")
    report.table(["<th>"], [["<td>", "1.5"]])
    report.columns(("a", "if a < b: pass"))
    page = report.html()
    assert "<title>a &lt; b</title>" in page
    for text in ("x &amp; y", "<th>&lt;th&gt;</th>", '<td class="n">1.5</td>', "if a &lt; b"):
        assert text in page


@pytest.mark.parametrize("quick", [False, True])
def test_a_quick_walkthrough_reads_fewer_files_and_measures_nothing(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(walkthrough, "_steps", lambda *arguments: seen.append(arguments) or [])
    assert main(["walkthrough", *["--quick"] * quick, "--output", str(tmp_path / "report.html")]) == 0
    ((_, _, count, _, without_speed),) = seen
    assert (count, without_speed) == (walkthrough.QUICK_FILES if quick else None, quick)


def test_the_page_can_be_read_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each finding is printed when it is there; --full trains for longer."""
    path = tmp_path / "report.html"
    read: list[bool] = []

    def steps(report: Report, settings: Settings, *rest: Any) -> Any:
        assert settings.steps == walkthrough.FULL_STEPS > Settings().steps
        for name in ("one", "two"):
            read.append(path.exists() and "section one" in path.read_text())
            report.section(f"section {name}")
            yield Outcome(name, f"result of {name}", None)

    monkeypatch.setattr(walkthrough, "_steps", steps)
    assert main(["walkthrough", "--full", "--output", str(path)]) == 0
    assert read == [False, True]
    assert "section two" in path.read_text()
