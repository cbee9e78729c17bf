"""Compiles kernels in parallel before they are launched.

NVRTC takes seconds for a GEMM and uses one core, so a step that met its kernels one by one would wait for the sum of
their times. Before a pair of functions (`reference.nn.core.autograd`) runs for the first time on its shapes, both
functions make a dry pass, in which their launches are collected instead of made. What is missing is compiled by as many
threads as there are cores, and then the pair runs. Threads suffice: NVRTC takes no lock, and ctypes releases the
interpreter's.

The dry pass is exact: it runs the very code that launches, and what this code launches depends on no value. It changes
nothing: no kernel runs, an op of PyTorch that is no view only computes shapes, tensors that the pair would change keep
their versions, and what its modules would keep (weights for later microbatches, delayed gradients) is dropped.
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

from optimized.cuda import compiler, launch
from reference.memory import recompute
from reference.nn.attentions import multihead_pair
from reference.nn.transformer import halves
from reference.recipes.quantized import Parts, Quantized
from reference.support import notice
from reference.support.nested import Tensors

Configuration = tuple[str, dict[str, int | str]]  # a kernel file and its macros
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# After so many dry passes in a row that found everything compiled, no more are made until something is compiled. A dry
# pass costs the host as much as the pair itself, and where each batch has lengths of its own every batch is new.
MOST_IDLE = 64
MOST_PLAIN = 4096
_LONGEST = ("gemm_fp8_fused", "gemm", "gemm_fp8")  # these take longest to compile, so they begin first


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def missing(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Those that are not compiled yet, in their order."""
    return [one for one in configurations if not compiler.is_built(*one)]


def build(configurations: Sequence[Configuration], jobs: int, done: Callable[[], None]) -> None:
    """Compile them into the cache, `jobs` at a time; `done` is called, in this thread, after each.

    If this is interrupted, or NVRTC refuses one, those that were stored stay and those under way are finished.

    Raises:
        CompileError, MissingDependency: as `compiler.build`.
    """
    pool = ThreadPoolExecutor(jobs)
    try:
        try:
            futures = [pool.submit(compiler.build, *one, announced=False) for one in configurations]
        except RuntimeError:  # the interpreter is shutting down: no thread takes anything more
            futures = []
            for one in configurations:
                compiler.build(*one, announced=False)
                done()
        for future in as_completed(futures):
            future.result()
            done()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _announced(count: int, jobs: int) -> Iterator[Callable[[], None]]:
    """Say on stderr that kernels are compiled, if it takes longer than a moment; call what is yielded after each.

    On a terminal the line counts them.
    """
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
    """Compile what no device has loaded and the cache does not hold; return how many those were."""
    # A file may have several functions.
    files = {(one.kernel, tuple(sorted(one.defines.items()))): one for one in kernels if not one.loaded}
    wanted = missing((one.kernel, one.defines) for one in files.values())
    wanted.sort(key=lambda one: _LONGEST.index(one[0]) if one[0] in _LONGEST else len(_LONGEST))
    if len(wanted) > 1:  # a single one is compiled, and announced, by its launch
        jobs = min(cores(), len(wanted))
        with _announced(len(wanted), jobs) as done:
            build(wanted, jobs, done)
    return len(wanted)


class Dry(TorchDispatchMode):
    """Runs PyTorch's views; for other ops it allocates results, and nothing is computed, changed or drawn."""

    transparent = True  # ops of `twin` bypass it: their launches are collected

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
    """The argument's stand-in where only shapes are computed."""
    if isinstance(x, torch.Tensor):
        return _room(x, torch.device("meta"))
    return torch.device("meta") if isinstance(x, torch.device) else x


def _room(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


@contextlib.contextmanager
def _unchanged(context: Any) -> Iterator[None]:
    """Restore, at the end, what modules keep and the versions of the tensors that launches change.

    Modules keep FP8 weights for later microbatches, and how gradients are computed in `backward_dw`.
    """
    changed = [*context.state(backward=False)[1], *context.state(backward=True)[1]]
    main_grads = (
        getattr(parameter, "main_grad", None) for one in context.modules for parameter in one.module.parameters()
    )
    changed += [t for t in main_grads if isinstance(t, torch.Tensor)]
    before = [(store, dict(store.casts), len(store.delayed)) for store in (one.store for one in context.modules)]
    try:
        with torch.autograd._unsafe_preserve_version_counter(tuple(changed)):
            yield
    finally:
        for store, casts, length in before:
            while len(store.delayed) > length:
                store.delayed.pop()
            store.casts.clear()
            store.casts.update(casts)


def _delayed(context: Any) -> list[Callable[[], Any]]:
    """What its backward left to `backward_dw`."""
    found = [computes for one in context.modules for owner, computes in one.store.delayed if owner is one]
    return [compute for computes in found for compute in computes.values()]


class _Running(threading.local):
    layer: Any = None  # the transformer layer whose attention this thread is about to run


running = _Running()


def _following(forward: Any, plan: Any, context: Any, x: Any) -> Any:
    """What runs after the pair of a layer's first half: the second half's, with x as its input. None where it does not
    or where it is recomputed, which would record the additional call.
    """
    layer = running.layer
    if layer is None or forward is not multihead_pair.forward or layer.layer_type != "encoder" or recompute.active():
        return None
    mlp, first, trains = layer.layernorm_mlp, context.modules[0], any(plan.needs)
    is_first = True if first._is_first else first.is_first_microbatch
    if not halves.is_mlp_block(mlp, layer.apply_residual_connection_post_layernorm):
        return None
    with torch.set_grad_enabled(trains):
        dropout = (layer.hidden_dropout if layer.training else 0.0, layer.generator)
        more, its_context, (_, *weights) = halves.prepared_mlp(mlp, x, dropout, is_first, trains=trains)
    unwrapped = [its_context.unwrap_weight(t, any(more.needs)) for t in weights]
    return halves.mlp_forward, halves.mlp_backward, more, its_context, (x, *unwrapped)


class _Passes:
    idle = compiled = 0
    plain: ClassVar[set[Any]] = set()  # calls that no tape plays and that have been compiled


def collect(
    into: dict[launch.Kernel, None], forward: Any, backward: Any, plan: Any, context: Any, tensors: Tensors
) -> None:
    """Add to `into` the kernels that a pair launches forward and, if something wants a gradient, backward."""
    with launch.collecting() as kernels, _unchanged(context), Dry():
        try:
            out, saved = forward(plan, context, *tensors)
            if any(plan.needs):
                outs = out if isinstance(out, tuple) else (out,)
                backward(plan, context, saved, *map(torch.empty_like, outs))
                for compute in _delayed(context):
                    compute()
        finally:
            into.update(kernels)


def compile_plain(forward: Any, backward: Any, plan: Any, context: Any, tensors: Tensors) -> None:
    """`compile_pair` for a call that no tape plays, if it is the first of its kind on a GPU."""
    x = tensors[0]
    if type(x) not in _PLAIN or not x.is_cuda or torch._C._len_torch_dispatch_stack():  # type: ignore[union-attr]
        return
    shapes = [getattr(t, "shape", None) for t in tensors]  # a weight in FP8 has none, but the plan says that it is one
    key = (forward, plan, *shapes)
    if key in _Passes.plain:
        return
    if len(_Passes.plain) >= MOST_PLAIN:
        _Passes.plain.clear()
    _Passes.plain.add(key)
    # A tensor of another type may do anything in a dry pass.
    if all(type(t) in (*_PLAIN, Quantized, Parts, type(None)) for t in tensors):
        compile_pair(forward, backward, plan, context, tensors)


def compile_pair(forward: Any, backward: Any, plan: Any, context: Any, tensors: Tensors) -> None:
    """Compile in parallel what a pair is about to launch for the first time, and what the pair after it will launch."""
    if _Passes.compiled != len(compiler.compiled):
        _Passes.compiled, _Passes.idle = len(compiler.compiled), 0
    if _Passes.idle >= MOST_IDLE:
        return
    kernels: dict[launch.Kernel, None] = {}
    # A pair that fails here also fails when it runs, and says why. Only running out of memory may happen here alone.
    with contextlib.suppress(Exception):
        collect(kernels, forward, backward, plan, context, tensors)
        if (following := _following(forward, plan, context, tensors[0])) is not None:
            collect(kernels, *following)
    _Passes.idle = 0 if compile_missing(kernels) else _Passes.idle + 1
