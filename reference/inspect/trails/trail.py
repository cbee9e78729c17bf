"""`te.trail`: one line a step with digests of the gradients, the parameters and the FP8 state."""

import os
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch

from reference.arguments import is_int
from reference.inspect.trails import file
from reference.inspect.trails.state import check
from reference.inspect.trails.state_again import StateAgain
from reference.inspect.trails.sums import sums
from reference.support import files
from reference.support.notice import say_once

KINDS = ("gradients", "parameters", "buffers", "fp8")
_WAITING = 4  # lines whose digests are still on their way to the host


class _Step(NamedTuple):
    """The digests of a step: tensors on the host, which are there when `events` have happened."""

    number: int
    tensors: tuple[file.Named, ...]
    order: list[int]
    digests: list[torch.Tensor]
    events: list[Any]

    def done(self) -> bool:
        return all(event.query() for event in self.events)


def trail(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    every: int = 1,
    *,
    start: int | None = None,
) -> "TrailWriter":
    """Add a line with digests to a file after each step of an optimizer, of any model and any training loop.

        with te.trail("run.trail", model, optimizer):
            train(model, optimizer)

    `twin diff a.trail b.trail` then names the first step and tensor in which two runs differ (docs/two_runs.md).

    A line has 24 bytes, 32 characters, for each gradient, parameter, buffer and tensor of FP8 state, as the optimizer's
    step leaves them. Without an optimizer, `step()` of what is returned adds a line. What one changed word is, and how
    sure a digest is: `reference.inspect.trails.sums`. In a distributed run each process writes its own file:
    "run.trail" becomes "run.rank0.trail".

    The file is added to, never written again: a run that goes on goes on in it. The half line of a process that was
    killed is cut off, with a notice.

    Cost: on a Hopper GPU, if `optimized` has been imported, a kernel reads each word once, 1,024 tensors a launch.
    Elsewhere each word is read twice, by two of torch's ops for each tensor of 4 MiB or more; smaller ones are copied
    side by side, and two ops read 64 MiB of them. That takes up to 200 MiB and a tenth of the tensors' bytes. Tensors
    that are not contiguous are copied in either case. A line is copied to the host, for which nobody waits: it is
    written up to four lines later, or at the end. Names are made once and again where a model has changed.

    Args:
        path: of the file.
        model: contains the parameters.
        optimizer: a line is added after each `every`-th step of it.
        every: an int of at least 1.
        start: the number of steps before; None is that of the file's last line, 0 in a new file.

    Raises:
        TypeError, ValueError: an argument is not accepted.
        reference.support.files.Damaged: there is a file at `path` that is no trail.
        reference.support.files.NotWritten: at a step; the disk is full, ...
    """
    check("trail", model, optimizer)
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"trail: path={path!r}; a path is accepted.")
    if not is_int(every) or every < 1:
        raise ValueError(f"trail: every={every!r}; an int of at least 1 is accepted.")
    if start is not None and (not is_int(start) or start < 0):
        raise ValueError(f"trail: start={start!r}; None or an int of at least 0 is accepted.")
    return TrailWriter(Path(path), model, optimizer, int(every), start)


def _place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


class TrailWriter:
    """Adds the lines of a trail; see `trail`. It is open from the start; `close()` or the end of a `with` ends it.

    Attributes:
        path: its file.
        steps: how many steps have been made.
    """

    def __init__(self, path: Path, model: torch.nn.Module, optimizer: Any, every: int, start: int | None) -> None:
        self.rank, self.ranks = _place()
        self.path = path if self.ranks == 1 else path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")
        self.model, self.every = model, every
        self._state = StateAgain("trail", model, KINDS)
        before = self._before()
        self.steps = before if start is None else int(start)
        self._tensors: tuple[file.Named, ...] | None = None
        self._waiting: deque[_Step] = deque()
        self._handle = optimizer.register_step_post_hook(lambda *_: self.step()) if optimizer is not None else None

    def _before(self) -> int:
        """Cut off a half line of the file, if there is one; return its last step."""
        if not files.is_there(self.path) or not self.path.stat().st_size:
            return 0
        found = file.read(self.path)
        if found.torn:
            say_once(f"trail {self.path}", str(found.notice).rstrip("."))
            os.truncate(self.path, self.path.stat().st_size - found.torn)
        return max(found.steps, default=0)

    def step(self) -> None:
        """A step has been made: digest its state, if it is one of every `every`-th."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._waiting.append(self._digested())
        while self._waiting and (self._waiting[0].done() or len(self._waiting) > _WAITING):
            self._write(self._waiting.popleft())

    def _digested(self) -> _Step:
        named, groups = self._state.now()
        order: list[int] = []
        digests, events = [], []
        for device, mine, tensors in groups:
            found = sums(tensors)
            if device.type == "cuda":
                host = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
                host.copy_(found, non_blocking=True)
                events.append(torch.cuda.Event())
                events[-1].record(torch.cuda.current_stream(device))
                found = host
            else:
                found = found.cpu()
            order += mine
            digests.append(found)
        return _Step(self.steps, named, order, digests, events)

    def _write(self, one: _Step) -> None:
        for event in one.events:
            event.synchronize()
        text = ""
        if one.tensors != self._tensors:
            text, self._tensors = file.head(one.tensors, self.rank, self.ranks), one.tensors
        rows = torch.cat(one.digests).numpy() if one.digests else np.zeros((0, 3), np.int64)
        files.append(self.path, text + file.line(one.number, rows[np.argsort(one.order)]))

    def close(self) -> None:
        """Write the lines that wait, and let the optimizer go."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        while self._waiting:
            self._write(self._waiting.popleft())

    def __enter__(self) -> "TrailWriter":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
