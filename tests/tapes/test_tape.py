"""Tapes over a pretended driver: what they launch again, when they become a CUDA graph, and when not."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shared.driver_stub import STREAM, Cuda, arguments

from optimized.cuda import launch
from optimized.tapes import tape as tape_module
from optimized.tapes.tape import Copy, Tape


def test_recorded_launches_keep_their_own_arguments(cuda: Cuda) -> None:
    kernel, struct = launch.function("f", "one"), np.array([41, 42], np.int32)
    outer, inner = Tape(), Tape()
    with launch.recording(outer):
        launch.launch(kernel, (3,), (32,), [np.int32(1), launch.by_value(struct)], 16, device=0)
        with launch.recording(inner):
            launch.launch(kernel, (4,), (32,), [np.int32(2), launch.by_value(struct[1:])], device=0, early=True)
    launch.launch(kernel, (5,), (32,), [np.int32(3), launch.by_value(struct)], device=0)
    assert [len(one._entries) for one in (outer, inner)] == [1, 1]
    cuda.calls.clear()
    outer.play(0)
    (again,) = cuda.of("launch")
    assert again[:10] == ("launch", 1001, 3, 1, 1, 32, 1, 1, 16, STREAM)
    assert arguments(again[10], ctypes.c_int32, ctypes.c_int32) == [1, 41]
    inner.play(0)
    assert cuda.calls[-1][1] == ((4, 1, 1, 32, 1, 1), 0, STREAM, 1, 6, 1)
    assert arguments(cuda.calls[-1][3], ctypes.c_int32, ctypes.c_int32) == [2, 42]


def test_a_copy_is_made_on_the_stream(cuda: Cuda) -> None:
    copy = Copy(1 << 20, 1 << 21, 4096)
    assert copy.capturable
    copy.play(77)
    assert cuda.calls == [("copy", 1 << 20, 1 << 21, 4096, 3, 77)]


class Entry:
    """Something to be made again."""

    def __init__(self, cuda: Cuda, capturable: bool = True) -> None:
        self.cuda, self.capturable = cuda, capturable

    def play(self, stream: int) -> None:
        self.cuda.calls.append(("again", stream))


@pytest.fixture
def capture(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Streams that capture."""

    class Stream:
        ptr = 0xCA9

        def __init__(self, non_blocking: bool) -> None:
            cuda.calls.append(("new stream", non_blocking))

        def begin_capture(self, mode: int) -> None:
            cuda.calls.append(("begin", mode))

        def end_capture(self) -> Any:
            cuda.calls.append(("end",))
            return SimpleNamespace(graphExec="graph")

    @contextlib.contextmanager
    def within(kind: str, *about: Any) -> Iterator[None]:
        cuda.calls.append((kind, *about))
        yield
        cuda.calls.append((f"{kind} over",))

    sys.modules["cupy.cuda"].Stream = Stream  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: ("stream", pointer, device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within("current", stream))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: f"pool {len(tape_module._pools)}", raising=False)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: within("memory", pool, device), raising=False)
    return cuda


def test_the_third_time_they_become_a_graph(capture: Cuda) -> None:
    tape = Tape()
    for _ in range(3):
        tape.append(Entry(capture))
    for _ in range(2):
        tape.play(0)
        assert capture.of("again")[-3:] == [("again", STREAM)] * 3
        assert not capture.of("graph", "begin")
    tape_module._retired.append("old graph")
    capture.calls.clear()
    tape.play(0)
    assert capture.calls == [
        ("device", 0),
        ("new stream", True),
        ("current", ("stream", 0xCA9, 0)),
        ("memory", "pool 0", 0),
        ("begin", 2),
        *[("again", 0xCA9)] * 3,
        ("end",),
        ("memory over",),
        ("current over",),
        ("graph", "graph", STREAM),
    ]
    assert tape_module._retired == []
    capture.calls.clear()
    tape.play(0)
    assert capture.calls == [("device", 0), ("graph", "graph", STREAM)]
    # It belongs to its stream, and no capture of another's can hold it.
    capture.calls.clear()
    capture.capturing = True
    tape.play(0)
    assert not capture.of("graph")
    capture.capturing = False
    tape._stream += 1
    tape.play(0)
    assert capture.of("again") == [("again", STREAM)] * 6
    assert not capture.of("graph")
    # Where it may be destroyed, it is.
    del tape
    gc.collect()
    (retired,) = tape_module._retired
    assert retired.graphExec == "graph"


def test_what_never_becomes_a_graph(capture: Cuda) -> None:
    two, foreign = Tape(), Tape()
    for _ in range(2):
        two.append(Entry(capture))
    for capturable in (True, False, True):
        foreign.append(Entry(capture, capturable))
    for _ in range(6):
        two.play(0)
        foreign.play(0)
    capture.capturing = True
    captured = Tape()
    for _ in range(3):
        captured.append(Entry(capture))
    for _ in range(6):
        captured.play(0)
    assert not capture.of("graph", "begin")
    assert len(capture.of("again")) == 6 * (2 + 3 + 3)
    del two
    gc.collect()
    assert tape_module._retired == []


def test_launches_on_another_device(capture: Cuda) -> None:
    tape = Tape()
    for _ in range(5):
        tape.append(Entry(capture))
    for _ in range(3):
        tape.play(1)
    assert len(capture.of("again")) == 3 * 5
    assert capture.of("device") == [("device", 1), ("device", 0)] * 3
    assert capture.of("attach") == [("attach", 1)]
    assert capture.of("current") == [("current", ("stream", 0xCA9, 1))]
    assert capture.of("graph") == [("graph", "graph", STREAM + 1)]


def test_a_capture_that_fails_ends(capture: Cuda) -> None:
    class Fails(Entry):
        def play(self, stream: int) -> None:
            if stream == 0xCA9:
                raise RuntimeError("no")

    tape = Tape()
    for _ in range(3):
        tape.append(Fails(capture))
    tape.play(0)
    tape.play(0)
    with pytest.raises(RuntimeError, match="no"):
        tape.play(0)
    assert capture.of("begin", "end") == [("begin", 2), ("end",)]
    assert tape._graph is None


def test_graphs_of_a_stream_share_their_memory(capture: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for device, stream in ((0, 1), (0, 1), (0, 2), (1, 1)):
        with tape_module._memory(device, stream):
            pass
    pools = [call[1:] for call in capture.of("memory")]
    assert pools == [("pool 0", 0), ("pool 0", 0), ("pool 1", 0), ("pool 2", 1)]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with tape_module._memory(0, 3):
        pass
    assert len(capture.of("memory")) == 4
    assert len(tape_module._pools) == 3
