"""Kernels compiled before they are launched, side by side.

NVRTC takes seconds for a GEMM and uses one core. So a step that met its kernels one by one would wait for the sum of
their times. Before a pair of functions (`reference.nn.autograd`) runs for the first time on its shapes, both of them
run once with their launches collected in place of made; what is missing is compiled by as many threads as there are
cores, and then the pair runs. Threads suffice: NVRTC takes no lock, and ctypes lets go of the interpreter's.

The dry pass is exact, because what a pair launches depends on no value: it runs the very code that launches. It leaves
nothing behind: no kernel runs; of an op of PyTorch that is not a view only the shapes are computed; tensors that the
pair would change keep their versions; and weights that it would keep for later microbatches are let go.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from optimized import compiler, launch
from reference import notice
from reference.quantized import Quantized

Configuration = tuple[str, dict[str, int | str]]  # a kernel file, its macros
Saved = tuple[torch.Tensor | None, ...]
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Dry passes in a row that found everything compiled: then no more are made until something is. One costs the host as
# much as the pair itself, and where lengths are drawn for each batch every batch is new.
MOST_IDLE = 64
MOST_PLAIN = 4096
_LONGEST = ("gemm_fp8_fused", "gemm", "gemm_fp8")  # to compile; they begin first


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def missing(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Those that are not compiled yet, in their order."""
    return [one for one in configurations if not compiler.is_built(*one)]


def build(configurations: Sequence[Configuration], jobs: int, done: Callable[[], None]) -> None:
    """Compile them into the cache, `jobs` at a time; `done` is called, in this thread, after each.

    What was stored when this is interrupted, or when NVRTC refuses one, stays.

    Raises:
        CompileError: as `compiler.build`; those under way are finished.
        MissingDependency: NVRTC is not installed.
    """
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(compiler.build, *one, announced=False) for one in configurations]
        for future in as_completed(futures):
            future.result()
            done()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _announced(count: int, jobs: int) -> Iterator[Callable[[], None]]:
    """One line on stderr, if it takes longer than a moment; a terminal's counts what the yielded function is told."""
    state = {"done": 0, "shown": False}
    terminal = sys.stderr.isatty()

    def show() -> None:
        state["shown"] = True
        text = f"twin-engine: compiling {count} kernels for sm_90a, {jobs} at a time (once; they are cached)"
        if terminal:
            print(f"\r{text}: {state['done']} done", end="", file=sys.stderr, flush=True)
        else:
            print(f"{text} ...", file=sys.stderr, flush=True)

    def done() -> None:
        state["done"] += 1
        if terminal and state["shown"]:
            show()

    timer = threading.Timer(notice.PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield done
    finally:
        timer.cancel()
        if terminal and state["shown"]:
            print(file=sys.stderr, flush=True)


def compile_missing(kernels: Iterable[launch.Kernel]) -> int:
    """Compile what no device has loaded and the cache does not hold; how many those were."""
    # Several functions may be in a file.
    files = {(one.kernel, tuple(sorted(one.defines.items()))): one for one in kernels if not one.loaded}
    wanted = missing((one.kernel, one.defines) for one in files.values())
    wanted.sort(key=lambda one: _LONGEST.index(one[0]) if one[0] in _LONGEST else len(_LONGEST))
    if len(wanted) > 1:  # one is compiled, and announced, by its launch
        jobs = min(cores(), len(wanted))
        with _announced(len(wanted), jobs) as done:
            build(wanted, jobs, done)
    return len(wanted)


class Dry(TorchDispatchMode):
    """Of PyTorch's ops views run; of others results are allocated, and nothing is computed, changed or drawn."""

    transparent = True  # ops of `twin` run past it: their launches are collected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.namespace == "twin":
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0] if func._schema.name.endswith("_") else kwargs.get("out")
        devices = [x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = kwargs.get("device") or devices[0]
        found = func(*tree_map(_shape, args), **tree_map(_shape, kwargs))
        return tree_map(lambda x: _room(x, device) if isinstance(x, torch.Tensor) else x, found)


def _shape(x: Any) -> Any:
    """What stands for an argument where only shapes are computed."""
    if isinstance(x, torch.Tensor):
        return _room(x, torch.device("meta"))
    return torch.device("meta") if isinstance(x, torch.device) else x


def _room(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


@contextlib.contextmanager
def _unchanged(context: Any) -> Iterator[None]:
    """Afterwards modules hold the cached FP8 weights, and what launches change has the version, that they have now."""
    modules = [one.module for one in context.modules]
    changed = [*context.state(backward=False)[1], *context.state(backward=True)[1]]
    main_grads = (getattr(parameter, "main_grad", None) for module in modules for parameter in module.parameters())
    changed += [t for t in main_grads if isinstance(t, torch.Tensor)]
    caches = [module._fp8_workspaces for module in modules]
    before = [dict(cache) for cache in caches]
    try:
        with torch.autograd._unsafe_preserve_version_counter(tuple(changed)):
            yield
    finally:
        for cache, content in zip(caches, before, strict=True):
            cache.clear()
            cache.update(content)


class _Passes:
    idle = compiled = 0
    plain: ClassVar[set[Any]] = set()  # calls that are never replayed, so that no tape knows whether they are new


def _worthwhile() -> bool:
    if _Passes.compiled != len(compiler.compiled):
        _Passes.compiled, _Passes.idle = len(compiler.compiled), 0
    return _Passes.idle < MOST_IDLE


def collect(
    into: dict[launch.Kernel, None], forward: Any, backward: Any, plan: Any, context: Any, tensors: Saved
) -> None:
    """Add to `into` the kernels that a pair launches forward and, where something wants a gradient, backward."""
    with launch.collecting() as kernels, _unchanged(context), Dry():
        try:
            out, saved = forward(plan, context, *tensors)
            if any(plan.needs):
                outs = out if isinstance(out, tuple) else (out,)
                backward(plan, context, saved, *map(torch.empty_like, outs))
        finally:
            into.update(kernels)


def compile_plain(forward: Any, backward: Any, plan: Any, context: Any, tensors: Saved) -> None:
    """`compile_pair` of a call that is not replayed, if it is the first like it on a GPU."""
    x = tensors[0]
    if type(x) not in _PLAIN or not x.is_cuda or torch._C._len_torch_dispatch_stack():  # type: ignore[union-attr]
        return
    shapes = [getattr(t, "shape", None) for t in tensors]  # of a weight in FP8: none, but the plan says that it is one
    key = (forward, plan, *shapes)
    if key in _Passes.plain:
        return
    if len(_Passes.plain) >= MOST_PLAIN:
        _Passes.plain.clear()
    _Passes.plain.add(key)
    if all(type(t) in (*_PLAIN, Quantized, type(None)) for t in tensors):  # a tensor of another type does what it likes
        compile_pair(forward, backward, plan, context, tensors)


def compile_pair(forward: Any, backward: Any, plan: Any, context: Any, tensors: Saved) -> None:
    """Compile, side by side, what a pair is about to launch for the first time, and the pair that follows it."""
    if not _worthwhile():
        return
    kernels: dict[launch.Kernel, None] = {}
    # A pair that fails here fails when it runs, which says why; out of memory is all that may befall it here alone.
    with contextlib.suppress(Exception):
        collect(kernels, forward, backward, plan, context, tensors)
        following = None if context.following is None else context.following()
        if following is not None:
            collect(kernels, *following)
    _Passes.idle = 0 if compile_missing(kernels) else _Passes.idle + 1
