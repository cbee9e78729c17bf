"""Processes of their own, without the seconds that importing torch takes in each.

A server (multiprocessing's) imports once, and each process is a fork of it, in which modules are as an import has
left them, and compiled code is loaded (`shared.warm`). What an import itself does, reads from the environment or
costs needs a fresh `python` instead. A fork computes on one thread: it does not have those of OpenMP's that an import
may have started, and would wait for them.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing

_PORTS = range(10_000, 16_000)  # below those for connections, which begin at 32768 on Linux and at 16000 in gVisor
_CONTEXT: Any = multiprocessing.get_context("forkserver")
# Ranks that train import these, each for itself: it would be half of their time.
_LATER = ("torch._dynamo", "torch.distributed.fsdp", "matplotlib.figure", "shared.warm")
_CONTEXT.set_forkserver_preload(["shared.cores", "optimized", "conftest", *_LATER])


def _serve() -> None:
    """Let the server run. It looks for modules where this process does, of which Python 3.11 tells it nothing."""
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
        forkserver.ensure_running()


def context(method: str) -> Any:
    """In place of `multiprocessing.get_context`: its processes are forks of the server, too."""
    _serve()
    return _CONTEXT


def event() -> Any:
    """What one process sets and another waits for."""
    return _CONTEXT.Event()


def _on_one_thread(work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what imports have left: collections need not look at it
    work(*arguments)


def started(work: Callable[..., None], *arguments: Any) -> Any:
    """A process that has begun `work(*arguments)`: a `multiprocessing.Process`."""
    _serve()
    process = _CONTEXT.Process(target=_on_one_thread, args=(work, *arguments))
    process.start()
    return process


@functools.cache
def _own_ports() -> list[int]:
    """This worker's, in an order of its own; those that were given last stand last."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = _PORTS[worker % 64 :: 64]
    return random.SystemRandom().sample(own, len(own))


def free_port() -> int:
    """Where ranks may meet: a port of this worker's, and none that a system gives to a connection of other ranks.

    Each call gives another: a test may ask for several before it uses one.
    """
    own = _own_ports()
    for _ in range(len(own)):
        own.append(port := own.pop(0))
        with socket.socket() as s, contextlib.suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as PyTorch's store does
            s.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of {len(own)} ports from {own[0]} to {own[-1]} is free.")


def _rank(rank: int, work: Callable[..., None], *arguments: Any) -> None:
    _on_one_thread(work, rank, *arguments)


def ranks(work: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """`work(rank, *arguments)` in `count` processes at once."""
    _serve()
    torch.multiprocessing.start_processes(_rank, args=(work, *arguments), nprocs=count, start_method="forkserver")  # type: ignore[no-untyped-call]


def _execute(program: str, out: str, err: str) -> None:
    for number, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR), number)
    sys.argv[:] = ["-c"]
    code: Any = 0
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def run(program: str) -> "subprocess.CompletedProcess[str]":
    """A program, as by `python -c`: its exit code, and what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        err.touch()
        process = started(_execute, program, str(out), str(err))
        process.join()
        return subprocess.CompletedProcess(program, process.exitcode, out.read_text(), err.read_text())
