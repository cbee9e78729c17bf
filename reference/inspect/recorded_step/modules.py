"""Where in a model an op runs: the module whose pair of functions (`reference.nn.core.autograd`) is running."""

import contextlib
import os.path
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from reference.nn.core.autograd import Backward, Context, Forward
from reference.nn.core.hook import Hook
from reference.support.nested import Tensors


class Modules:
    """The paths of a model's modules, and those whose functions run now, in each thread."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._local = threading.local()
        self._of_context: dict[int, tuple[Context, str]] = {}  # holds the contexts, so that ids stay theirs

    def path(self) -> str:
        """The path of the module whose pair runs in this thread; "" where none does."""
        running: list[str] = getattr(self._local, "running", [])
        return running[-1] if running else ""

    def phase(self) -> str:
        """ "forward" or "backward"; "" outside of both, as in an optimizer's step."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if getattr(self._local, "running", []) else ""

    def hook(self) -> Hook:
        """A hook that says here whose pair runs."""
        return _Located(self)

    @contextlib.contextmanager
    def running(self, context: Context) -> Iterator[None]:
        """Run a pair's function with this context."""
        running = self._local.__dict__.setdefault("running", [])
        running.append(self._path_of(context))
        try:
            yield
        finally:
            running.pop()

    def _path_of(self, context: Context) -> str:
        known = self._of_context.get(id(context))
        if known is None:
            modules = [id(one.module) for one in context.modules]
            names = [self._names[one] for one in modules if one in self._names]
            path = os.path.commonpath([f"/{name.replace('.', '/')}" for name in names]) if names else None
            found = self._calling() if path is None else path.strip("/").replace("/", ".")
            known = self._of_context[id(context)] = (context, found)
        return known[1]

    def _calling(self) -> str:
        """The path of the module whose method is the innermost one on this thread's stack."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_argcount and frame.f_code.co_varnames[0] == "self":
                name = self._names.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back  # type: ignore[assignment]
        return ""


class _Located(Hook):
    """Hands pairs on to the runner, which sees the dispatch mode and so runs their ops one by one."""

    def __init__(self, modules: Modules) -> None:
        super().__init__()
        self._modules = modules

    def forward(
        self, function: Forward, plan: Any, context: Context, tensors: Tensors, backward: Backward
    ) -> tuple[Any, Tensors, Any]:
        with self._modules.running(context):
            return super().forward(function, plan, context, tensors, backward)

    def backward(
        self, function: Backward, plan: Any, context: Context, saved: Tensors, grads: Tensors, note: Any
    ) -> Tensors:
        with self._modules.running(context):
            return super().backward(function, plan, context, saved, grads, note)
