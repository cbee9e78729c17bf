"""What is stored, under attack for `--fuzz-seconds` each: caches of kernels and compiled code, results, recordings.

Bytes flipped, files cut, swapped, removed or replaced by folders; up to four processes at once, some of them killed.
What comes out must be what came out before, or one sentence. Each test prints its seed.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from shared.file_damage import cut, fill, flip, lengthen

from optimized import measure
from optimized.commands import main
from optimized.cuda import device
from optimized.recordings import outputs, reader
from reference.support import files

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def draw() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


# --- processes -----------------------------------------------------------------------------------------------

# Imports once; then, for each number on stdin, so many forks that print what `work` gives.
SERVER = """
import os, sys, traceback
{program}
for line in sys.stdin:
    children = []
    for _ in range(int(line)):
        child = os.fork()
        if child == 0:
            try:
                answer = work()
            except BaseException:
                answer = repr(traceback.format_exc())
            os.write(1, f"{{os.getpid()}} {{answer}}\\n".encode())
            os._exit(0)
        children.append(child)
    os.write(1, f"started {{' '.join(map(str, children))}}\\n".encode())  # a line at once, among those of the children
    sys.stdin.readline()  # until then no child is waited for, and no other process has its number
    for child in children:
        os.waitpid(child, 0)
    os.write(1, b"end\\n")
"""


class Server:
    """Processes of one program that have imported already, with a cache folder of their own."""

    def __init__(self, program: str, cache: Path) -> None:
        self.cache = cache
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER.format(program=program)],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, count: int, kill: list[float] | None = None, meanwhile: Callable[[], None] | None = None) -> set[str]:
        """What `count` processes gave, `kill` of which were killed after so many seconds and may have given nothing."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        lines: list[str] = []
        while not (line := self.process.stdout.readline()).startswith("started"):
            assert line, "the server ended"
            lines.append(line)
        children = list(map(int, line.split()[1:]))
        if meanwhile is not None:
            meanwhile()
        for child, delay in zip(children, sorted(kill or []), strict=False):
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline()) != "end\n":
            assert line, "the server ended"
            lines.append(line)
        assert len(lines) >= count - len(kill or [])
        return {line.split(" ", 1)[1].strip() for line in lines}

    def close(self) -> None:
        self.process.communicate()


def swap(path: Path, draw: random.Random) -> None:
    other = draw.choice(sorted(path.parent.iterdir()))
    if other.is_file():
        path.write_bytes(other.read_bytes())


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()
    if draw.random() < 0.5:
        (path / "inside").write_bytes(b"")


def link(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(draw.choice(("nowhere", path.name, "/dev/null")))


DAMAGES = (flip, flip, cut, lengthen, fill, swap, remove, folder, link)


def attack(cache: Path, draw: random.Random) -> None:
    """One to three damages to a cache folder, of which whatever is already a folder or a link is removed first."""
    if not cache.is_dir():
        cache.unlink(missing_ok=True)
        return
    for _ in range(draw.randrange(1, 4)):
        paths = sorted(cache.iterdir())
        if paths:
            path = draw.choice(paths)
            if path.is_symlink():
                path.unlink(missing_ok=True)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):  # a process may have replaced it meanwhile
                    draw.choice(DAMAGES)(path, draw)
    if draw.random() < 0.02:
        shutil.rmtree(cache, ignore_errors=True)
        if draw.random() < 0.5 and not cache.exists():
            cache.write_bytes(b"a file")


KERNELS = """
from pathlib import Path
from optimized import compiler
compiler.nvrtc_build()
def work():
    import hashlib, os
    names = ("a", "b")
    pick = os.getpid() % 2
    return hashlib.sha256(compiler.build("f", {{"FACTOR": pick}}, root=Path({root!r})).cubin).hexdigest() + names[pick]
"""
CODE = """
import torch
import reference
from reference.ops import rotary
def work():
    sine, cosine = rotary.sine_cosine_tables(torch.linspace(0, 1000, 64))
    return hash((*sine.tolist(), *cosine.tolist()))
"""


@pytest.fixture(params=["cubin", "numba"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    root = tmp_path / "kernels"
    root.mkdir()
    (root / "f.cu").write_text('extern "C" __global__ void f(int* x) { x[threadIdx.x] *= FACTOR; }\n')
    program = KERNELS.format(root=str(root)) if request.param == "cubin" else CODE
    found = Server(program, tmp_path / "cache")
    yield found, tmp_path / "cache" / "twin-engine" / request.param
    found.close()


def test_a_cache_under_attack(server: tuple[Server, Path], draw: random.Random, seconds: float) -> None:
    processes, cache = server
    right: set[str] = set()
    while not right or len(right) < (2 if cache.name == "cubin" else 1):
        right |= processes.run(4)
    rounds = killed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        attack(cache, draw)
        count = draw.choice((1, 1, 4))
        victims = draw.choice((0, 0, 1, 3)) if count > 1 else 0
        kill = [draw.random() * draw.choice((0.01, 0.1, 1.0)) for _ in range(victims)]
        meanwhile = (lambda: attack(cache, draw)) if draw.random() < 0.3 else None
        found = processes.run(count, kill, meanwhile)
        assert found <= right, (found, rounds)
        rounds, killed = rounds + 1, killed + len(kill)
    print(f"{rounds} rounds, {killed} processes killed")
    assert rounds > seconds / 10
    if not cache.is_dir():  # an attack has put a file there
        cache.unlink(missing_ok=True)
        assert processes.run(4) <= right
    for path in cache.glob(".*.twin-tmp"):  # what the killed have left goes with the next write, an hour later
        os.utime(path, (0, 0))
    for path in cache.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not path.name.startswith("."):
            path.unlink()
    assert processes.run(4) <= right
    assert {path.suffix for path in cache.iterdir()} == {".bin"}


WRITES = """
import os, random
from pathlib import Path
from optimized import measure
origin = {{"date": "2026-01-01", "kernels": {{}}}}
def work():
    draw = random.Random(os.getpid())
    for _ in range(20):
        rows = [draw.randrange(10)] * draw.randrange(100_000)
        measure.write_result("x", {{"rows": rows, "count": len(rows), "provenance": origin}}, Path({folder!r}))
    return "written"
"""


def test_results_whose_writers_are_killed(
    tmp_path: Path, draw: random.Random, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    processes = Server(WRITES.format(folder=str(measure.RESULTS)), tmp_path)
    assert processes.run(1) == {"written"}
    end = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < end:

        def read() -> None:
            for _ in range(20):
                found = measure.read_result("x")
                assert len(found["rows"]) == found["count"], (len(found["rows"]), found["count"])
                assert len(set(found["rows"])) <= 1

        assert processes.run(4, [draw.random() / 5 for _ in range(3)], read) <= {"written"}
        read()
        rounds += 1
    processes.close()
    print(f"{rounds} rounds")
    for path in measure.RESULTS.glob(".*"):
        os.utime(path, (0, 0))
    measure.write_result("x", {"provenance": {}}, measure.RESULTS)
    assert os.listdir(measure.RESULTS) == ["x.json"]


# --- files that are read -------------------------------------------------------------------------------------


def test_damaged_results_are_tables_or_a_sentence(
    tmp_path: Path,
    draw: random.Random,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(device, "problems", lambda: ["torch sees no CUDA device."])
    results = Path(shutil.copytree(measure.RESULTS, tmp_path / "results"))
    monkeypatch.setattr(measure, "RESULTS", results)
    good = {path: path.read_bytes() for path in results.glob("*.json")}
    named = [path for path in good if main(["bench", path.stem, "--recorded"]) == 0]  # others are parts of a benchmark
    capsys.readouterr()
    counts = [0, 0, 0]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        path = draw.choice(sorted(good))
        if draw.random() < 0.5:
            draw.choice((flip, cut, lengthen, fill))(path, draw)
        else:
            path.write_text(json.dumps(changed(json.loads(good[path]), draw)))
        code = main(["bench", *([path.stem] if path in named and draw.random() < 0.5 else []), "--recorded"])
        error = capsys.readouterr().err
        assert code in (0, 2)
        assert (str(path) in error and error.count("\n") == 1) if code else not error, (path, error)
        counts[code] += 1
        path.write_bytes(good[path])
    with capsys.disabled():
        print(f"{counts[0]} tables, {counts[2]} sentences")


def changed(value: object, draw: random.Random) -> object:
    """A value of JSON with one thing in it replaced or removed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        if draw.random() < 0.3:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: changed(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        return [*value[:place], changed(value[place], draw), *value[place + 1 :]]
    return draw.choice((None, [], {}, "text", "[/b]", -1, 0, 1e300, True, [[]], {"median": None}))


@pytest.mark.parametrize("name", ["parity_h200", "linear_h200"])
def test_damaged_recordings_are_whole_or_a_sentence(
    name: str, tmp_path: Path, draw: random.Random, seconds: float
) -> None:
    path = Path(shutil.copy(reader.DATA / f"{name}.npz", tmp_path))
    content = path.read_bytes()
    good = files.arrays(path)
    counts = {"whole": 0, "sentence": 0, "other names": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        path.write_bytes(content)
        draw.choice((flip, flip, cut, lengthen))(path, draw)
        found: dict[str, np.ndarray] | None = None
        with contextlib.suppress(files.Damaged):
            found = files.arrays(path)
        if found is None:
            counts["sentence"] += 1
        else:
            for key in found.keys() & good.keys():
                assert np.array_equal(found[key], good[key])
            counts["whole" if found.keys() == good.keys() else "other names"] += 1
        if name == outputs.RECORDING:
            with contextlib.suppress(files.Damaged):
                outputs.read(tmp_path)
    print(counts)
    assert min(counts["sentence"], seconds) >= 1
