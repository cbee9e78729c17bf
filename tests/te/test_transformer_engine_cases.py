"""`optimized.recordings.transformer_engine` and its recorder, on recordings made of `reference` itself."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import reference as te
from optimized.recordings import reader, transformer_engine
from optimized.recordings.transformer_engine_cases import CASES, STEPS, Run, first_parameters, inputs, known, updated
from reference.ops.library import twin
from reference.support import files

NAME = "LayerNormMLP, swiglu, fp16"


@pytest.fixture
def recorder() -> Any:
    path = Path(__file__).parents[1] / "golden" / "record_transformer_engine.py"
    spec = importlib.util.spec_from_file_location("record_transformer_engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget() -> None:
    for function in (transformer_engine._file, transformer_engine.recorded, reader.arrays):
        function.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(reader, "DATA", tmp_path)
    forget()
    yield tmp_path
    forget()


def steps_of(recorder: Any, store: Any, change: int | None = None) -> list[dict[str, Any]]:
    """What the recorder would write of `reference`'s layer; in step `change` one word of dx is another."""
    run = Run(NAME, te, te, "cpu")
    parameters, found = first_parameters(NAME, run.shapes()), []
    for step in range(STEPS):
        x, gradient = inputs(NAME, step)
        store.begin(known(x, gradient, parameters))
        run.load(parameters)
        results = run.step(x, gradient)
        if step == change:
            results["dx"].view(torch.int16)[3, 5] ^= 1
        found.append({"results": {key: store.place(value) for key, value in results.items()}, "calls": []})
        parameters = updated(parameters, results)
    return found


@pytest.mark.parametrize("change", [None, 4])
def test_a_step_starts_from_what_was_recorded(recorder: Any, folder: Path, change: int | None) -> None:
    store = recorder.Store()
    recorder.write(folder, store, {NAME: steps_of(recorder, store, change)}, {})
    different = {
        (step, key): transformer_engine.Tally().add(*pair)
        for step, pairs in enumerate(transformer_engine.steps(NAME))
        for key, pair in pairs.items()
    }
    assert {key: count for key, count in different.items() if count} == ({} if change is None else {(4, "dx"): 1})
    assert transformer_engine.compare(NAME).equal


def test_a_call_is_repeated_on_its_own_arguments(recorder: Any, folder: Path) -> None:
    store = recorder.Store()
    entries = steps_of(recorder, store)
    x, _ = inputs(NAME, 0)
    scale, history = torch.tensor([3.0]), torch.zeros(1, 1)
    q, scale_inv = twin.cast(x, scale, history, 0, torch.float8_e4m3fn)
    store.begin({"x": x})
    trace = recorder.Trace(store)
    cast = {"codes": q, "scale_inv": scale_inv, "amax": history[0] + 1}
    trace.add("cast", {"x": x, "scale": scale}, {"dtype": "float8_e4m3fn"}, cast)
    operands = {"a": q, "b": q, "a_scale_inv": scale_inv, "b_scale_inv": scale_inv}
    out = twin.gemm_fp8(q.t().contiguous(), q.t().contiguous(), scale_inv, scale_inv, None, torch.float16, "split")
    more = {"a_t": True, "b_t": True, "split": True, "out_dtype": "float16"}
    trace.add("gemm", operands, more, {"out": out})
    entries[0]["calls"] = trace.calls
    recorder.write(folder, store, {NAME: entries}, {})
    found = {
        (op, part): transformer_engine.Tally().add(*pair)
        for op, parts in transformer_engine.calls(NAME)
        for part, pair in parts.items()
    }
    assert found == {("cast", "codes"): 0, ("cast", "scale_inv"): 0, ("cast", "amax"): 1, ("gemm", "out"): 0}
    assert transformer_engine.compare(NAME).different == 1


def test_words_are_stored_once(recorder: Any) -> None:
    store, x = recorder.Store(), torch.arange(12, dtype=torch.float32).view(3, 4)
    store.begin({"weight": x})
    assert store.place(x.view(4, 3)) == ["weight", [4, 3]]
    store.begin({})
    assert store.place(x) == [0, [3, 4]]
    assert store.place(x[1:2]) == [1, [1, 4]]
    assert store.place(x.flatten()) == [0, [12]]
    assert store.arrays == [("float32", 0, 48), ("float32", 16, 16)]
    assert len(store.data) == 48


def test_a_recording_of_other_results_is_damage(recorder: Any, folder: Path) -> None:
    store = recorder.Store()
    entries = steps_of(recorder, store)
    del entries[0]["results"]["dx"]
    recorder.write(folder, store, {NAME: entries}, {})
    with pytest.raises(files.Damaged, match="does not fit"):
        list(transformer_engine.steps(NAME))
    forget()
    recorder.write(folder, store, {NAME: entries[1:]}, {})
    with pytest.raises(files.Damaged, match="has 5 steps"):
        transformer_engine.recorded(NAME)
    assert json.loads((folder / "transformer_engine_h200.json").read_text()) == {}


@pytest.mark.parametrize("name", CASES)
def test_every_case_runs_with_finite_numbers(name: str) -> None:
    run = Run(name, te, te, "cpu")
    parameters = first_parameters(name, run.shapes())
    run.load(parameters)
    for step in (0, 3):
        results = run.step(*inputs(name, step))
        assert all(torch.isfinite(value).all() for value in results.values())
        assert {f"d {key}" for key in parameters} <= results.keys()
        assert results["dx"].count_nonzero() > results["dx"].numel() // 2 or step == 0
