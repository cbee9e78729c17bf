"""How `optimized.measure` times, over pretended events, and what `optimized.cuda.device` says of pretended GPUs."""

import contextlib
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared.bits import sources
from shared.dry_gpu import DryGpu

from optimized import measure
from optimized.cuda import compiler, device
from reference.support import files


class Clock:
    """The GPU's: variants and flushes take time, events note it; `log` is what happened."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.late = 0  # how often the GPU wakes before the host is done

    def work(self, name: str, duration: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += duration

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.enable_timing = enable_timing

        def record(self) -> None:
            self.time = made.now
            made.log.append("event" if self.enable_timing else "awake")

        def query(self) -> bool:
            made.late -= 1
            return made.late >= 0

        def elapsed_time(self, end: Any) -> float:
            assert self.enable_timing
            assert end.enable_timing
            return end.time - self.time

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.log.append(f"sleep {cycles}"), raising=False)
    return made


def test_rounds_have_every_name_in_orders_drawn_alike_each_time() -> None:
    found = list(measure.rounds("abcd", 20))
    assert found == list(measure.rounds("abcd", 20))
    assert all(sorted(order) == list("abcd") for order in found)
    assert len({tuple(order) for order in found}) > 10
    # What has been measured was measured in these orders.
    draw, order = random.Random(0), list("abcd")
    draw.shuffle(order)
    assert found[0] == order
    assert list(measure.rounds("abcd", 0)) == []


def test_each_sample_is_between_its_events(clock: Clock) -> None:
    variants = {"a": clock.work("a", 3.0), "b": clock.work("b", 5.0)}
    times = measure.interleave(variants, repeats=4, warmup=2, flush=clock.work("flush", 100.0))
    assert times == {"a": [3.0] * 4, "b": [5.0] * 4}
    expected = ["a", "b", "a", "b", "synchronize"]
    for order in measure.rounds("ab", 4):
        for name in order:
            expected += ["flush", "event", name, "event"]
    assert clock.log == [*expected, "synchronize"]


def test_without_a_flush_and_by_default(clock: Clock) -> None:
    times = measure.interleave({"a": clock.work("a", 2.0)})
    assert times == {"a": [2.0] * 50}
    assert clock.log == ["a"] * 5 + ["synchronize"] + ["event", "a", "event"] * 50 + ["synchronize"]


def test_the_gpu_sleeps_until_all_is_queued(clock: Clock) -> None:
    clock.late = 2
    times = measure.interleave({"a": clock.work("a", 2.0)}, repeats=1, warmup=0, ahead=True)
    assert times == {"a": [2.0]}
    sample = ["awake", "event", "a", "event"]
    assert clock.log == [
        *("synchronize", f"sleep {1 << 22}", *sample),
        *("synchronize", f"sleep {1 << 23}", *sample),
        *("synchronize", f"sleep {1 << 24}", *sample),
        "synchronize",
    ]


def test_a_host_that_never_catches_up_is_told(clock: Clock) -> None:
    clock.late = 100
    with pytest.raises(RuntimeError, match=rf"repeats=3: the host is behind a GPU that sleeps for {1 << 28} cycles"):
        measure.interleave({"a": clock.work("a", 2.0)}, repeats=3, ahead=True)
    slept = [entry for entry in clock.log if entry.startswith("sleep")]
    assert slept == [f"sleep {1 << n}" for n in range(22, 29)]


def test_calls_become_one_graph(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> None:
            clock.log.append("replay")

    @contextlib.contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        clock.log.append("capture")
        yield
        clock.log.append("captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)

    def call(i: int) -> None:
        clock.log.append(f"call {i}")

    replay = measure.graph(call, 3)
    expected = ["call 0", "synchronize", "capture", "call 0", "call 1", "call 2", "captured"]
    assert clock.log == expected
    assert replay() is call
    assert clock.log == [*expected, "replay"]


@pytest.mark.parametrize(
    ("size", "calls", "buffers"), [(1 << 28, 9, 2), (1 << 20, 9, 9), (1 << 30, 9, 1), (3 << 27, 9, 2)]
)
def test_copies_walk_over_more_than_l2(size: int, calls: int, buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[Callable[[int], Any], int]] = []
    monkeypatch.setattr(measure, "graph", lambda call, calls: captured.append((call, calls)))
    with DryGpu() as gpu:
        measure.copy_of(size, calls)
        ((call, number),) = captured
        assert number == calls
        gpu.lines.clear()
        made = [call(i) for i in range(calls)]
        lines = gpu.taken()
        assert len({gpu.address(x) for x in made}) == buffers
        assert gpu.address(made[0]) == gpu.address(made[buffers]) if buffers < calls else True
    # A copy reads and writes `size` bytes together, from the first row of two to the second.
    assert all(x.shape == (size // 4,) and x.dtype == torch.bfloat16 for x in made)
    assert lines[0].startswith(f"copy_(bf16[{size // 4}]&0+{size // 2}, bf16[{size // 4}]&0)")


def test_a_flush_reads_more_than_l2() -> None:
    with DryGpu() as gpu:
        flush, small = measure.Flush(), measure.Flush(1 << 10)
        gpu.lines.clear()
        flush()
        (line,) = gpu.taken()
        assert line.startswith(f"amax(int32[{1 << 26}]&0")
        assert small.buffer.nbytes == 1 << 10


def test_spread_of_two_samples() -> None:
    assert measure.summary([1.0, 2.0]) == {"median": 1.5, "p10": 1.1, "p90": 1.9}
    # 5 samples cannot enclose the median with 0.95, 6 can, with 1 - 2 / 64; 0.9 takes fewer.
    assert measure.interval([float(i) for i in range(6)]) == {"median": 2.5, "low": 0.0, "high": 5.0}
    eight = [float(i) for i in range(8)]
    assert measure.interval(eight) == {"median": 3.5, "low": 0.0, "high": 7.0}
    assert measure.interval(eight, 0.9) == {"median": 3.5, "low": 1.0, "high": 6.0}
    nine = [float(i) for i in range(9)]
    assert measure.interval(nine) == {"median": 4.0, "low": 1.0, "high": 7.0}
    assert measure.interval([4.0]) == {"median": 4.0, "low": 4.0, "high": 4.0}
    # Exactly as much as is asked for is enough.
    assert measure.interval(eight, 1 - 2 * 9 / 256) == {"median": 3.5, "low": 1.0, "high": 6.0}


def test_what_a_command_says_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(command: tuple[str, ...], **options: Any) -> Any:
        asked.append((command, options))
        if command[0] == "missing":
            raise FileNotFoundError(command[0])
        if command[0] == "fails":
            raise subprocess.CalledProcessError(1, command)
        if command[0] == "hangs":
            raise subprocess.TimeoutExpired(command, 20)
        return SimpleNamespace(stdout=" 580.1, 1980 MHz, 3201 MHz, 1980 MHz, 700 W, 700 W, 40\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert [measure._output(name) for name in ("missing", "fails", "hangs")] == [None] * 3
    found = measure.clocks(3)
    assert found == {
        **{"driver_version": "580.1", "clocks.sm": "1980 MHz", "clocks.mem": "3201 MHz", "clocks.max.sm": "1980 MHz"},
        **{"power.draw": "700 W", "power.limit": "700 W", "temperature.gpu": "40"},
    }
    command, options = asked[-1]
    assert command[0] == "nvidia-smi"
    assert command[2:] == ("--format=csv,noheader", "--id=3")
    measure.clocks()
    assert asked[-1][0][-1] == "--id=0"
    # It fails where the command does, and cannot hang.
    assert options == {"capture_output": True, "text": True, "timeout": 20, "cwd": measure.ROOT, "check": True}
    monkeypatch.setattr(measure, "_output", lambda *command: None)
    assert measure.clocks() is None
    assert measure.version("no-such-package-anywhere") is None
    assert measure.version("torch") is not None


def test_provenance_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(
        name="H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=60 << 20, total_memory=141 << 30
    )
    outputs: dict[str, str | None] = {"rev-parse": "abc", "status": ""}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: about}.__getitem__)
    monkeypatch.setattr(measure, "_output", lambda *command: outputs.get(command[1]))
    found = measure.provenance(["cast"])
    assert found["gpu"] == {
        **{"name": "H200", "capability": "9.0", "processors": 132, "l2_bytes": 60 << 20, "memory_bytes": 141 << 30}
    }
    assert (found["commit"], found["commit_is_clean"]) == ("abc", True)
    outputs["status"] = " M optimized/cuda/launch.py"
    assert measure.provenance([])["commit_is_clean"] is False
    outputs["rev-parse"] = None
    assert measure.provenance([])["commit_is_clean"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure.provenance([])["gpu"] is None


def test_a_result_that_is_none_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    with pytest.raises(files.Damaged, match=r"x\.json is not there: this result has not been recorded"):
        measure.read_result("x")
    whole: dict[str, Any] = {"kernels": {}, "date": "2026"}
    for origin in (None, [], {}, {"kernels": {}}, {"date": "2026"}, {**whole, "kernels": []}, {**whole, "date": 3}):
        (tmp_path / "x.json").write_text(json.dumps({"provenance": origin}))
        with pytest.raises(files.Damaged, match="does not say when and of what it was measured"):
            measure.read_result("x")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(files.Damaged, match="git checkout -- docs/results"):
        measure.read_result("x")
    path = measure.write_result("x", {"rows": [1], "provenance": whole, "a": 2}, tmp_path)
    assert path == tmp_path / "x.json"
    assert measure.read_result("x") == {"rows": [1], "provenance": whole, "a": 2}
    assert path.read_text().startswith('{\n "rows": [\n  1\n ],\n "provenance"')  # in its order, an indent of one
    assert path.read_text().endswith("\n}\n")


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def save(file: Any, **options: Any) -> None:
        asked.append(options)
        file.write(b"png")

    measure.write_plot(tmp_path / "x.png", SimpleNamespace(savefig=save))
    assert (tmp_path / "x.png").read_bytes() == b"png"
    assert asked == [{"format": "png", "dpi": 110, "metadata": None}]


def test_hashes_of_sources_are_short() -> None:
    found = sources()
    assert {len(digest) for digest in found.values()} == {16}
    assert {Path(path).suffix for path in found} == {".py", ".cu", ".cuh", ".npz"}
    assert {Path(path).parts[0] for path in found} == {"reference", "optimized", "tests"}


# --- what a machine has -----------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, int]]]]:
    """Names and capabilities."""
    found: list[tuple[str, tuple[int, int]]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: found[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index][1])
    device.check.cache_clear()
    yield found
    device.check.cache_clear()


def test_every_gpu_is_judged(gpus: list[tuple[str, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "check_cupy", lambda: None)
    monkeypatch.setattr(compiler, "nvrtc_library", lambda: None)
    (problem,) = device.problems()
    assert problem.startswith("torch sees no CUDA device; Twin Engine's kernels need a Hopper GPU")
    gpus += [("H200", (9, 0)), ("A100", (8, 0)), ("GH200", (9, 0)), ("B200", (10, 0))]
    device.check.cache_clear()
    assert [problem.split(" has ")[0] for problem in device.problems()] == ["the GPU 'A100'", "the GPU 'B200'"]
    device.check(0)
    device.check(2)
    with pytest.raises(device.UnsupportedDevice, match=r"compute capability 10\.0.*need 9\.0"):
        device.check(3)

    def missing() -> None:
        raise device.MissingDependency("there is no CuPy.")

    monkeypatch.setattr(device, "check_cupy", missing)
    assert device.problems()[0] == "there is no CuPy."
    assert len(device.problems()) == 3


@pytest.mark.parametrize("capability", [(9, 1), (8, 9), (90, 0), (0, 9)])
def test_only_9_0_is_hopper(capability: tuple[int, int]) -> None:
    with pytest.raises(device.UnsupportedDevice):
        device.check_capability("X", capability)
    device.check_capability("X", [9, 0])  # type: ignore[arg-type]


def test_cupy_that_is_there_is_accepted() -> None:
    device.check_cupy(lambda name: name == "cupy" or None)
