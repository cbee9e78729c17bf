"""`twin bench trainer`, `decode` and `first_step`: what they run, small and on the CPU."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from shared.dry_bench import DryBench
from shared.dry_gpu import DryGpu

import optimized as te
from optimized import measure
from optimized.bench.layers import decode, first_step
from optimized.bench.models import trainer
from optimized.cuda import compiler, wheel_cubins
from reference.support import files

SIZES = trainer.Sizes(64, 128, 4, 2, 2, 128, 16, 2)


@pytest.mark.integration
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("way", trainer.WAYS, ids=lambda way: way.name)
def test_the_trainer_trains_each_way(way: trainer.Way) -> None:
    library: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    library.utils.logging.set_verbosity_error()
    options = {"torch_compile_backend": "aot_eager"} if way.compiled else {}
    noted: list[str] = []
    with mock.patch.multiple(
        torch.cuda,
        synchronize=lambda: noted.append("synchronize"),
        reset_peak_memory_stats=lambda: noted.append("reset"),
        max_memory_allocated=lambda: 7 << 30,
    ):
        found = trainer.trained(way, SIZES, 3, 2, "cpu", use_cpu=True, **options)
    assert len(found["samples"]) == 3
    assert all(sample > 0 for sample in found["samples"])
    assert 4 < found["loss"] < 6  # it knows nothing: ln 128 is 4.85
    assert found["peak_bytes"] == 7 << 30
    assert noted == ["synchronize"] * 2 + ["reset"] + ["synchronize"] * 3


@pytest.mark.parametrize(("steps", "warm_up"), [(3, 2), (1, 4)])
def test_each_step_of_the_trainer_has_samples_of_its_own(
    steps: int, warm_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many are drawn as all steps take; the library is one that is made up, and trains nothing."""
    asked: list[tuple[dict[str, Any], list[Any]]] = []

    class Trainer:
        def __init__(self, model: None, arguments: dict[str, Any], train_dataset: list[Any], callbacks: Any) -> None:
            asked.append((arguments, train_dataset))
            self.callbacks, self.steps = callbacks, arguments["max_steps"]

        def remove_callback(self, one: type) -> None:
            pass

        def train(self) -> Any:
            for one in self.callbacks * self.steps:
                one.on_step_end()
            return types.SimpleNamespace(training_loss=1.5)

    library: Any = types.ModuleType("transformers")
    library.TrainerCallback = library.PrinterCallback = object
    library.Trainer, library.TrainingArguments = Trainer, lambda folder, **given: given
    monkeypatch.setitem(sys.modules, "transformers", library)
    nothing = {name: lambda: None for name in ("synchronize", "reset_peak_memory_stats")}
    with mock.patch.multiple(torch.cuda, max_memory_allocated=lambda: 7, **nothing):
        found = trainer.trained(mock.Mock(), SIZES, steps, warm_up, "cpu")
    ((arguments, rows),) = asked
    assert len(rows) == arguments["max_steps"] * arguments["per_device_train_batch_size"]
    assert len({tuple(row["input_ids"].tolist()) for row in rows}) == len(rows)
    assert (found["loss"], found["peak_bytes"], len(found["samples"])) == (1.5, 7, steps)


@pytest.mark.integration
@pytest.mark.parametrize("way", trainer.WAYS, ids=lambda way: way.name)
def test_what_is_converted(way: trainer.Way) -> None:
    pytest.importorskip("transformers")
    model = way.model(SIZES, "cpu")
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    ours = [name for name, one in model.named_modules() if isinstance(one, te.Linear)]
    assert len(ours) == way.fp8 * (7 * SIZES.num_hidden_layers + way.head)
    assert ("lm_head" in ours) == way.head


def test_the_result_notices_when_the_kernels_of_the_converted_layers_change() -> None:
    """Linear maps without bias, and RMSNorm, at the sizes of Llama 3 8B."""
    one = trainer.Sizes()
    widths = (1024, one.hidden_size, one.intermediate_size, one.vocab_size)
    pairs = [(one.hidden_size, width) for width in widths] + [(one.intermediate_size, one.hidden_size)]
    with DryBench() as bench:
        options: dict[str, Any] = {"params_dtype": torch.bfloat16, "init_method": lambda weight: None}
        made: list[Any] = [te.Linear(*pair, bias=False, **options) for pair in pairs]
        for module in [*made, te.RMSNorm(one.hidden_size, params_dtype=torch.bfloat16)]:
            columns = getattr(module, "in_features", one.hidden_size)
            x = torch.empty(one.batch, one.sequence, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(recipe=te.DelayedScaling()):
                out = module(x)
            out.backward(torch.empty_like(out))
    assert {one.kernel.kernel for one in bench.gpu.launches} == set(trainer.KERNELS)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_decoding_with_hugging_faces_model() -> None:
    pytest.importorskip("transformers")
    case = replace(decode.CASE, hidden=64, ffn=128, heads=4, kv_heads=2, batch=2)
    with mock.patch.multiple(decode, ROOM=32, PROMPT=16):
        model = decode.HuggingFace(case, "cpu", backend="eager")
        assert decode.THEIR_MODEL in decode.contestants(case)
    assert model.x.shape == (2, 1, 64)
    assert int(model.cache.get_seq_length()) == 16 + 3
    model.alone()
    model.block(2)
    assert int(model.cache.get_seq_length()) == 16 + 3 + 3
    assert model.cache.layers[0].keys.shape == (2, 2, 32, 16)
    assert not model.cache.layers[0].keys[:, :, 22:].any()
    assert model.cache.layers[0].keys[:, :, :22].any(dim=-1).all()


def test_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compiled", [])  # other tests of this process have compiled
    sizes, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **how: sizes.append(size) or randn(*size, **how))
    with DryBench() as bench, mock.patch.object(first_step.time, "time", iter(range(10, 20)).__next__):
        found = first_step.steps(7.0)
    assert found == {"seconds": [3, 1, 1, 1, 1], "compiled": [0] * 5}
    assert len(found["seconds"]) == len(first_step.PHASES)
    assert bench.gpu.lines.count("synchronize") == 4
    assert [size[1] for size in sizes] == [4, 4, 2], "the second step repeats the first, the third has another batch"
    assert {one.kernel.kernel for one in bench.gpu.launches} == set(first_step.KERNELS)


def test_a_step_counts_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compiled", [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: compiler.compiled.append("one"))
    with DryGpu():
        assert first_step.steps(0.0)["compiled"] == [0, 1, 1, 1, 1]


def test_what_a_process_compiled_is_packed_as_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ["norm-0123.bin", "norm-4567.bin", "ladder-2_tma-89ab.bin"]
    for name in names:
        files.keep("cubin", name, name.encode())
    monkeypatch.setattr(compiler, "compiled", [*names, "norm-lost.bin"])
    folder = tmp_path / "cubins"
    folder.mkdir()
    assert first_step.pack(folder) == 3
    monkeypatch.setattr(wheel_cubins, "FOLDER", folder)
    assert wheel_cubins.found("norm", names[1]) == names[1].encode()
    assert wheel_cubins.found("ladder/2_tma", names[2]) == names[2].encode()
    assert wheel_cubins.found("norm", "norm-lost.bin") is None
    assert files.record(folder / "about.json")["count"] == 3


def test_a_wheels_kernels_serve_the_nvrtc_that_compiled_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_cubins, "FOLDER", tmp_path)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(compiler, "key", lambda kernel, defines: f"key of {kernel}")
    assert first_step.carried() is None
    about = {"first": ["norm", {}, "key of norm"], "kernels": wheel_cubins.digest()}
    (tmp_path / "about.json").write_text(json.dumps(about))
    assert first_step.carried() == tmp_path
    (tmp_path / "about.json").write_text(json.dumps({**about, "kernels": "of another day"}))
    assert first_step.carried() is None
    (tmp_path / "about.json").write_text(json.dumps({**about, "first": ["norm", {}, "another key"]}))
    assert first_step.carried() is None


def test_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started with the arguments that `first_step` takes, and what it prints last is read."""
    asked: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command, options["env"]["XDG_CACHE_HOME"]))
        return mock.Mock(stdout='said before\n{"seconds": [1]}\n')

    monkeypatch.setattr(first_step.subprocess, "run", run)
    monkeypatch.setattr(first_step.time, "time", lambda: 12.5)
    assert first_step.process(tmp_path / "a", tmp_path / "b", tmp_path / "c") == {"seconds": [1]}
    first_step.process(tmp_path / "a", tmp_path / "b")
    (first, cache), (second, _) = asked
    module = "optimized.bench.layers.first_step"
    assert first == [sys.executable, "-m", module, str(tmp_path / "b"), str(tmp_path / "c"), "12.5"]
    assert second[4] == ""
    assert cache == str(tmp_path / "a")
