"""What is open in each thread: autocasts, `quantized_model_init`s and checkpoints.

As with `torch.autocast`, a context holds for the thread that opened it, and for that thread alone: a thread that is
started inside does not inherit it. Autograd runs a backward on CUDA in a thread of its own, which needs no context,
because a forward hands its backward all that it reads.

Contexts of one thread end in reverse order. Contexts that overlap otherwise (two generators that take turns, an
`ExitStack` that is closed late) raise when the wrong one ends; it is closed all the same, so nothing stays on.
"""

import itertools
import threading
from typing import Any

_numbers = itertools.count()


class Thread:
    """One thread's open contexts, outermost first.

    Attributes:
        number: unlike the operating system's, never used again.
        autocasts: `autocast`s, and the settings that a checkpoint or a capture brings back.
        inits: `quantized_model_init`s.
        recording, replaying: checkpointed calls in their first run, and in their recomputation.
        first_module_pending: whether no FP8 module has run in the outermost autocast yet.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.name = threading.current_thread().name
        self.autocasts: list[Any] = []
        self.inits: list[Any] = []
        self.recording: list[Any] = []
        self.replaying: list[Any] = []
        self.first_module_pending = False


_local = threading.local()


def here() -> Thread:
    """The calling thread's."""
    try:
        found: Thread = _local.thread
    except AttributeError:
        found = _local.thread = Thread()
    return found


def close(opened: list[Any], entry: Any) -> bool:
    """Take `entry`'s last opening out of a list of a `Thread`'s; whether it was the innermost."""
    if opened and opened[-1] is entry:
        opened.pop()
        return True
    for position in reversed(range(len(opened))):
        if opened[position] is entry:
            del opened[position]
            break
    return False


def misnested(what: str) -> RuntimeError:
    """The error for a context that `close` found out of order."""
    return RuntimeError(
        f"{what}: a context ended while one that was opened after it in the same thread is open, or in another thread "
        f"than it was opened in; contexts that end in reverse order, in their own thread, are accepted."
    )
