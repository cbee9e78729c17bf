"""What commands write over, and one run a folder: nothing of somebody else's is lost, and a sentence says why not."""

import os
import signal
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import processes
from shared.recorded_steps import RECIPES, made, recorded
from shared.training_text import TEXT

from optimized import measure
from optimized.commands import CommandError, main, outputs, train
from optimized.training import checkpoint, corpus
from optimized.training.metrics import Metrics
from optimized.training.settings import SIZES, Settings
from reference.support import files

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["--sequence", "16", "--rows", "1", "--warmup", "2", "--device", "cpu", "--steps", "2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "products.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> object:
    def check(argv: list[object], sentence: str) -> None:
        assert main([str(one) for one in argv]) == 2
        error = capsys.readouterr().err
        assert sentence in error, error
        assert error.count("\n") == 1, error

    return check


KINDS = (outputs.REPLAY, outputs.WALKTHROUGH, outputs.STEP, outputs.METRICS, outputs.PLOT, outputs.RECORDING)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.what)
def test_a_file_of_another_kind_stays(kind: outputs.FileType, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"my thesis", b"<!doctype html><title>mine</title>", b"{}", b"\x89PNG", b"PK\x03\x04", b"\0" * 99):
        path.write_bytes(content)
        with pytest.raises(CommandError, match=rf"^--output is '{path}': there is a file that is not {kind.what}, and"):
            outputs.write("--output", path, kind, "new")
        assert path.read_bytes() == content
    path.write_bytes(b"")
    outputs.write("--output", path, kind, "an empty file is nobody's")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CommandError, match=r"not a file; .* is accepted\.$"):
        outputs.check("--output", path, kind)
    (tmp_path / "loop").symlink_to("loop")
    for wrong in (tmp_path / "loop", Path("a" * 300), Path("a\0b")):
        with pytest.raises(CommandError, match=r"no path here \(.+\); .* is accepted\.$"):
            outputs.check("--output", wrong, kind)


def test_replay_and_walkthrough_replace_their_own_pages_alone(tmp_path: Path, refused: object) -> None:
    step, page = tmp_path / "step.safetensors", tmp_path / "page.html"
    recorded(step, made("Linear"), RECIPES["delayed"])
    good = step.read_bytes()
    refused(["replay", step, "--output", step], "there is a file that is not a page of `twin replay`")
    refused(["walkthrough", "--output", step], "there is a file that is not a page of `twin walkthrough`")
    assert step.read_bytes() == good
    assert main(["replay", str(step), "--output", str(page)]) == 0
    assert main(["replay", str(step), "--output", str(page)]) == 0
    refused(["walkthrough", "--quick", "--output", page], "there is a file that is not a page of `twin walkthrough`")


def test_the_kinds_are_known_by_what_commands_write(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(["train", str(text), *SMALL, "--record", "2", "--output", str(folder)]) == 0
    assert sorted(os.listdir(folder)) == ["checkpoint.safetensors", "loss.png", "metrics.jsonl", "step-2.safetensors"]
    for name, kind in {
        "loss.png": outputs.PLOT,
        "metrics.jsonl": outputs.METRICS,
        "step-2.safetensors": outputs.STEP,
    }.items():
        outputs.check("--output", folder / name, kind)
    for path in measure.RESULTS.glob("*.json"):
        outputs.check("--write", path, outputs.RESULT)
    outputs.check("--record", measure.ROOT / "optimized/recordings/data/parity_h200.npz", outputs.RECORDING)


@pytest.mark.parametrize("name", ["metrics.jsonl", "loss.png", "step-2.safetensors"])
def test_a_new_run_leaves_other_files_alone(name: str, text: Path, tmp_path: Path, refused: object) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text("mine")
    refused(["train", text, *SMALL, "--record", "2", "--output", folder], f"{name}': there is a file that is not")
    assert (folder / name).read_text() == "mine"
    assert os.listdir(folder) == [name]


def test_what_cannot_be_resumed_is_said(text: Path, tmp_path: Path, refused: object) -> None:
    folder = tmp_path / "run"
    assert main(["train", str(text), *SMALL, "--output", str(folder)]) == 0
    again = ["train", text, "--device", "cpu", "--resume", "--output", folder]
    path, metrics = folder / "checkpoint.safetensors", folder / "metrics.jsonl"
    lines = metrics.read_text()
    for line in ("no json", "[1]", '{"step": "1"}', '{"step": 1, "loss": "low"}', '{"step": true}', "\0\0"):
        metrics.write_text(f"{line}\n{lines}")
        refused(again, "metrics.jsonl is damaged, at line 1 (" if line.startswith('{"step": 1,') else "metrics.jsonl")
        assert metrics.read_text() == f"{line}\n{lines}"
    metrics.write_text(lines)
    picture = folder / "loss.png"
    picture.write_text("mine")
    refused(again, "loss.png': there is a file that is not a picture, and it stays as it is")
    assert picture.read_text() == "mine"
    picture.write_bytes(b"\x89PNG of an earlier version")
    assert main([str(one) for one in again]) == 0
    path.rename(tmp_path / "kept")
    path.symlink_to(tmp_path / "gone")
    refused(again, f"checkpoint.safetensors is a link to {tmp_path / 'gone'}, which is not there: put its file back")
    path.unlink()
    path.mkdir()
    refused(again, "checkpoint.safetensors cannot be read (Is a directory)")
    path.rmdir()
    tensors, about = checkpoint.read(tmp_path / "kept")
    about["settings"]["rotary"] = True
    checkpoint.write(path, tensors, about)
    refused(again, "has the setting 'rotary', which this version does not know: a later Twin Engine wrote it")
    about["settings"].pop("rotary")
    about["settings"]["hidden"] = "wide"
    checkpoint.write(path, tensors, about)
    refused(again, "has settings of another version: hidden='wide'; a whole number, at least 1")


def test_texts_that_are_no_files(text: Path, tmp_path: Path, refused: object) -> None:
    new = [*SMALL, "--output", tmp_path / "new"]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "empty").write_bytes(b"")
    refused(["train", "/dev/zero", *new], "/dev/zero cannot be read (it is a device).")
    refused(["train", tmp_path / "pipe", *new], "pipe cannot be read (it is a pipe).")
    refused(["train", tmp_path / "loop", *new], "loop cannot be read (Too many levels of symbolic links")
    refused(["train", tmp_path / "dangling", *new], "dangling is a link to nothing, which is not there")
    refused(["train", tmp_path / "empty", *new], "the text has 0 bytes, of which 0 are held out")
    refused(["train", "a" * 300, *new], "")
    refused(["train", text, *SMALL, "--output", text], "products.txt/.twin-train.lock was not written: ")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--rows", "1000000000000"], "rows=1000000000000; a whole number, at least 1 and at most 2147483647"),
        (["--rows", "2000000000"], "2000000000 rows of 16 bytes need more than"),
        (["--steps", "9" * 30], "steps=" + "9" * 30),
        (["--accumulate", "9" * 100], "accumulate=999"),
        (["--sequence", "2000000000"], "more than 2000000000, the sequence, must be"),
        (["--seed", "-1"], "seed=-1; 0 to 2^63 - 1 is accepted"),
        (["--rate", "nan"], "learning_rate=nan; a finite number of at least 0"),
        (["--rate", "1e40"], "learning_rate=1e+40; a finite number of at least 0 is accepted, as fp32 has it"),
        (["--clip", "-1"], "clip=-1.0; a finite number of at least 0"),
        (["--rows", "-3"], "'-3' is not a whole number of at least 1"),
    ],
)
def test_numbers_that_no_machine_has_room_for(
    option: list[str], sentence: str, text: Path, tmp_path: Path, refused: object
) -> None:
    refused(["train", text, *SMALL, *option, "--output", tmp_path / "new"], sentence)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_step_that_cannot_fit_is_refused_in_gib(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2^30 bytes: what it needs, the inputs of two layers for the most part, and what the machine has."""
    room = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (96 << 30) // 4096}
    monkeypatch.setattr(os, "sysconf", room.__getitem__)
    gpu = types.SimpleNamespace(total_memory=96 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    inputs = 2 * 2 * 64 * 128  # of a row, in 16 bits
    sizes = {"layers": 2, "sequence": 64, "hidden": 128}
    train._check_memory(Settings(rows=(95 << 30) // inputs, **sizes), torch.device(where))
    rows = (128 << 30) // inputs
    sentence = rf"^twin train: {rows} rows of 64 bytes need more than 128 GiB, and this machine has 96: fewer --rows "
    with pytest.raises(CommandError, match=sentence):
        train._check_memory(Settings(rows=rows, **sizes), torch.device(where))


def test_sizes_fit_and_wrong_settings_are_named() -> None:
    assert SIZES["1.3b"].least_bytes < 80 << 30
    for name, value in (("hidden", 0), ("heads", 0), ("layers", "two"), ("rows", 1.0), ("std", float("inf"))):
        with pytest.raises(ValueError, match=rf"^{name}={value!r}; "):
            Settings(**{name: value})


def test_a_runs_own_files_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"more")
    assert corpus.read_files([tmp_path], tmp_path / "run").data.tobytes() == b"text"


def test_what_resuming_removes_of_the_metrics_is_said(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": NaN}\n{"step": 3}\n{"st')
    assert Metrics(path, 1).removed == f"{path}: removed 2 lines of steps after 1 and half a line at its end."
    assert Metrics(path, 1).removed == ""


# --- the lock -----------------------------------------------------------------------------------------------


def hold(folder: Path, fork: bool, held: Any) -> None:
    os.setsid()
    with files.locked(folder, "lock"):
        if not fork or os.fork() == 0:
            held.set()
        time.sleep(60)


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a child that lives on"])
def test_a_lock_ends_with_its_process(fork: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    held = processes.event()
    holder = processes.started(hold, folder, fork, held)
    try:
        held.wait()
        with pytest.raises(files.Locked, match=rf"^{folder} is in use by process {holder.pid} on .+\.$"):
            files.locked(folder, "lock").__enter__()
        holder.kill()
        holder.join()
        with files.locked(folder, "lock"):
            assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")
    finally:
        os.killpg(holder.pid, signal.SIGKILL) if fork else holder.kill()
        holder.join()


def test_a_folder_in_use_is_refused_and_a_lock_leaves_nothing(text: Path, tmp_path: Path, refused: object) -> None:
    folder = tmp_path / "a" / "run"
    with files.locked(folder, ".twin-train.lock"):
        refused(["train", text, *SMALL, "--output", folder], f"is in use by process {os.getpid()} on ")
    assert not (tmp_path / "a").exists()
    with pytest.raises(files.NotWritten, match=r"was not written: "):
        files.locked(text, "lock").__enter__()
