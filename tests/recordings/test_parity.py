"""`twin parity`: its cases, its recorder, its replay, and what they count."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from optimized import measure
from optimized.commands import main, parity
from optimized.commands.report import Report
from optimized.commands.steps import recorded
from optimized.compare import Tally, differing
from optimized.recordings import cases, linear, outputs, reader, transformer_engine
from optimized.recordings import tensor_core as recorded_tensor_core
from optimized.recordings.case import Case
from optimized.recordings.cases import layers as layer_cases
from optimized.training.settings import RECIPES, Settings
from reference.numbers import tensor_core
from reference.recipe import DelayedScaling
from reference.support import files

CPU = torch.device("cpu")


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The recordings, to be damaged."""
    folder = Path(shutil.copytree(reader.DATA, tmp_path / "data"))
    monkeypatch.setattr(reader, "DATA", folder)
    caches = (reader.arrays, transformer_engine._file, transformer_engine.recorded)
    for one in caches:
        one.cache_clear()
    yield folder
    for one in caches:
        one.cache_clear()


DAMAGES = [(name, damage) for name in reader.NAMES for damage in ("cut", "empty", "lacking", "missing", "folder")]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_recording_is_a_sentence(
    no_gpu: None, golden: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = golden / f"{name}.npz"
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "missing":
        assert reader.missing() == [path.name]
    elif damage == "lacking":
        np.savez(path, another=np.zeros(1))
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    # A file that is not whole is found before any work, and an array that it lacks when it is read.
    assert main(["parity", "--op", "Linear by cuBLASLt" if name == "linear_h200" else "Transformer Engine"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert "`git checkout -- optimized/recordings`.\n" in error
    if name in ("tensor_core_h200", "linear_h200"):
        report = Report("title", "introduction")
        outcome = recorded.run(report, lambda name, total: lambda: None)
        assert str(path) in outcome.result  # the walkthrough goes on
        assert outcome.result.endswith(f"{reader.RESTORED}.")


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_parity_replays_recordings(
    no_gpu: None, every: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every op; of the layers, which take two thirds of the time, every ninth case. All of them are a slow test.

    So are all words of others' kernels, of which files of their own (test_tensor_core.py, test_golden_linear.py and
    test_golden_transformer_engine.py) have every one in the fast suite.
    """
    listed = list(cases.cases())
    layers = [case for case in listed if case.op.endswith(("(16 bits)", "(FP8)"))]
    assert 10 < len(layers) < len(listed) / 2
    left_out = [case for i, case in enumerate(layers) if i % every]
    monkeypatch.setattr(cases, "cases", lambda: iter([case for case in listed if case not in left_out]))
    if every > 1:
        of_each = {one.formats: one for one in recorded_tensor_core.steps()}
        products = {one.accumulate: one for one in recorded_tensor_core.products()}
        monkeypatch.setattr(recorded_tensor_core, "steps", lambda: iter(of_each.values()))
        monkeypatch.setattr(recorded_tensor_core, "products", lambda: iter(products.values()))
        for module in (linear, transformer_engine):
            monkeypatch.setattr(module, "CASES", dict(list(module.CASES.items())[:1]))
    assert main(["parity"]) == 0
    out = capsys.readouterr().out
    assert "replay: the CPU against recordings" in out
    for op in ("wgmma e4m3 × e5m2", "cuBLASLt GEMM, fast", "cuBLASLt GEMM, split", "Linear by cuBLASLt"):
        assert op in out
    for op in ("cast_transpose", "scale_update", "gemm_fp8 (split)", "Transformer Engine's ops"):
        assert op in out
    assert "different:" not in out


def test_parity_finds_one_wrong_bit(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gemm = tensor_core.gemm

    def wrong(a: torch.Tensor, b: torch.Tensor, accumulate: str = "fast") -> torch.Tensor:
        out = gemm(a, b, accumulate)
        out.view(torch.int32)[0, 0] ^= 1 << 10
        return out

    monkeypatch.setattr(tensor_core, "gemm", wrong)
    assert main(["parity", "--op", "cublaslt gemm, SPLIT"]) == 1
    # One bit in one word of every product; in the products that are sums of slices it is one of several.
    wrong = sum(product.accumulate == "split" for product in recorded_tensor_core.products())
    out = capsys.readouterr().out
    assert re.search(rf"all\s+│\s+[\d,]+ │\s+{wrong}\b", out)
    assert out.count("different: cuBLASLt GEMM, split accumulation, E") == wrong  # each is named


def _case(*values: float, dtype: torch.dtype = torch.float32) -> Case:
    return Case("new op", "case", lambda where: {"out": torch.tensor(values, dtype=dtype)})


def test_a_case_that_was_never_recorded_is_an_error(tmp_path: Path) -> None:
    empty = outputs.Recording({}, np.zeros(0, np.uint8))
    with pytest.raises(files.Damaged, match="no 'new op/case/out': it is older than this case"):
        parity.replay(_case(0.0), empty)
    outputs.write(tmp_path, {"new op/case/out": torch.zeros(1)}, CPU)
    with pytest.raises(files.Damaged, match=r"recorded as torch.float32 \[1\] and is torch.bfloat16 \[1\] now"):
        parity.replay(_case(0.0, dtype=torch.bfloat16), outputs.read(tmp_path))


@pytest.mark.parametrize("size", [outputs.WHOLE, 1000])
def test_a_recording_sees_every_word(tmp_path: Path, size: int) -> None:
    """Words stored whole and words for which a digest stands; NaN is NaN, -0 is not 0."""
    out = torch.linspace(-1, 1, size)
    out[5] = float("nan")
    out[7] = 0.0
    outputs.write(tmp_path, {"new op/case/out": out}, CPU)
    recording = outputs.read(tmp_path)
    assert recording.compare("new op/case/out", out) == Tally(size, 0)
    other = out.clone()
    other.view(torch.int32)[5] = 0x7FC12345
    assert recording.compare("new op/case/out", other) == Tally(size, 0)
    for place in (0, 7, size - 1):
        other = out.clone()
        other.view(torch.int32)[place] ^= -0x80000000 if place == 7 else 1
        assert recording.compare("new op/case/out", other) == Tally(size, 1)


def test_parity_records_what_it_replays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorder, with the CPU in the GPU's place: a case of every op and layer, recorded and replayed."""
    console, read = Console(width=200), outputs.read
    every = list(cases.cases())
    some = list({case.op: case for case in every if not case.live}.values())
    monkeypatch.setattr(cases, "cases", lambda: some)
    assert parity.record(tmp_path, CPU, console) == 0
    recording = outputs.read(tmp_path)
    monkeypatch.setattr(outputs, "read", lambda folder: recording)
    monkeypatch.setattr(recorded_tensor_core, "steps", lambda: [])
    monkeypatch.setattr(recorded_tensor_core, "products", lambda: [])
    monkeypatch.setattr(linear, "CASES", {})
    monkeypatch.setattr(transformer_engine, "CASES", {})
    results = parity.compare(None, None, console)
    assert set(results) == {case.op for case in some}
    stored = {key.rsplit("/", 1)[0] for key in read(reader.DATA).index}
    assert stored == {f"{case.op}/{case.name}" for case in every if not case.live}, "what the H200's recording holds"
    assert all(tally.equal for tally in results.values())
    ops = {name.split(" (")[0] for name in results}
    layers = {"LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "DotProductAttention", "MultiheadAttention"}
    assert {"Linear", "TransformerLayer"} | layers <= ops
    assert set(recording.provenance["kernels"]) >= {"norm", "attention", "gemm_fp8"}
    recording.provenance["kernels"]["attention"] = "another day's hash"
    parity._say_what_changed(console)
    assert capsys.readouterr().out.splitlines()[-1].endswith("before the last change of: attention")
    monkeypatch.setattr(cases.MODULES["norm"], "EPSILON", 2e-5)
    results = parity.compare(None, "rmsnorm", console)
    assert not results["rmsnorm"].equal


def test_the_recorder_goes_on_after_a_case_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(where: torch.device) -> dict[str, torch.Tensor]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(cases, "cases", lambda: [Case("bad op", "case", fails), _case(1.0, 2.0)])
    assert parity.record(tmp_path, CPU, Console(width=200)) == 1
    assert "bad op, case: not recorded: RuntimeError('no such kernel')" in capsys.readouterr().out
    assert parity.replay(_case(1.0, 2.0), outputs.read(tmp_path)) == Tally(2, 0)


def test_the_stored_counts_say_whose_words_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [op for op, *_ in parity._jobs(None, list(cases.cases()))]
    stored: dict[str, Any] = {}
    monkeypatch.setattr(measure, "write_result", lambda name, payload: stored.update(payload))
    parity._store({name: Tally(compared=1) for name in names})
    counts = {row["of"].split(":")[0]: 0 for row in stored["rows"]}
    for row in stored["rows"]:
        counts[row["of"].split(":")[0]] += row["words"]
    others = ("wgmma", "cuBLASLt", "Linear by cuBLASLt", "Transformer Engine")
    ours = len({name for name in names if not name.startswith(others)})
    assert counts["our kernels"] == ours
    assert counts["Transformer Engine"] == 1
    assert counts["cuBLASLt"] == 3


def test_cases_are_repeatable_and_named_once() -> None:
    names = [(case.op, case.name) for case in cases.cases()]
    assert len(names) == len(set(names))
    finite = [
        float(tensor.float().isfinite().float().mean())
        for case in cases.cases()
        if case.op.startswith("TransformerLayer") and case.name.startswith("fp16") and "causal" in case.name
        for tensor in case.run(CPU).values()
        if tensor.dtype.is_floating_point
    ]
    assert min(finite) == 1.0  # NaN equals NaN: a training that has overflowed would compare nothing
    case = next(case for case in cases.cases() if case.op == "Linear (FP8)")
    one, other = case.run(torch.device("cpu")), case.run(torch.device("cpu"))
    assert {key: differing(one[key], other[key]) for key in one} == dict.fromkeys(one, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("op", sorted({case.op for case in cases.cases()}))
def test_an_op_or_layer_on_both_sides(op: str, same_bits: Callable[..., None]) -> None:
    for case in (case for case in cases.cases() if case.op == op):
        here, there = case.run(CPU), case.run(torch.device("cuda"))
        assert here.keys() == there.keys()
        for name, tensor in here.items():
            same_bits(tensor, there[name], f"{case.name}: {name}")


@pytest.mark.sample(6)
@pytest.mark.parametrize("op", sorted(cases.having("calls")))
def test_the_calls_of_a_list_are_compared(op: str) -> None:
    """Where both sides run: with the CPU in the GPU's place every word is equal, and a bit that is not is counted."""
    case = next(case for case in cases.lists() if case.op == op)
    here, there = case.run(CPU), case.run(CPU)
    runs = [here, there, here, there]
    again = Case(op, case.name, lambda device: runs.pop(0))
    assert parity.live(again, CPU).equal
    name = next(name for name, x in there.items() if x.numel() and bool(x.reshape(-1)[0].float().isfinite()))
    there[name] = there[name].clone(memory_format=torch.contiguous_format)
    there[name].reshape(-1).view(torch.uint8)[0] ^= 1
    assert parity.live(again, CPU).different == 1


def test_layers_have_cases_under_every_recipe_of_a_gpu() -> None:
    """And one whose parts have a recipe each; run twice, it has equal words."""
    of_gpus = {type(make(Settings())) for name, make in RECIPES.items() if name not in ("bf16", "mxfp8", "nvfp4")}
    assert {type(one) for one in layer_cases.RECIPES.values()} == of_gpus - {DelayedScaling}
    *_, mixed = layer_cases.recipes()
    assert parity.live(mixed, CPU).equal


@pytest.mark.gpu
def test_parity_live(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--op", "cast"]) == 0
    assert "live: the CPU against" in capsys.readouterr().out


@pytest.mark.slow
def test_no_word_depends_on_the_vectors_of_a_cpu() -> None:
    """Neither results nor the inputs of cases: torch's own kernels without vectors, and every recorded word again."""
    command = [sys.executable, "-m", "optimized.commands", "parity", "--replay"]
    plain = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_differing_counts_words() -> None:
    nan = torch.tensor([float("nan"), 1.0, 0.0])
    other = torch.tensor([0x7FC00001, 0x3F800000, -0x80000000], dtype=torch.int32).view(torch.float32)
    assert differing(nan, other) == 1  # NaN equals NaN; -0 is not +0
    codes = torch.tensor([0x7F, 0x01], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert differing(codes, torch.tensor([0xFF, 0x01], dtype=torch.uint8).view(torch.float8_e4m3fn)) == 1
    with pytest.raises(ValueError, match="same dtype and shape"):
        differing(nan, nan[:2])
    assert not Tally().equal
    assert Tally(3, 0).equal
    assert not Tally(3, 1).equal


def test_what_was_recorded_is_still_replayed() -> None:
    replayed = [f"{case.op}/{case.name}/" for case in cases.cases() if not case.live]
    lost = [name for name in outputs.read(reader.DATA).index if not name.startswith(tuple(replayed))]
    assert not lost
