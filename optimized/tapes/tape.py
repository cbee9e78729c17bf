"""A tape of launches that are made again in order: one by one at first, then as one CUDA graph."""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from optimized.cuda import launch
from reference.support import groups

_WORTH_A_GRAPH = 3  # launches
_retired: list[Any] = []  # graphs to destroy once no stream captures, because a capture does not permit it
# By device and stream. The graphs of a stream run one after the other, and what torch's ops allocate in a graph is free
# when it ends: so all of them share this memory.
_pools: dict[tuple[int, int], torch.cuda.MemPool] = {}
_capturing = threading.RLock()  # one capture at a time: captures share a stream and its memory


class Playable(Protocol):
    """What can be done again: a launch (`launch.Launch`), a copy, an op of PyTorch (`tapes.tape_recorder`)."""

    @property
    def capturable(self) -> bool:
        """Whether it may become part of a CUDA graph that is not torch's."""

    def play(self, stream: int) -> None:
        """Do it again on torch's current stream, which is `stream`."""


class Movable(Playable, Protocol):
    """All of these but launches, whose arguments a tape moves together (`tapes.relocation`)."""

    def moved(self, move: Callable[[int], int]) -> "Movable":
        """The same at other addresses; `move` gives an address its other one."""


class Copy:
    """A copy from address to address on the device."""

    __slots__ = ("_arguments",)
    capturable = True

    def __init__(self, to: int, source: int, size: int) -> None:
        self._arguments = (to, source, size)

    def moved(self, move: Callable[[int], int]) -> "Copy":
        to, source, size = self._arguments
        return Copy(move(to), move(source), size)

    def play(self, stream: int) -> None:
        """Copy on the current device."""
        runtime = launch.runtime()
        runtime.memcpyAsync(*self._arguments, runtime.memcpyDeviceToDevice, stream)


class Tape:
    """A tape: launches, copies and ops in order. From the third time on, one CUDA graph makes all of them."""

    def __init__(self) -> None:
        self._entries: list[Playable] = []
        self._capturable = True
        self._times = 0
        self._graph: Any = None  # CuPy's
        self._stream = 0  # the stream on which the graph may run

    def __del__(self) -> None:
        if self._graph is not None:
            _retired.append(self._graph)

    @property
    def entries(self) -> Sequence[Any]:
        """What is made again, in its order."""
        return self._entries

    def append(self, entry: Playable) -> None:
        """Add one."""
        self._entries.append(entry)
        self._capturable = self._capturable and entry.capturable

    def play(self, device: int) -> None:
        """Make them again on torch's current stream of a device. After an error the tape may be played again."""
        previous = torch._C._cuda_exchangeDevice(device)
        try:
            stream = launch.current_stream(device)
            few = len(self._entries) < _WORTH_A_GRAPH or self._times < 2
            if (
                few
                or not self._capturable
                or torch._C._cuda_isCurrentStreamCapturing()
                or (self._graph and self._stream != stream)
            ):
                for one in self._entries:
                    one.play(stream)
                self._times += 1
                return
            if self._graph is None:
                self._graph, self._stream = self._captured(device, stream), stream
            launch.runtime().graphLaunch(self._graph.graphExec, stream)
        except BaseException:
            groups.abandon()  # what a sum over ranks had begun to send and receive
            raise
        finally:
            if previous != device:
                torch._C._cuda_exchangeDevice(previous)

    def _captured(self, device: int, stream: int) -> Any:
        """Capture the graph, but not by torch's own capture: it would keep every thread from torch's generator."""
        _retired.clear()
        capturing = _capturing_stream(device)
        current = torch.cuda.ExternalStream(capturing.ptr, device)
        with _capturing, torch.cuda.stream(current), _memory(device, stream):
            capturing.begin_capture(launch.runtime().streamCaptureModeRelaxed)
            try:
                for one in self._entries:
                    one.play(capturing.ptr)
            finally:
                graph = capturing.end_capture()
        return graph


def _memory(device: int, stream: int) -> contextlib.AbstractContextManager[None]:
    """Where torch's ops allocate in a capture for that stream. With cudaMallocAsync they allocate in the graph."""
    if torch.cuda.get_allocator_backend() != "native":
        return contextlib.nullcontext()
    if (device, stream) not in _pools:
        _pools[device, stream] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(_pools[device, stream], device)


@functools.cache
def _capturing_stream(device: int) -> Any:
    """The stream for captures on the current device; it is none of the streams that torch hands out in turn."""
    from cupy.cuda import Stream

    return Stream(non_blocking=True)
