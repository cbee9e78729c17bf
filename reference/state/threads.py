"""The open contexts of each thread: autocasts, `quantized_model_init`s and recomputations.

As with `torch.autocast`, a context holds only for the thread that opened it; a thread that is started inside does not
inherit it. Autograd runs a backward on CUDA in a thread of its own, which needs no context, because a forward hands its
backward everything that it reads.

Contexts of one thread end in reverse order. Contexts that overlap otherwise (two generators that take turns, an
`ExitStack` that is closed late) raise when the wrong one ends; it is closed all the same, so nothing stays on.
"""

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_numbers = itertools.count()


class Thread:
    """One thread's open contexts, outermost first.

    Attributes:
        number: never reused, unlike the operating system's.
        autocasts: `autocast`s, and the settings that a recomputation or a capture restores.
        inits: `quantized_model_init`s.
        first_runs, recomputations: calls that backward computes again, in their first run and in the other.
        undrawn: whether dropout draws no seeds (`reference.random.undrawn`).
        offloading: whether a context of `get_cpu_offload_context` is open.
        first_module_pending: whether no FP8 module has run in the outermost autocast yet; the backward of the first one
            updates the gradients' scales.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.name = threading.current_thread().name
        self.autocasts: list[Any] = []
        self.inits: list[Any] = []
        self.first_runs: list[Any] = []
        self.recomputations: list[Any] = []
        self.undrawn = False
        self.offloading = False
        self.first_module_pending = False


_local = threading.local()


def here() -> Thread:
    """The calling thread's contexts."""
    try:
        found: Thread = _local.thread
    except AttributeError:
        found = _local.thread = Thread()
    return found


def close(opened: list[Any], entry: Any) -> bool:
    """Remove the last opening of `entry` from a list of a `Thread`; return whether it was the innermost."""
    if opened and opened[-1] is entry:
        opened.pop()
        return True
    for position in reversed(range(len(opened))):
        if opened[position] is entry:
            del opened[position]
            break
    return False


class ThreadContextManager(contextlib.ContextDecorator):
    """A context of one thread; the same object may be open more than once.

    Attributes:
        what: its name, for errors.
        where: the list of `Thread` that holds it while it is open.
    """

    what: str
    where: str

    def __init__(self) -> None:
        self._threads: list[Thread] = []  # where it is open

    def begun(self, thread: Thread) -> None:
        """Called before it is opened."""

    def ended(self, thread: Thread) -> None:
        """Called when it has ended without an error."""

    def __call__(self, function: Callable[..., Any]) -> Any:
        """Decorate a function; refuse one whose body runs after the context has ended."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{self.what}: as a decorator of {function.__qualname__}, a generator or coroutine, it would end "
                f"before the body runs; a `with` statement inside is accepted."
            )
        return super().__call__(function)

    def __enter__(self) -> Any:
        thread = here()
        self.begun(thread)
        self._threads.append(thread)
        getattr(thread, self.where).append(self)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own = here()
        thread = own if own in self._threads else self._threads[-1]
        self._threads.remove(thread)
        in_order = close(getattr(thread, self.where), self) and thread is own
        if error_type is not None and error_type is not GeneratorExit:
            return  # the error goes on
        if not in_order:
            raise RuntimeError(
                f"{self.what}: a context ended while one that was opened after it in the same thread is open, or in "
                f"another thread than it was opened in; contexts that end in reverse order, in their own thread, are "
                f"accepted."
            )
        if error_type is None:
            self.ended(thread)
