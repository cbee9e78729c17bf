"""reference.support.files: whole files or none, whatever interrupts; sentences about those that are damaged."""

import itertools
import json
import os
import random
import re
import resource
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared import processes

from reference.support import files

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reference.support.notice._said", set())


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "page.html"
    files.write(path, "Σ\n")
    assert path.read_text("utf-8") == "Σ\n"
    with files.replacing(path) as file:
        file.write(b"two")
        assert path.read_text("utf-8") == "Σ\n"
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["page.html"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_meanwhile_leaves_the_file_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "page.html"
    path.write_text("one")

    def fail() -> None:
        with files.replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["page.html"]


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "page.html", tmp_path / "link"
    before = os.umask(0o027)
    try:
        files.write(path, "one")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(before)
    path.chmod(0o755)
    link.symlink_to(path.name)
    files.write(link, "two")
    assert link.is_symlink()
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(files.NotWritten, match=rf"^{tmp_path} was not written: it is there, and it is not a file\.$"):
        files.write(tmp_path, "one")
    with pytest.raises(files.NotWritten, match=r"^/dev/null was not written: it is there, and it is not a file\.$"):
        files.write(Path("/dev/null"), "one")
    (tmp_path / "file").write_text("")
    with pytest.raises(files.NotWritten, match=r"file/x was not written: (Not a directory|File exists)\.$"):
        files.write(tmp_path / "file" / "x", "one")


def write_with_a_limit(path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    files.write(path, bytes(90_000))
    try:
        files.write(path, bytes(1_000_000))
    except files.NotWritten as error:
        path.with_name("said").write_text(str(error))


def test_a_full_disk_is_a_sentence_and_the_file_stays(tmp_path: Path) -> None:
    """A limit on the size of files, which the system keeps where a full disk would say the same."""
    path = tmp_path / "page.html"
    path.write_text("one")
    process = processes.started(write_with_a_limit, path)
    process.join()
    assert (tmp_path / "said").read_text() == f"{path} was not written: File too large."
    (tmp_path / "said").unlink()
    assert path.stat().st_size == 90_000
    assert os.listdir(tmp_path) == ["page.html"]


def write_for_ever(path: Path, started: Any) -> None:
    started.set()
    for turn in itertools.count():
        files.write(path, bytes([turn % 256]) * 300_000)


def writer(path: Path) -> Any:
    """A process that has begun to write."""
    started = processes.event()
    process = processes.started(write_for_ever, path, started)
    started.wait()
    return process


def is_whole(content: bytes) -> bool:
    return len(content) == 300_000 and len(set(content)) == 1


def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    draw = random.Random(1)
    for _ in range(3):
        process = writer(path)
        time.sleep(0.05 + 0.2 * draw.random())
        process.kill()
        process.join()
        assert is_whole(path.read_bytes())
    for left in tmp_path.glob(".*"):
        os.utime(left, (0, 0))
    files.write(path, "one")
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.slow
def test_processes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    processes = [writer(path) for _ in range(4)]
    while not path.exists():
        time.sleep(0.01)
    assert all(is_whole(path.read_bytes()) for _ in range(200))
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("folder", ["reference", "optimized", "tests/golden", "tests/tools/gpu_suite.py", "notebooks"])
def test_nothing_is_written_past_it(folder: str) -> None:
    """Every write goes through this module: into its buffers at most."""
    writes = re.compile(
        r"\.write_(text|bytes)\(|\.tofile\(|torch\.save\((?!.*, file\))|open\([^)]*[\"'][wxa]b?\+?[\"']"
        r"|(savez|savez_compressed|np\.save|savefig)\((?!\s*(file|out)\b)|\bopen\(\"[wxa]"
    )
    paths = [ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = {
        str(path.relative_to(ROOT))
        for path in paths
        if writes.search(path.read_text("utf-8")) and path.name != "files.py"
    }
    assert found == set()
    assert writes.search((ROOT / "reference" / "support" / "files.py").read_text("utf-8"))


def test_a_damaged_record_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "gemm.json"
    with pytest.raises(FileNotFoundError):
        files.record(path)
    path.write_text(json.dumps({"rows": [1]}))
    assert files.record(path) == {"rows": [1]}
    for content in (b"", b'{"rows": [1', b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(files.Damaged, match=rf"^{path} is damaged \(.*\): get it anew\.$"):
            files.record(path, ": get it anew")
    path.write_text("[]")
    with pytest.raises(files.Damaged, match=rf"^{path} is damaged: it holds a list in place of an object\.$"):
        files.record(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(files.Damaged, match=rf"^{path} cannot be read \(Is a directory\)\.$"):
        files.record(path)


def test_damaged_arrays_are_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "words.npz"
    words = np.arange(1000, dtype=np.uint32)
    with files.replacing(path) as file:
        np.savez_compressed(file, words=words, about=np.array("{}"))
    content = path.read_bytes()
    found = files.arrays(path)
    assert np.array_equal(found["words"], words)
    assert str(found["about"]) == "{}"
    middle = len(content) // 2
    for damaged in (
        b"",
        b"text",
        content[:middle],
        content[middle:],
        content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
    ):
        path.write_bytes(damaged)
        with pytest.raises(files.Damaged, match=rf"^{path} is damaged \((.|\n)*\): get it anew\.$"):
            files.arrays(path, ": get it anew")


def test_the_cache_keeps_what_it_was_given_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.kept("kind", "name") is None
    assert files.keep("kind", "name", b"content")
    assert files.kept("kind", "name") == b"content"
    assert caplog.messages == []
    path = tmp_path / "twin-engine" / "kind" / "name"
    whole = path.read_bytes()
    for name, content in (("name", whole + b"!"), ("name", whole[:-1]), ("name", b""), ("another", whole)):
        caplog.clear()
        monkeypatch.setattr("reference.support.notice._said", set())
        path.with_name(name).write_bytes(content)
        assert files.kept("kind", name) is None
        assert caplog.messages == [f"{path.with_name(name)} is damaged: it is compiled anew (said once)."]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the XDG specification tells to pass over
    assert files.cache_folder("kind") == Path.home() / ".cache" / "twin-engine" / "kind"


@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("save", "count"), [(np.savez_compressed, 20), (np.savez, 20), (np.savez, 5000)])
def test_a_flipped_bit_in_arrays_is_damage_or_changes_nothing(
    save: Any, count: int, every: int, tmp_path: Path
) -> None:
    """All bits, or some of every part; what changes nothing are dates, attributes and the like of the zip format."""
    path = tmp_path / "a.npz"
    with files.replacing(path) as file:
        save(file, words=np.arange(count, dtype=np.uint32), about=np.array("{}"))
    good, want = path.read_bytes(), files.arrays(path)
    for at in range(0, 8 * min(len(good), 1000), every):
        bent = bytearray(good)
        bent[at // 8] ^= 1 << at % 8
        path.write_bytes(bent)
        try:
            found = files.arrays(path)
        except files.Damaged:
            continue
        assert found.keys() == want.keys(), at
        assert all(np.array_equal(found[name], want[name]) for name in want), at
