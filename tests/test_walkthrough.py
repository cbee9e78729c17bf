"""`twin walkthrough`: the page that it writes, its steps, and the small language model that it trains."""

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
from optimized.commands.steps import Outcome, speed, training, tutorial
from optimized.commands.steps.style import styled
from optimized.compare import differing
from optimized.training import corpus
from optimized.training import model as language_model
from optimized.training.model import Settings
from reference import tensor_core

TINY = replace(Settings(), steps=3, rows=2, hidden=32, sequence=16)


@pytest.mark.gpu
def test_walkthrough_on_both_sides(tmp_path: Path) -> None:
    assert main(["walkthrough", "--quick", "--output", str(tmp_path / "report.html")]) == 0
    assert "GPU = CPU in every word" in (tmp_path / "report.html").read_text()


def test_walkthrough_writes_one_self_contained_page(
    no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    assert main(["walkthrough", "--quick", "--output", str(path)]) == 0
    page = path.read_text()
    for title in (
        "The FP8 number line", "One Linear, four ways", "One layer, five ways", "The CPU predicts", "Training in bf16",
        "How fast is it?",
    ):  # fmt: skip
        assert title in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert "http" not in re.sub(r"data:[^\"]*", "", page)
    assert page.count("<img ") == page.count("data:image/svg+xml;base64,") >= 9
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


def test_walkthrough_fails_when_a_word_differs(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gemm = tensor_core.gemm
    monkeypatch.setattr(tensor_core, "gemm", lambda *given, **named: -gemm(*given, **named))
    assert main(["walkthrough", "--quick", "--steps", "1", "--output", str(tmp_path / "r.html")]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_training_is_repeatable_and_learns() -> None:
    text = corpus.read(20)
    settings = replace(TINY, steps=25, rows=4)
    one, other = (language_model.train(text, settings, True, None) for _ in range(2))
    assert one.losses == other.losses
    assert one.losses[-1] < one.losses[0] - 1
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert differing(a, b) == 0
    assert one.scale["layer 0 fc1", "weight"][1] == one.scale["layer 0 fc1", "weight"][2]  # step 0 updated nothing
    # Step 1 uses the amaxes of step 0: the first scale is 1, the second is largest / amax.
    for key in (("layer 0 QKV", "input"), ("layer 1 fc2", "input"), ("layer 1 proj", "weight")):
        assert one.scale[key][0] == 1.0
        assert one.scale[key][1] == np.float32(448) / np.float32(one.amax[key][0])
    key = ("layer 0 fc1", "grad_output")
    assert one.scale[key][1] == np.float32(57344) / np.float32(one.amax[key][0])
    assert one.codes["first step", "grad_output"].sum() == settings.rows * settings.sequence * settings.hidden


def test_layers_of_the_model_are_what_runs_in_fp8() -> None:
    """Every product has its own FP8 state after a step, and the table and the head have none."""
    model = language_model.ByteModel(TINY)
    language_model.Side(model, TINY, True).forward(torch.zeros(5, 2, dtype=torch.int64))
    assert len(list(model.products())) == 4 * TINY.layers
    for module in (model.embedding, model.head):
        assert "scaling_fwd" not in module.fp8_meta
    for _, module, columns in model.products():
        assert module.fp8_meta["scaling_fwd"].amax_history.amax(0)[[columns[0], columns[1]]].all()


def test_the_table_is_a_lookup() -> None:
    """The one-hot product is the byte's row plus the position's, in bf16; its gradient adds what came from each."""
    model = language_model.ByteModel(TINY)
    weight = model.embedding.get_parameter("weight")
    text = torch.tensor([[7, 7], [9, 250], [7, 0]])
    seen = []
    handle = model.embedding.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        model(text, None)
    handle.remove()
    table = weight.detach().bfloat16().float().t()
    wanted = table[text] + table[256 + torch.arange(3)][:, None]
    # The tensor core keeps 25 bits of the larger term, bf16 rounds to 8: an error of at most half a bf16 ulp and a bit.
    assert float(((seen[0].detach().float() - wanted).abs() / wanted.abs()).max()) <= 2**-8
    seen[0].backward(torch.ones_like(seen[0]))
    assert weight.grad is not None
    counts = weight.grad[0]
    assert [int(counts[byte]) for byte in (7, 9, 250, 0, 1)] == [3, 1, 1, 1, 0]
    assert [int(counts[256 + place]) for place in range(4)] == [2, 2, 2, 0]


def test_training_compares_both_sides_word_for_word() -> None:
    """The comparison itself, with the CPU as its own twin: equal, until a parameter of one side is touched."""
    text = corpus.read(5)
    run = language_model.train(text, TINY, True, torch.device("cpu"))
    assert run.tally.equal
    assert run.losses == language_model.train(text, TINY, True, None).losses  # a second side changes nothing
    settings = TINY
    sides = [language_model.Side(language_model.ByteModel(settings), settings, True) for _ in range(2)]
    given, targets = language_model.lesson(text, settings, 0)
    with torch.no_grad():
        sides[1].model.head.get_parameter("weight")[0, 0] += 1
    outs = [side.forward(given) for side in sides]
    for side, out in zip(sides, outs, strict=True):
        side.backward(out, language_model.cross_entropy(out, targets)[1])
    language_model._compare(run, sides[0], sides[1], (outs[0], outs[1]))
    assert run.tally.different > 0


def test_the_rate_rises_and_falls() -> None:
    """FusedAdam's first step has the length of the rate, whatever the gradient."""
    settings = replace(TINY, steps=50, warmup=10)
    rates = [settings.rate(step) / settings.learning_rate for step in range(50)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:25] == [1.0] * 15
    assert rates[25:] == pytest.approx([(50 - step) / 25 for step in range(25, 50)])
    side = language_model.Side(language_model.ByteModel(settings), settings, False)
    before = [parameter.detach().clone() for parameter in side.model.parameters()]
    for parameter in side.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    side.update(0.5)
    for parameter, old in zip(side.model.parameters(), before, strict=True):
        assert torch.allclose(old - parameter.detach(), torch.tensor(0.5), rtol=1e-6)  # fp32 has 24 bits


def test_cross_entropy_is_its_own_derivative() -> None:
    logits = torch.linspace(-2, 3, 256).repeat(2, 2, 1)
    targets = torch.tensor([[0, 100], [200, 255]])
    loss, gradient = language_model.cross_entropy(logits, targets)
    reference = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(reference.flatten(0, 1), targets.flatten())
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert gradient.dtype == torch.bfloat16
    assert torch.allclose(gradient.double(), reference.grad, rtol=2**-8, atol=0)  # bf16 has 8 bits


def test_a_lesson_is_bytes_and_the_byte_after_each() -> None:
    text = corpus.read(5)
    given, after = language_model.lesson(text, TINY, 3)
    assert given.shape == after.shape == (TINY.sequence, TINY.rows)
    assert torch.equal(given[1:], after[:-1])
    whole = text.data.tobytes()
    for row in range(TINY.rows):
        assert bytes([*given[:, row].tolist(), int(after[-1, row])]) in whole


def test_corpus_is_the_same_twice_and_in_order() -> None:
    paths = corpus.sources()
    assert paths == corpus.sources()
    assert not any("site-packages" in path.parts for path in paths)
    text = corpus.read(10)
    windows, targets = text.batch(7, 3, 32, 8)
    again = text.batch(7, 3, 32, 8)
    assert torch.equal(windows, again[0])
    assert not torch.equal(windows, text.batch(7, 4, 32, 8)[0])
    whole = text.data.tobytes()
    for window, target in zip(windows, targets, strict=True):
        assert bytes([*window.tolist(), int(target)]) in whole


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
