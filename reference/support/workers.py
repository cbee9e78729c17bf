"""Independent pieces of one computation on several threads. Each piece writes words of its own, so no order matters."""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_here = threading.local()


@functools.cache
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """Threads that are reused; `process` is in the key because a fork leaves them behind."""
    return ThreadPoolExecutor(workers, thread_name_prefix="reference", initializer=_begin)


def _begin() -> None:
    _here.inside = True


def _piece(function: Callable[..., None], task: tuple[Any, ...], inference: bool) -> None:
    # A thread has modes of its own. An op's arithmetic records nothing, and writes to the caller's tensors.
    with torch.inference_mode() if inference else torch.no_grad():
        function(*task)


def each(function: Callable[..., None], tasks: Sequence[tuple[Any, ...]]) -> None:
    """Call `function` with every task, on as many threads as torch may use.

    A task that calls `each` in turn runs its pieces one after the other: its thread would wait for others like itself.
    """
    workers = min(torch.get_num_threads(), len(tasks))
    if workers < 2 or getattr(_here, "inside", False):
        for task in tasks:
            function(*task)
        return
    pool = _pool(torch.get_num_threads(), os.getpid())
    inference = torch.is_inference_mode_enabled()
    futures = []
    for i, task in enumerate(tasks):
        try:
            futures.append(pool.submit(_piece, function, task, inference))
        except RuntimeError:  # the interpreter is shutting down, as in an atexit handler: no thread takes more
            for left in tasks[i:]:
                function(*left)
            break
    for future in futures:
        future.result()
