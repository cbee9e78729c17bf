"""The file of a recorded step: a bad one is one sentence, and a full disk leaves none."""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from shared.recorded_steps import RECIPES, given, made, recorded, replayed, step

import reference as te
from optimized.commands import main
from reference.checkpoints import checked_safetensors
from reference.inspect.recorded_step import file, ops
from reference.inspect.recorded_step.words import coverage
from reference.support import files

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("steps") / "step.safetensors"
    recorded(path, made("Linear"), RECIPES["delayed"])
    return path.read_bytes()


def rewritten(path: Path, change: Callable[[dict[str, Any], Tensors], None], **metadata: str) -> None:
    """The file with its program or tensors changed, and a digest of the program that fits."""
    with safetensors.safe_open(path, framework="pt") as opened:
        kept, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    program = json.loads(tensors["program"].numpy().tobytes())
    change(program, tensors)
    text = json.dumps(program).encode()
    if "program" in tensors:
        tensors["program"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    kept = {name: value for name, value in kept.items() if name not in ("seal", "crc32")}
    metadata = {**kept, "sha256": hashlib.sha256(text).hexdigest(), **metadata}
    checked_safetensors.write(path, tensors, metadata, file.safe_name)


@pytest.mark.parametrize("reads", [0, 1, 3])
def test_an_argument_is_one_of_the_tensors_read(reads: int) -> None:
    """By its number, at any depth."""
    of = "aten::mm"
    for n in range(reads):
        ops.check_arguments(of, [1.0, [{"read": n}], {"read": n}], reads)
    for wrong in (-1, reads, reads + 1, 0.0, True, "0", None):
        for values in ([{"read": wrong}], [[[{"read": wrong}]]]):
            with pytest.raises(ValueError, match=f"an argument of {of} is its tensor {wrong}, of {reads}"):
                ops.check_arguments(of, values, reads)


def first_op(name: str, value: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda program, tensors: program["ops"][0].update({name: value})


def region(at: int, value: Any) -> Callable[[dict[str, Any], Tensors], None]:
    def change(program: dict[str, Any], tensors: Tensors) -> None:
        program["ops"][0]["reads"][0][0][at] = value

    return change


def bend(program: dict[str, Any], tensors: Tensors) -> None:
    tensors["model/weight"].view(torch.uint8)[5, 5] ^= 4


WRONG: dict[str, tuple[Callable[[dict[str, Any], Tensors], None], str]] = {
    "no program": (lambda program, tensors: tensors.pop("program"), r"is damaged: it has no 'program'"),
    "no digests": (lambda program, tensors: tensors.pop("digests"), r"is damaged: it has no 'digests'"),
    "no weight": (lambda program, tensors: tensors.pop("model/weight"), r"is damaged: it has no 'model/weight'"),
    "no ops": (lambda program, tensors: program.pop("ops"), r"is damaged: it has no 'ops'"),
    "no origin": (lambda program, tensors: program["about"].pop("provenance"), r"is damaged: it has no 'provenance'"),
    "a bit": (bend, r"is damaged: 'model/weight' does not have the digest that was recorded for it, which says "
           r"[0-9A-F]{8} of its 32-bit word 81\."),
    "an op": (first_op("name", "twin::warp"), r"is damaged: it has the op 'twin::warp' of the kind 'twin'"),
    "a kind": (first_op("kind", "magic"), r"is damaged: it has the op .* of the kind 'magic'"),
    "a torch op": (
        lambda program, tensors: program["ops"][0].update({"kind": "torch", "name": "aten::mm"}),
        r"is damaged: it has the op 'aten::mm' of the kind 'torch'",
    ),
    "an entry": (first_op("surprise", 1), r"is damaged: .*unexpected keyword argument 'surprise'"),
    "an argument": (first_op("args", [{"read": 99}]), r"is damaged: an argument of twin::\w+ is its tensor 99, of \d+"),
    "a value": (first_op("args", [{"path": "/"}]), r"is damaged: an argument of twin::\w+ is \{'path': '/'\}"),
    "a size": (region(2, [1 << 20, 48]), r"is damaged: a tensor of storage \d+ reaches beyond its \d+ bytes"),
    "a place": (region(1, -1), r"is damaged: a tensor is .* at -1"),
    "a storage": (region(0, 10**6), r"is damaged: there is no storage 1000000"),
    "a type": (region(4, "float3"), r"is damaged: a tensor is float3"),
    "a list": (first_op("reads", [[1, 2]]), r"is damaged: "),
    "digests of another form": (
        lambda program, tensors: tensors.update(digests=torch.zeros(3)), r"is damaged: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_damaged_file_is_one_sentence(
    what: str, good: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.safetensors"
    path.write_bytes(good)
    rewritten(path, WRONG[what][0])
    with pytest.raises(files.Damaged, match=WRONG[what][1]):
        file.read(path)
    assert main(["replay", str(path), "--output", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (lambda good: good[:-1], r"is no whole safetensors file"),
        (lambda good: good[:1000], r"is no whole safetensors file"),
        (lambda good: b"", r"is no whole safetensors file"),
        (lambda good: b"\x89PNG" + good, r"is no whole safetensors file"),
        (lambda good: good.replace(b'"op/', b'"qp/', 1), r"is damaged, at its header: it is not the one"),
        (
            lambda good: good.replace(b'"kind":"twin"', b'"kind":"fed!"', 1),
            r"is damaged, at 'program': its bytes are n",
        ),
        (lambda good: safetensors.torch.save({"a": torch.ones(2)}), r"is a safetensors file, and no recorded step"),
    ],
)
def test_a_foreign_or_cut_file_is_one_sentence(
    content: Callable[[bytes], bytes], sentence: str, good: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "step.safetensors"
    path.write_bytes(content(good))
    with pytest.raises(files.Damaged, match=sentence):
        file.read(path)


def test_another_version_is_one_sentence(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    path.write_bytes(good)
    rewritten(path, lambda program, tensors: None, version="4")
    with pytest.raises(
        files.Damaged, match=r"is a recorded step of version '4'; version '3' is accepted, and '1', '2'"
    ):
        file.read(path)
    with pytest.raises(FileNotFoundError, match=r"absent"):
        file.read(tmp_path / "absent")


def test_a_flipped_bit_is_found_in_every_entry(good: bytes, tmp_path: Path) -> None:
    """Digests and random states among them, which no op reads: replay would blame the device."""
    path, start = tmp_path / "step.safetensors", 8 + int.from_bytes(good[:8], "little")
    header = json.loads(good[8:start])
    header.pop("__metadata__")
    assert {"program", "digests", "random/torch"} <= header.keys()
    for name, entry in header.items():
        begin, end = (start + at for at in entry["data_offsets"])
        for at in {begin, (begin + end) // 2, end - 1} if end > begin else ():
            bent = bytearray(good)
            bent[at] ^= 1 << at % 8
            path.write_bytes(bent)
            with pytest.raises(files.Damaged, match=f"is damaged, at {name!r}: its bytes are not those") as error:
                file.read(path)
            found = re.search(r"one flipped bit explains it, bit (\d+) of the number at \[(.*)\]\.$", str(error.value))
            assert found is not None
            index = [int(i) for i in found[2].split(", ")] if found[2] else []
            size = (end - begin) // max(1, math.prod(entry["shape"]))
            element = np.ravel_multi_index(index, entry["shape"]) if index else 0
            assert divmod(8 * (at - begin) + at % 8, 8 * size) == (element, int(found[1]))


def test_a_file_of_version_1_is_read_and_replay_says_what_was_not_checked(
    good: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "step.safetensors", tmp_path / "page.html"
    path.write_bytes(good)
    assert file.read(path).checked
    with safetensors.safe_open(path, framework="pt") as opened:
        kept, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    old = {"twin_engine": "recorded step", "version": "1", "sha256": kept["sha256"]}
    safetensors.torch.save_file(tensors, path, old)
    assert not file.read(path).checked
    assert main(["replay", str(path), "--output", str(page)]) == 0
    assert "version 1 of the format" in capsys.readouterr().out


def without_found(program: dict[str, Any], tensors: Tensors) -> None:
    for part in (program, *program["ops"]):
        part.pop("found")
    program["about"].pop("optimizers")


def test_a_file_of_version_2_is_replayed(good: bytes, tmp_path: Path) -> None:
    """It has no digests of what torch's own ops read."""
    path = tmp_path / "step.safetensors"
    path.write_bytes(good)
    rewritten(path, without_found, version="2")
    recording, result = replayed(path)
    assert result.equal
    assert recording.checked
    assert "ops judged" in coverage(recording, result)


def test_a_changed_word_is_named_as_it_was_recorded(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    path.write_bytes(good)
    rewritten(path, bend)
    was = int(safetensors.torch.load(good)["model/weight"].view(torch.int32).flatten()[81]) & 0xFFFFFFFF
    with pytest.raises(files.Damaged, match=f"which says {was:08X} of its 32-bit word 81"):
        file.read(path)


def slowly(program: dict[str, Any], tensors: Tensors) -> None:
    op = next(op for op in program["ops"] if op["name"] == "twin::gemm_fp8")
    op["args"][-1] = "slowly"


def enormous(program: dict[str, Any], tensors: Tensors) -> None:
    program["storages"][program["ops"][0]["writes"][0][0][0]] = 1 << 60


def folded(program: dict[str, Any], tensors: Tensors) -> None:
    program["ops"][0]["writes"][0][0][3] = [0, 0]


def smaller(program: dict[str, Any], tensors: Tensors) -> None:
    program["ops"][0]["writes"][0][0][2] = [1, 1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (slowly, r"the op twin::gemm_fp8 refuses the recorded arguments \(.*slowly.*\)\."),
        (enormous, r"op 0, twin::cast_transpose \(forward\) cannot run here \(.*\)\."),
        (folded, r"op 0, twin::cast_transpose \(forward\) cannot run here \(unsupported operation.*\)\."),
        (smaller, r"the op twin::cast_transpose has other results than those that were recorded\."),
    ],
)
def test_ops_that_cannot_run_are_one_sentence(
    change: Callable[[dict[str, Any], Tensors], None],
    sentence: str,
    good: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "step.safetensors"
    path.write_bytes(good)
    rewritten(path, change)
    assert main(["replay", str(path), "--output", str(tmp_path / "page.html")]) == 2
    found = capsys.readouterr().err
    assert re.fullmatch(rf"{path} cannot be replayed: {sentence}\n", found), found


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "step.safetensors"
    path.write_text("the last one")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(files.NotWritten, match=r"step.safetensors was not written: No space left on device"):
        recorded(path, made("Linear"), None)
    assert path.read_text() == "the last one"
    assert os.listdir(tmp_path) == ["step.safetensors"]
    monkeypatch.undo()
    recorded(path, made("Linear"), None)  # the next step can be recorded
    assert replayed(path)[1].equal


def test_a_failed_step_leaves_the_old_file(tmp_path: Path) -> None:
    path, model = tmp_path / "step.safetensors", made("Linear")
    path.write_text("the last one")
    with pytest.raises(ValueError, match=r"inp"), te.record(model, path):
        step(model, given()[..., :7], None)
    assert path.read_text() == "the last one"
