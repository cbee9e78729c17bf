"""`optimized.recordings.transformer_engine` and its recorder, on recordings made of `reference` itself."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reference as te
from optimized.recordings import reader, transformer_engine
from optimized.recordings.linear import words
from optimized.recordings.transformer_engine_cases import CASES, Run, first_parameters, inputs, known, updated
from reference.ops.library import twin
from reference.recipes.block_scaling import InBlocks
from reference.recipes.current_scaling import Current
from reference.recipes.quantized import Quantized, gemm
from reference.recipes.quantizer import NormPlan, Quantizer
from reference.support import files

NAME = "LayerNormMLP, swiglu, fp16"
OTHERS = "LayerNormMLP, swiglu, current scaling, E4M3, fp16", "LayerNormMLP, gelu, block scaling, fp16"


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


def steps_of(recorder: Any, store: Any, change: int | None = None, name: str = NAME) -> list[dict[str, Any]]:
    """What the recorder would write of `reference`'s layer; in step `change` one word of dx is another."""
    run = Run(name, te, te.recipe, "cpu")
    parameters, found = first_parameters(name, run.shapes()), []
    for step in range(CASES[name].steps):
        x, gradient = inputs(name, step)
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
    recorder.write(folder, recorder.RECORDING, store, {NAME: steps_of(recorder, store, change)}, {})
    different = {
        (step, key): transformer_engine.Tally().add(*pair)
        for step, pairs in enumerate(transformer_engine.steps(NAME))
        for key, pair in pairs.items()
    }
    assert {key: count for key, count in different.items() if count} == ({} if change is None else {(4, "dx"): 1})
    assert transformer_engine.compare(NAME).equal


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_recipes_have_a_recording_of_their_own(recorder: Any, folder: Path, name: str) -> None:
    store = recorder.Store()
    recorder.write(folder, recorder.RECORDING_RECIPES, store, {name: steps_of(recorder, store, 1, name)}, {})
    found = [
        {key: transformer_engine.Tally().add(*pair) for key, pair in pairs.items()}
        for pairs in transformer_engine.steps(name)
    ]
    assert [key for step in found for key, count in step.items() if count] == ["dx"]
    assert found[1]["dx"] == 1


def test_no_recorded_case_is_left_out(recorder: Any, folder: Path) -> None:
    """Whoever goes through the cases is told which recording or which case is missing."""
    everything: dict[str, dict[str, list[Any]]] = {}
    for name in CASES:
        everything.setdefault(transformer_engine.recording_of(name), {})[name] = []
    assert len(everything) == 2
    for recording, cases in everything.items():
        with pytest.raises(files.Damaged, match=f"{recording}.npz is missing: install the package anew"):
            transformer_engine.names()
        *others, last = cases
        recorder.write(folder, recording, recorder.Store(), {key: [] for key in others}, {})
        with pytest.raises(files.Damaged, match=f"{recording}.npz is damaged: it has no '{re.escape(last)}': install"):
            transformer_engine.names()
        recorder.write(folder, recording, recorder.Store(), cases, {})
        forget()
    assert transformer_engine.names() == list(CASES)


class Codes:
    """A tensor with the attributes of Transformer Engine's FP8 tensors, of the casts of `reference`."""

    def __init__(self, found: Quantized, square: bool | None = None) -> None:
        (codes, scales, *_), column = found.row, found.column
        assert column is not None
        self._fp8_dtype = "E4M3" if codes.dtype == torch.float8_e4m3fn else "E5M2"
        if square is None:
            self._data, self._transpose, self._scale_inv = codes.view(torch.uint8), None, scales
            return
        self._is_2D_scaled = square
        self._rowwise_data, self._rowwise_scale_inv = codes.view(torch.uint8), scales
        self._columnwise_data, self._columnwise_scale_inv = (x.clone() for x in column[:2])
        self._columnwise_data = self._columnwise_data.view(torch.uint8)
        self._columnwise_scale_inv[:, len(self._columnwise_data) :] = torch.nan  # nobody writes the padding


def quantizers(recipe: str, square: bool) -> tuple[Any, Quantizer]:
    """A quantizer with Transformer Engine's attributes, and ours."""
    theirs = SimpleNamespace(dtype="E4M3", force_pow_2_scales=True, amax_epsilon=0.0)
    if recipe == "current":
        return theirs, Current(torch.float8_e4m3fn, True, 0.0)
    theirs.block_scaling_dim = 1 + square
    return theirs, InBlocks(torch.float8_e4m3fn, square, "power_of_two")


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_calls_of_the_other_recipes_are_repeated(recorder: Any, folder: Path, recipe: str) -> None:
    name = next(one for one in OTHERS if CASES[one].recipe == recipe)
    store = recorder.Store()
    entries = steps_of(recorder, store, name=name)
    x, w, g = (words(n, shape, 1.0).bfloat16() for n, shape in enumerate(((144, 48), (160, 48), (144, 160))))
    gamma, beta = x[0], x[1]
    trace = recorder.Trace(store)
    store.begin({})
    made = {}
    for key, tensor in (("x", x), ("w", w), ("g", g)):
        square = recipe == "block" and key == "w"
        theirs, ours = quantizers(recipe, square)
        made[key] = Codes(ours.quantize(tensor, True), square if recipe == "block" else None)
        call = trace.wrapped(lambda *_, key=key: made[key], recorder.note_quantize)
        assert call(tensor, theirs) is made[key]
    theirs, ours = quantizers(recipe, False)
    kind = False if recipe == "block" else None
    found, mean, rstd = ours.norm(x, gamma, beta, NormPlan(1e-5, False, "layernorm"), x.dtype, True)
    norm = trace.wrapped(lambda *_: [Codes(found, kind), mean, rstd], recorder.note_norm("layernorm"))
    norm(x, gamma, beta, 1e-5, None, theirs, None, 0, False)
    y, cast = ours.activated(x, "gelu", True)
    if recipe == "current":
        trace.wrapped(lambda *_: Codes(cast), recorder.note_activation("gelu"))(x, theirs)
        out = [twin.dbias(g), made["g"]]
        trace.wrapped(lambda *_: out, recorder.note_bgrad_quantize)(g, theirs)
    else:
        trace.wrapped(lambda *_: y, recorder.note_activation("gelu"))(x, None)
        trace.wrapped(lambda *_, dim: twin.dbias(g), recorder.note_sum)(g, dim=0)
        assert trace.wrapped(torch.Tensor.sum, recorder.note_sum)(gamma, dim=0).shape == ()
    grad = words(9, (144, 48), 1.0).bfloat16()
    trace.wrapped(lambda *_: twin.activation_backward(grad, x, "gelu"), recorder.note_dgelu)(grad, x, None)
    qx, qw, qg = (
        quantizers(recipe, recipe == "block" and key == "w")[1].quantize(tensor, True)
        for key, tensor in (("x", x), ("w", w), ("g", g))
    )
    products = (  # a, b of Transformer Engine's order, and ours
        (made["w"], True, made["x"], False, gemm(qx.row, qw.row, None, x.dtype, "split")),
        (made["w"], False, made["g"], False, gemm(qg.row, qw.column, None, x.dtype, "split")),
        (made["x"], False, made["g"], True, gemm(qg.column, qx.column, None, x.dtype, "split")),
    )
    for a, a_t, b, b_t, out in products:
        call = trace.wrapped(lambda *_, out=out: [out, None, None, None], recorder.note_gemm)
        call(a, a_t, b, b_t, None, None, None, None, None, False, None, a_t, None, 0, False, True)
    assert trace.problems == set()
    entries[1]["calls"] = trace.calls
    recorder.write(folder, recorder.RECORDING_RECIPES, store, {name: entries}, {})
    different = [
        (op, part, transformer_engine.Tally().add(*pair))
        for op, parts in transformer_engine.calls(name)
        for part, pair in parts.items()
    ]
    assert len(trace.calls) == 10
    assert len({op for op, *_ in different}) == len({call["op"] for call in trace.calls})
    assert [one for one in different if one[2]] == []


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
    recorder.write(folder, recorder.RECORDING, store, {NAME: entries}, {})
    found = {
        (op, part): transformer_engine.Tally().add(*pair)
        for op, parts in transformer_engine.calls(NAME)
        for part, pair in parts.items()
    }
    assert found == {("cast", "codes"): 0, ("cast", "scale_inv"): 0, ("cast", "amax"): 1, ("gemm", "out"): 0}
    assert transformer_engine.compare(NAME).different == 1


def test_what_differs_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tensor by step, of each part of an op, and each call that differs where it may not."""
    x = torch.arange(1200.0)
    y = x.clone()
    y[:3] += 1
    may_not, may = ("gemm", "out"), next(iter(transformer_engine.WHY))
    steps = [{"y": (x, x), "dx": (x, x)}, {"y": (x, y), "dx": (x, x)}]
    calls = [(may_not[0], {may_not[1]: (x, x)}), (may_not[0], {may_not[1]: (x, y)}), (may[0], {may[1]: (x, y)})]
    monkeypatch.setattr(transformer_engine, "steps", lambda name: steps)
    monkeypatch.setattr(transformer_engine, "calls", lambda name: calls)
    transformer_engine.main([NAME])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == NAME
    assert [line.split() for line in lines] == [
        ["y", "2,400", "words", "3", "differ", "[0,", "3]"],
        ["dx", "2,400", "words", "0", "differ", "[0,", "0]"],
        ["call", "1,", "gemm:", "out", "differs"],
        ["gemm:", "out", "2,400", "words", "3", "differ"],
        [f"{may[0]}:", may[1], "1,200", "words", "3", "differ"],
    ]


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
    recorder.write(folder, recorder.RECORDING, store, {NAME: entries}, {})
    with pytest.raises(files.Damaged, match="does not fit"):
        list(transformer_engine.steps(NAME))
    forget()
    recorder.write(folder, recorder.RECORDING, store, {NAME: entries[1:]}, {})
    with pytest.raises(files.Damaged, match="has 5 steps"):
        transformer_engine.recorded(NAME)
    assert json.loads((folder / "transformer_engine_h200.json").read_text()) == {}


@pytest.mark.parametrize("name", CASES)
def test_every_case_runs_with_finite_numbers(name: str) -> None:
    run = Run(name, te, te.recipe, "cpu")
    parameters = first_parameters(name, run.shapes())
    run.load(parameters)
    for step in (0, CASES[name].steps // 2):
        results = run.step(*inputs(name, step))
        assert all(torch.isfinite(value).all() for value in results.values())
        assert {f"d {key}" for key in parameters} <= results.keys()
        assert results["dx"].count_nonzero() > results["dx"].numel() // 2 or step == 0
