"""Dropout's seeds in CUDA graphs: eager steps, captures and replays read one stream, torch's CPU generator.

    eager       Generator.draw: seed from the CPU generator;     a launch:              state = (seed, 0)
    capture     Generator.draw: a slot beside the graph;         a launch, captured:    state = (slot, 0)
    replay      all slots' seeds, in the order of the capture;   one copy, the graph

A capture takes nothing from the stream, and each replay takes what the captured step would take in eager mode at that
time: a graph that is captured after three steps has the masks of the fourth in its first replay. Forks of a
`CudaRNGStatesTracker` inside a capture are entered at each replay for the draws that stand in them. PyTorch's own CUDA
generator works like that: a replay writes its seed and offset where the graph reads them, and advances it.

`torch.cuda.CUDAGraph` is followed by its Python methods, so this holds for every graph that begins, ends and replays
by them. A graph that others capture or replay (CuPy, a raw `cudaGraphExec_t`) draws nothing: its layers go on from
their states, with new offsets (`reference.random`).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from reference.numbers import philox

Fork = Callable[[], contextlib.AbstractContextManager[Any]]

BLOCK = 64  # slots that are allocated together


class Draws:
    """What the replays of one graph draw.

    Attributes:
        steps: in the order of the capture, a number of draws, or a fork and the steps inside of it.
        blocks: int64 [BLOCK] each; a slot for each draw.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.steps: list[Any] = []
        self.blocks: list[torch.Tensor] = []
        self.count = 0
        self._innermost = self.steps

    def slot(self, device: torch.device) -> torch.Tensor:
        """int64 []: where each replay puts this draw's seed."""
        position = self.count % BLOCK
        if position == 0:
            # Not from the graph's own memory: what runs before this draw may use the same place there, and so overwrite
            # the seeds of a replay. Another stream's memory is not the graph's.
            outside = torch.cuda.default_stream(device) if device.type == "cuda" else None
            # Tensors of inference mode cannot be written outside of it.
            with torch.inference_mode(False), torch.cuda.stream(outside):
                self.blocks.append(torch.empty(BLOCK, dtype=torch.int64, device=device))
        steps = self._innermost
        steps.append(steps.pop() + 1 if steps and isinstance(steps[-1], int) else 1)
        self.count += 1
        return self.blocks[-1][position]

    @contextlib.contextmanager
    def forked(self, fork: Fork) -> Iterator[None]:
        """Each replay enters `fork()` for the draws that are captured inside."""
        outer, self._innermost = self._innermost, []
        try:
            yield
        finally:
            if self._innermost:
                outer.append((fork, self._innermost))
            self._innermost = outer

    def renew(self) -> None:
        """Draw the seeds of the next replay; the host waits for no copy."""
        pinned = self.blocks[0].is_cuda
        seeds = torch.empty(len(self.blocks), BLOCK, dtype=torch.int64, device="cpu", pin_memory=pinned)
        _draw(self.steps, seeds.view(-1))
        with torch.no_grad():
            for block, row in zip(self.blocks, seeds, strict=True):
                block.copy_(row, non_blocking=True)
                if pinned:  # nobody may have its memory before the replay has read it
                    block.record_stream(torch.cuda.current_stream(block.device))


def _draw(steps: list[Any], out: torch.Tensor) -> torch.Tensor:
    """Fill the beginning of `out`, int64 [n], with the seeds of `steps`; the rest of it."""
    for step in steps:
        if isinstance(step, int):
            philox.draw_seeds(out[:step])
            out = out[step:]
        else:
            fork, inside = step
            with fork():
                out = _draw(inside, out)
    return out


_open: list[Draws] = []  # of captures that have begun and not ended
_followed: "list[Begun]" = []
_watch: list[Callable[[], None]] = []  # called before each replay


def capturing(device: torch.device | None = None) -> bool:
    """Whether the current stream of a GPU (of `device`, if that is one) is captured, by whomever."""
    on_gpu = torch.cuda.is_initialized() if device is None else device.type == "cuda"
    return on_gpu and torch.cuda.is_current_stream_capturing()


def refuse(name: str) -> None:
    """Raise RuntimeError during a capture, for a function that reads or writes random states on the host."""
    if capturing():
        raise RuntimeError(
            f"{name}: a CUDA graph is being captured, in which random states can be neither read nor written; a call "
            f"before or after the capture is accepted."
        )


def present() -> Draws | None:
    """The draws of the graph that is captured here, if one is that can replay them."""
    if not _open or not capturing():
        return None
    own = [draws for draws in _open if draws.thread == threading.get_ident()]
    return (own or _open)[-1]  # autograd's threads have none of their own


class Begun:
    """Graphs, in the order in which their captures begin; `before` and `after` get each one's number, outside of it."""

    def __init__(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        self.graphs: list[Any] = []
        self.before, self.after = before, after

    def ended(self, graph: Any) -> None:
        """Call `after`, if it is one of these."""
        for number, one in enumerate(self.graphs):
            if one is graph:
                self.after(number)


@contextlib.contextmanager
def begun(before: Callable[[int], None], after: Callable[[int], None]) -> Iterator[list[Any]]:
    """A list of the graphs whose capture begins inside; see `Begun`."""
    found = Begun(before, after)
    _followed.append(found)
    try:
        yield found.graphs
    finally:
        _followed[:] = [one for one in _followed if one is not found]


@contextlib.contextmanager
def watched(watch: Callable[[], None]) -> Iterator[None]:
    """Inside, each replay calls `watch` first."""
    _watch.append(watch)
    try:
        yield
    finally:
        _watch[:] = [one for one in _watch if one is not watch]


def follow(graph: Any) -> None:
    """Let the graphs of a class with the methods of `torch.cuda.CUDAGraph` draw at their replays."""
    begin, end, replay, reset = graph.capture_begin, graph.capture_end, graph.replay, graph.reset

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        for found in _followed:
            found.before(len(found.graphs))
        begin(self, *args, **kwargs)
        self.twin_draws = Draws()
        _open.append(self.twin_draws)
        for found in _followed:
            found.graphs.append(self)

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        draws = self.__dict__.get("twin_draws")
        try:
            end(self)
        finally:
            _open[:] = [one for one in _open if one is not draws]
            if draws is not None and draws.count == 0:
                del self.twin_draws
        for found in _followed:
            found.ended(self)

    @functools.wraps(replay)
    def replay_with_draws(self: Any) -> None:
        for watch in _watch:
            watch()
        draws = self.__dict__.get("twin_draws")
        if draws is not None:
            draws.renew()
        replay(self)

    @functools.wraps(reset)
    def reset_with_draws(self: Any) -> None:
        self.__dict__.pop("twin_draws", None)
        reset(self)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end
    graph.replay, graph.reset = replay_with_draws, reset_with_draws


follow(torch.cuda.CUDAGraph)
