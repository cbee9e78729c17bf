"""The command `twin`: what it prints, what it writes, and its exit codes."""

import errno
import json
import os
import re
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from optimized import defaults, measure
from optimized.commands import (
    CommandError,
    bench,
    check_folder,
    main,
    parity,
    walkthrough,
)
from optimized.commands.report import Report
from optimized.commands.steps import Outcome, speed
from optimized.cuda import compiler, device, precompile
from reference.support import files


def test_info_says_what_is_missing(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for word in ("CPU", "torch", "CuPy", "NVRTC", "6 of 6 files in", "torch sees no CUDA device."):
        assert word in out


def test_info_on_a_complete_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device, "problems", list)
    assert main(["info"]) == 0
    assert "Both sides run here" in capsys.readouterr().out


def test_info_has_each_gpu_and_its_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its GiB are of 2^30 bytes: an H200 has 150 GB, which are 140."""
    monkeypatch.setattr(device, "problems", list)
    sizes = [150_109_880_320, 80 << 30]
    every = [types.SimpleNamespace(name=f"[H{i}]", major=9, minor=i, total_memory=size) for i, size in enumerate(sizes)]
    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: len(every)),
        ("get_device_properties", every.__getitem__),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    assert main(["info"]) == 0
    found = re.findall(r"^ *GPU +(.*?) *$", capsys.readouterr().out, re.M)
    assert found == ["[H0], compute capability 9.0, 140 GiB", "[H1], compute capability 9.1, 80 GiB"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], r"required: COMMAND"),
        (["dance"], r"invalid choice: 'dance'"),
        (["walkthrough", "--steps", "0"], r"'0' is not a whole number of at least 1"),
        (["walkthrough", "--steps", "many"], r"'many' is not a whole number of at least 1"),
        (["walkthrough", "--output", "/no/such/folder/x.html"], r"/no/such/folder is not a folder that can be written"),
        (["walkthrough", "--output", "/"], r"a folder; the path of an HTML file to write is accepted"),
        (["parity", "--op", "teleport"], r"--op is 'teleport', and no op's name contains it"),
        (["walkthrough", "--output", "/dev/null"], r"--output is '/dev/null', not a file; the path of an HTML file"),
        (["walkthrough", "--output", "a" * 300], r"--output is 'a+', no path here \(File name too long\)"),
        (["walkthrough", "--output", "/proc/x.html"], r"/proc is not a folder that can be written to"),
        (["parity", "--record", "."], r"--record needs a Hopper GPU"),
        (["parity", "--record", ".", "--op", "cast"], r"--record writes .*; without --op and --replay it is accepted"),
        (["walkthrough", "--full", "--steps", "3"], r"--full trains for \d+ steps; without --steps 3 it is accepted"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(
    no_gpu: None, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(arguments) == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_a_folder_is_tried_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder("--record", tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for folder, reason in (("absent", "No such file or directory"), ("file", "Not a directory")):
        with pytest.raises(CommandError, match=rf"^--record: .*/{folder} is not a folder that .* \({reason}\)\.$"):
            parity.record(tmp_path / folder, torch.device("cpu"), Console())
    monkeypatch.setattr(bench, "hopper", lambda: torch.device("cpu"))
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "file")
    assert main(["bench", "gemm", "--write"]) == 2


def test_a_report_that_cannot_be_written_is_said(
    no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(walkthrough, "_steps", lambda *given: [Outcome("Speed", "it was fast", None)])
    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "report.html"
    last = Report("FP8 training, bit by bit", "the last one").html()
    path.write_text(last)
    assert main(["walkthrough", "--output", str(path)]) == 2
    found = capsys.readouterr()
    assert "it was fast" in found.out
    assert found.err == f"{path} was not written: No space left on device.\n"
    assert path.read_text() == last
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recorded results, to be damaged."""
    folder = Path(shutil.copytree(measure.RESULTS, tmp_path / "results"))
    monkeypatch.setattr(measure, "RESULTS", folder)
    return folder


@pytest.mark.sample(3)
@pytest.mark.parametrize("content", ['{"rows": [', "", "[]", "{}", '{"provenance": {"date": "2026", "kernels": {}}}'])
def test_a_damaged_result_is_a_sentence(
    no_gpu: None, results: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "layer.json").write_text(content)
    for arguments in (["bench", "layer"], ["bench", "--table"], ["bench", "all"], ["bench", "layer_sweep"]):
        code = main(arguments)
        error = capsys.readouterr().err
        assert (code, error.count("\n")) == ((0, 0) if "layer_sweep" in arguments else (2, 1))
        assert ("layer.json is damaged" in error) == (code == 2)
    outcome = speed.run(Report("title", "introduction"), live=False)
    assert "layer.json is damaged" in outcome.result  # the walkthrough goes on


@pytest.mark.parametrize("place", ["case", "step"])
@pytest.mark.parametrize("value", [7, None, "[/b]"])
def test_a_result_with_another_value_is_a_table_or_a_sentence(
    no_gpu: None, results: Path, place: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """What becomes a column, and what becomes a cell; text in brackets is text."""
    payload = measure.read_result("layer")
    if place == "case":
        payload["cases"][0]["case"]["name"] = value
    else:
        payload["cases"][0]["rows"][0]["step"] = value
    (results / "layer.json").write_text(json.dumps(payload))
    code = main(["bench", "layer"])
    found = capsys.readouterr()
    assert code == (0 if value == "[/b]" else 2)
    assert "[/b]" in found.out if code == 0 else "layer.json is damaged" in found.err


def test_results_that_are_not_there_are_said(no_gpu: None, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(results)
    assert main(["bench"]) == main(["bench", "all"]) == main(["bench", "--table"]) == main(["info"]) == 0
    with pytest.raises(files.Damaged, match=r"layer\.json is not there: this result has not been recorded\.$"):
        measure.read_result("layer")


@pytest.fixture
def few_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels by default, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(defaults, "configurations", lambda: [("amax", {"WIDE": 1}), ("norm_total", {"WIDE": 1})])
    return tmp_path / "cache" / "twin-engine" / "cubin"


def test_compile_fills_the_cache_and_skips_what_is_there(few_kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--jobs", "2"]) == 0
    assert re.search(r"2 kernels compiled, 0 were there, in \d+ s: .*cubin", capsys.readouterr().out)
    first, second = sorted(few_kernels.iterdir())
    assert (first.name[:5], second.name[:11]) == ("amax-", "norm_total-")
    first.unlink()
    assert main(["compile"]) == 0
    assert "1 kernels compiled, 1 were there" in capsys.readouterr().out
    assert main(["compile"]) == 0
    assert "0 kernels compiled, 2 were there" in capsys.readouterr().out


def test_compile_interrupted_keeps_what_is_compiled(
    few_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = precompile.build

    def interrupted(configurations: Any, jobs: int, done: Any) -> None:
        build(configurations[:1], jobs, done)
        raise KeyboardInterrupt

    monkeypatch.setattr(precompile, "build", interrupted)
    assert main(["compile"]) == 130
    assert "Stopped. What is compiled stays" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(precompile, "build", build)
    assert main(["compile"]) == 0
    assert "1 kernels compiled, 1 were there" in capsys.readouterr().out


def test_compile_refuses_a_cache_that_cannot_be_written_and_a_machine_without_nvrtc(
    few_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking() -> Path:
        raise device.MissingDependency("NVRTC is not installed.")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "nvrtc_build", lacking)
        assert main(["compile"]) == 2
    assert capsys.readouterr().err == "NVRTC is not installed.\n"
    shutil.rmtree(few_kernels.parent)
    few_kernels.parent.write_text("a file")
    assert main(["compile"]) == 2
    assert re.search(r"^the cache's folder .*cubin cannot be made \(.+\)\.$", capsys.readouterr().err)
    assert main(["compile", "--jobs", "0"]) == 2
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err
