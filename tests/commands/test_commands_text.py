"""What the commands show: their tables, verdicts and exit codes, of results that are made up."""

import argparse
import contextlib
import copy
import functools
import io
import re
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from shared.dry_gpu import DryGpu
from shared.dry_runs import launches

import reference as te
from optimized import measure
from optimized.bench.kernels import adam
from optimized.commands import bench, parity, replay_page, tables
from optimized.commands import replay as replay_command
from optimized.commands.report import Report
from optimized.compare import Tally
from optimized.recordings import case as parity_inputs
from optimized.recordings import cases, outputs
from reference.inspect.drills.faulty import Fault, Faulty
from reference.state import scaling

LIVE = {
    case.op: case
    for case in reversed(list(cases.cases()))
    if case.live and not case.run.func.__module__.endswith("layers")  # type: ignore[attr-defined]
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("op", sorted(LIVE))
def test_a_case_that_is_only_compared_live_launches_kernels(op: str) -> None:
    """tests/recordings/test_parity.py replays the other cases of the op; a GPU suite runs this one."""
    case = LIVE[op]
    with warnings.catch_warnings(), DryGpu() as gpu:
        warnings.simplefilter("ignore")
        found = case.run(torch.device("cuda"))
    assert launches(gpu.lines)
    assert found
    assert len({case.key(name) for name in found}) == len(found)


def text_of(command: Any, asked: Sequence[str], code: int, width: int = 100) -> str:
    """What a command prints, if it ends with this exit code."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert all(one.help for one in parser._actions)
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with contextlib.redirect_stdout(console.file):
        assert command.run(parser.parse_args(asked), console) == code
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def cells(text: str) -> list[list[str]]:
    """The rows of printed tables."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def payload_of(name: str, at: int) -> dict[str, Any]:
    """A result of `adam`'s form."""
    row = {"optimizer": f"[{name}]", "bytes_a_number": at, "ms": {"median": 1.5 * at}, "of_copy": 0.125 * at}
    versions = {"cuda": "13.0", "torch": "2.99", "cupy": "14.0", "transformer_engine": "2.9"}
    origin = {"date": f"2026-01-0{at}T03:04:05+00:00", "gpu": None, "nvidia_smi": None, **versions, "kernels": {}}
    return {"numbers": 10**6 * at, "rows": [row], "provenance": origin}


@pytest.mark.parametrize(
    ("gpu", "asked"),
    [(False, []), (False, ["all"]), (False, ["--table"]), (True, ["all"]), (True, ["--write"]), (True, ["--recorded"])],
)
def test_benchmarks_are_measured_or_shown(gpu: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two benchmarks, one is recorded; where there is a Hopper GPU, as it were, and where there is none."""
    done = list[str]()

    def module(name: str, at: int) -> Any:
        def run(progress: Callable[[float], None]) -> dict[str, Any]:
            progress(0.5)
            done.append(f"ran {name}")
            return payload_of(name, at)

        return types.SimpleNamespace(NAME=name, run=run)

    def write(name: str, payload: Any) -> str:
        done.append(f"written {name} of {payload['provenance']['date'][:10]}")
        return f"results/{name}.json"

    builders = {**tables.BUILDERS, "one": adam.tables, "two": adam.tables}
    for owner, name, value in (
        (bench, "hopper", lambda: torch.device("cuda") if gpu else None),
        (bench, "BENCHMARKS", {"one": module("one", 1), "two": module("two", 2)}),
        (bench, "WHAT", {**bench.WHAT, "one": "the [first]", "two": "the second"}),
        (tables, "BUILDERS", builders),
        (tables, "load", lambda name: payload_of(name, 1) if name == "one" else None),
        (measure, "write_result", write),
        (measure, "outdated", lambda payload: []),
    ):
        monkeypatch.setattr(owner, name, value)
    text = text_of(bench, asked, 0)
    one, two = (["[one]", "1", "1.50", "12 %"], ["[two]", "2", "3.00", "25 %"])
    measured = gpu and asked != ["--recorded"]
    assert done == (
        ["ran one", "written one of 2026-01-01", "ran two", "written two of 2026-01-02"]
        if asked == ["--write"]
        else ["ran one", "ran two"] * measured
    )
    if not asked:
        lines = text.splitlines()
        assert [line.split()[0] for line in lines] == list(bench.WHAT)
        assert all(line[19:].startswith(what) for line, what in zip(lines, bench.WHAT.values(), strict=True))
        assert {line.split()[0] for line in lines if not line.endswith("not measured")} == {"one"}
        assert lines[-2] == f"{'one':19}{'the [first]':48}2026-01-01"
        assert max(map(len, lines)) <= 80
    elif asked == ["--table"]:
        shown = [line for line in text.splitlines() if line.startswith("| ")]
        assert shown[0] == "| optimizer | bytes a parameter | ms | of a copy |"
        assert shown[2:] == ["| [one] | 1 | 1.50 | 12 % |"]
    else:
        assert [row for row in cells(text) if row[0].startswith("[")] == ([one, two] if measured else [one])
        assert ("Recorded on an H200, not measured now" in text) == (not measured)
        missing = re.findall(r"docs/results/(\w+)\.json is not there", text)
        assert missing == ([] if measured else ["two", *bench.APART])
        elsewhere = re.findall(r"^(\w+) is measured by", text, re.M)
        assert elsewhere == (list(bench.APART) if measured else [])
        assert re.findall(r"written: (\S+)", text) == ["results/one.json", "results/two.json"] * (asked == ["--write"])
        assert max(map(len, text.splitlines())) <= 100
        assert "no GPU, CUDA 13.0, torch 2.99, CuPy 14.0, Transformer Engine 2.9, 2026-01-01." in text


def test_columns_stand_side_by_side_as_far_as_no_word_is_cut() -> None:
    assert bench._longest_word(["ab cd ef g", "abc"]) == 10  # a short cell is one word
    assert bench._longest_word(["ab cd ef gh", "abc"]) == 3
    assert bench._longest_word(["3.5 ms", "abc"]) == 6
    name, *columns = [["name"], *([letter * 20] for letter in "abc")]
    for width, wanted in ((54, [2, 1]), (53, [1, 1, 1]), (77, [3]), (20, [1, 1, 1])):
        parts = list(bench._fitting([name, *columns], width))
        assert all(part[0] == name for part in parts)
        assert [len(part) - 1 for part in parts] == wanted
        assert [one for part in parts for one in part[1:]] == columns


@pytest.mark.parametrize("narrower", range(12))
def test_a_table_that_fits_breaks_no_cell(narrower: int) -> None:
    """One that does not is as narrow as it must be: some cells have two lines, and no word is cut."""
    rows = [["128 rows of 256 numbers", "41 of 50 GB/s"], ["64 rows of 8 numbers", "a few"]]
    columns = [list(column) for column in zip(["shape", "speed"], *rows, strict=True)]
    borders = 4 + 3  # two blanks of each column, and the lines before, between and after
    width = sum(max(map(len, column)) for column in columns) + borders - narrower
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(bench._shown(columns, width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    shown = cells(text)
    assert (shown == rows) == (narrower == 0)
    for cell in (cell for row in rows for cell in row):
        assert set(cell.split()) <= {word for row in shown for part in row for word in part.split()}


@pytest.mark.parametrize("asked", [[], ["--op", "a"], ["--replay", "--op", "b"]])
def test_parity_counts_words_and_says_who_was_compared(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three comparisons that are made up, one of which differs; with a GPU, as it were."""
    recording = types.SimpleNamespace(provenance={"date": "2026-01-02T03:04:05+00:00"})
    tallies = {"a": [Tally(1000, 0), Tally(234, 0)], "b": [Tally(5, 2)]}

    def jobs(gpu: Any, cases: Any) -> list[tuple[str, str, Callable[[], Tally]]]:
        return [(op, "case", functools.partial(copy.copy, one)) for op, several in tallies.items() for one in several]

    monkeypatch.setattr(parity, "hopper", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *given: "pretended H200")
    monkeypatch.setattr(measure, "outdated", lambda payload: ["adam", "norm"])
    monkeypatch.setattr(parity, "_jobs", jobs)
    monkeypatch.setattr(outputs, "read", lambda *given: recording)
    ops, live = (asked[-1] if asked else "ab"), "--replay" not in asked
    text = text_of(parity, asked, code=int("b" in ops), width=150)
    counts = {"a": ["a", "1,234", "0"], "b": ["b", "5", "2"]}
    total = ["all", f"{sum({'a': 1234, 'b': 5}[op] for op in ops):,}", "2" if "b" in ops else "0"]
    assert cells(text) == [*(counts[op] for op in ops), total]
    assert ("different: b, case: 5 words compared, 2 different" in text) == ("b" in ops)
    assert text.startswith(
        "live: the CPU against pretended H200 in this machine" if live else
        "replay: the CPU against recordings of an NVIDIA H200"
    )  # fmt: skip
    old = "parity_h200.npz was recorded on 2026-01-02, before the last change of: adam, norm"
    assert (old in text) == (not live)


def recorded_step(path: Path, fault: Fault, keep: bool) -> None:
    """A step of an MLP in FP8 and of a Linear in 16 bits between torch's own ops; its numbers are the same anywhere."""
    torch.manual_seed(7)
    mlp = te.LayerNormMLP(32, 64, activation="relu", params_dtype=torch.bfloat16)
    model = torch.nn.ModuleDict({"mlp": mlp, "head": te.Linear(32, 16, bias=False, params_dtype=torch.bfloat16)})
    x, grad = (parity_inputs.numbers((16, n), torch.bfloat16, seed) for n, seed in ((32, 1), (16, 2)))
    step = Faulty(model, path, None, keep)
    step.fault = fault
    # Models of other tests may still be alive, and this thread's autocast would update their scales.
    with mock.patch.dict(scaling._MODULES, clear=True), step:
        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            h = mlp(x.requires_grad_()).abs()
        model["head"](h).backward(grad)


class Pictures(Report):
    """A report that keeps its figures."""

    figures: list[Any]

    def picture(self, figure: Any, caption: str, alternative: str) -> None:
        self.figures = [*getattr(self, "figures", []), figure]
        super().picture(figure, caption, alternative)


FUSED = r"op 3, twin::gemm_fp8_activation_scale \(mlp, forward\)"
GEMM = r"op 4, twin::gemm_fp8 \(mlp, forward\)"
FAULTS = {
    "the same": (Fault(-1, "before"), False, None),
    "memory": (
        Fault(4, "before", read=0), False,
        rf"{GEMM} found other bits in its argument a than {FUSED} left there: its memory changed in between; 1 word",
    ),
    "a result": (
        Fault(4, "after"), True,
        rf"{GEMM} computed other bits in its result out; 1 word differs, at \[\d+, \d+\]: recorded [0-9A-F]{{4}} "
        r"\(\S+\), replayed [0-9A-F]{4} \(\S+\)",
    ),
    "digests alone": (
        Fault(3, "while", read=2, bit=24 / 32), False,
        rf"{FUSED} computed other bits in its result h; more than one word differs, and the recording has digests "
        "alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_step_is_replayed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step, the same step with memory that changed, and with a wrong result: the verdict, and a page with numbers."""
    pages: list[Pictures] = []
    monkeypatch.setattr(replay_page, "Report", lambda *given: pages.append(Pictures(*given)) or pages[-1])
    path, page = tmp_path / "step.safetensors", tmp_path / "page.html"
    fault, keep, first = FAULTS[what]
    recorded_step(path, fault, keep)
    text = text_of(replay_command, [str(path), "--output", str(page)], code=int(first is not None), width=1000)
    html = page.read_text("utf-8").replace("\u200b", "")
    assert re.search(rf"{path}: 20 ops, recorded on ", text)
    assert f"Report: {page}" in text
    if first is None:
        judged = r"The same bits: 17 of 20 ops judged, all \d+ GEMMs; not judged: aten::\w+, aten::\w+ and aten::\w+\."
        assert re.search(rf"{judged}\nCompared: [\d,]+ words of results, and [\d,]+ tensors between ", text), text
    else:
        assert re.search(f"Different bits: \\d+ of 20 ops judged, .*; not judged: .*\\.\\s+First: {first}", text), text
        assert html.count('<tr class="marked">') >= 1 + (what != "digests alone")
        for link in re.findall(r'href="#(op-\d+)"', html):
            assert f'<a id="{link}">' in html
        assert ("Nothing after op 3 was compared" in text) == (what == "digests alone")
    assert ('<span class="verdict">the same bits</span>' in html) == (first is None)
    assert "There is no NaN and no infinity" in html
    layers = re.findall(r"<p><b>(\w+, (?:forward|backward))</b></p>", html)
    if what == "digests alone":
        assert layers == ["mlp, forward"][: len(layers)]
        return
    assert layers == ["mlp, forward", "head, forward", "head, backward", "mlp, backward"]
    rows = [
        [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr[^>]*>(<td.*?)</tr>", html)
    ]
    rows = [row for row in rows if len(row) == 10]
    assert [int(row[0]) for row in rows] == sorted(int(row[0]) for row in rows)
    assert len(rows) == 21
    ((above, below),) = [figure.axes for figure in pages[-1].figures]
    points: dict[float, list[float]] = {}
    for line in above.lines:
        for x, y in zip(*line.get_data(), strict=True):
            points.setdefault(x, []).append(y)
    assert {"E4M3", "E5M2", "bf16"} <= {line.get_label() for line in above.lines}
    filled = [y for line in below.lines for y in line.get_ydata() if line.get_linestyle() == "None"]
    assert filled
    assert first is not None or filled == pytest.approx([0.0] * len(filled), abs=1e-5)  # current scaling fills formats
    for op, _, _, kind, amax, scale, saturated, underflowed, sqnr, bad in rows:
        assert float(amax) > 0
        assert bad == "0"
        assert (scale == "–") == kind.startswith("bf16") == (saturated == "–") == (underflowed == "–")
        if sqnr != "exact" and first is None:
            assert 20 < float(sqnr) < 70
            assert any(float(sqnr) == pytest.approx(y, abs=0.01) for y in points[int(op)])
        if scale != "–" and first is None:  # current scaling: the largest number becomes the largest code
            assert float(amax) * float(scale) == pytest.approx(448 if kind.startswith("E4M3") else 57344, rel=2e-3)
    red = [line.get_xdata()[0] for line in above.lines if line.get_linewidth() == 1.2]
    assert red == ([] if first is None else [4])
