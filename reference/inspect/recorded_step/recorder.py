"""`te.record`: one training step, written to a file that any CPU can run again.

Every op goes through torch's dispatcher while a step is recorded, and a dispatch mode notes it. Three kinds:

    twin     an op of `twin::`: its arguments, the digest of each tensor that it read and wrote
    torch    an op of torch's that only moves, fills, converts or adds numbers, so that every device gives the same
             bits (`reference.inspect.recorded_step.ops.EXACT`): noted like one of `twin::`
    fed      any other op of torch's: noted by name, with digests. Devices may round it otherwise, so it is not run
             again. Where a twin op or an exact one reads its result, the file has the whole tensor

A tensor is a region of a storage. A storage's content is `known` where replay will have it: it was fed, or written by
an op that replay runs. What a twin op or an exact one reads and replay will not have is fed. What a fed op reads is
digested, as all that ops write is, so memory that changes between any two ops is seen.
"""

import contextlib
import os
import sys
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from reference.graphs import graphed_module
from reference.inspect.recorded_step.about import about
from reference.inspect.recorded_step.at_step import AtStep
from reference.inspect.recorded_step.digest import digest
from reference.inspect.recorded_step.file import Access, Op, Recording, Region
from reference.inspect.recorded_step.modules import Modules
from reference.inspect.recorded_step.ops import (
    ALLOCATIONS,
    changed_by,
    dtype_name,
    encoded,
    has_numbers,
    kind_of,
    tensors_of,
)
from reference.inspect.recorded_step.places import Places
from reference.inspect.recorded_step.tensor_names import named_tensors
from reference.random import get_state
from reference.state import graph_seeds

OPS = ("digests", "outputs")
_recording: "weakref.ref[Recorder] | None" = None


def record(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    ops: str = "digests",
    *,
    step: int | None = None,
) -> "Recorder | AtStep":
    """Record the training step inside the `with` block, and write it to `path` when the block ends without an error.

        with te.record(model, "step.safetensors", optimizer):
            with te.autocast(recipe=recipe):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()

    With `step=N` the block is around a training loop, and its step number N is recorded.

    `twin replay step.safetensors` runs its ops again on any CPU and names the first number that differs
    (docs/record.md). The step's own results have the bits that they have without a recording.

    The file has what the step read (weights, FP8 state, random states, inputs, results of torch's own ops that ours
    read), the ops with their arguments, and digests of all their tensors; nothing is pickled.

    Not run again are torch's own ops that compute, an optimizer of torch's among them. Memory that changes before they
    read it is seen; what they compute is not judged, and `twin replay` says so.

    Cost: the ops run one by one: no tape is played (docs/tapes.md), and what torch.compile has compiled runs in
    eager mode. A digest takes about ten small launches and reads a tensor about six times; nobody waits for it. What
    goes into the file whole is copied to the host at once, which waits for the device, and stays there until the end:
    each weight, input and fed tensor, and with ops="outputs" each result. The device keeps a block of 512 bytes a
    digest, and needs up to 200 MiB for a moment while it computes one.

    Args:
        model: contains the layers; names of modules and tensors are those in it.
        path: of the file to write.
        optimizer: its state is named in the recording; its step may be inside the block.
        ops: what is kept of each op's results, torch's among them. "digests": 128 bits a tensor, from which a single
            wrong word is still found. "outputs": the whole tensors too.
        step: None, or which step of the block is recorded, from 1 on: it begins where the block begins or the
            optimizer's step before it ends, and ends, and is written, when the optimizer has made it.

    Raises:
        TypeError, ValueError: an argument is not accepted; nothing has run.
        RuntimeError: another step is being recorded; a module, or what runs in the block, replays a CUDA graph, whose
            ops nobody sees; or, at the end, no op has run.
        reference.support.files.NotWritten: at the end; what stood at `path` is unchanged.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"record: model={model!r}; a torch.nn.Module is accepted.")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"record: path={path!r}; a path is accepted.")
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(
            f"record: path={str(path)!r} is there and is not a file; the path of a file to write is accepted."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"record: optimizer={optimizer!r}; a torch.optim.Optimizer or None is accepted.")
    if not isinstance(ops, str) or ops not in OPS:
        raise ValueError(f"record: ops={ops!r}; 'digests' and 'outputs' are accepted.")
    for name, module in model.named_modules():
        if _is_graph(module) or graphed_module.replays(module):
            raise RuntimeError(
                f"record: {name or 'the model'} replays a CUDA graph (make_graphed_callables), whose ops cannot be "
                f"seen; a module without one is accepted."
            )
    recorder = Recorder(model, Path(path), optimizer, ops == "outputs")
    return recorder if step is None else AtStep(recorder, optimizer, step)


def _is_graph(module: torch.nn.Module) -> bool:
    """Whether a module's forward replays a CUDA graph."""
    forward = module.__dict__.get("forward")
    by = getattr(type(getattr(forward, "__self__", None)), "__module__", ""), getattr(forward, "__module__", "")
    return graphed_module.__name__ in by or "torch.cuda.graphs" in by


def _ended() -> None:
    global _recording
    _recording = None


def _uncompiled() -> Any:
    """A context in which what torch.compile has compiled runs in eager mode."""
    # Without its compiler loaded torch has compiled nothing; loading it takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


class _Storage:
    """What is known of a storage.

    Attributes:
        number: in the recording.
        written: whether anything has been written since its allocation, if that was seen.
        known: whether replay will have its content.
        fed: the regions that were fed since.
        places: the regions of which a digest was noted since they were written.
        owner: the path of the module that its content belongs to.
    """

    def __init__(self, number: int, nbytes: int, written: bool) -> None:
        self.number, self.nbytes, self.written = number, nbytes, written
        self.known = False
        self.fed: set[Region] = set()
        self.places: Places[bool] = Places()
        self.owner: str | None = None


class Recorder(TorchDispatchMode):
    """Notes the ops of one step; see `record`."""

    def __init__(self, model: torch.nn.Module, path: Path, optimizer: Any, keep: bool) -> None:
        super().__init__()
        self.model, self.path, self.optimizer, self.keep = model, path, optimizer, keep
        self.modules = Modules(model)
        self.made = Recording()
        self._digests: list[torch.Tensor] = []
        # A weak reference keeps a storage's address from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, _Storage]] = {}
        self._optimizers: set[str] = set()  # the classes of those that have made a step
        self._in_step = 0

    # --- the block ---------------------------------------------------------------------------------------

    def __enter__(self) -> "Recorder":
        if _recording is not None and _recording() is not None:
            raise RuntimeError("record: another step is being recorded; one at a time is accepted.")
        if self.made.start or self.made.ops:
            raise RuntimeError("record: this recording has been made; te.record(...) for each step is accepted.")
        self._around = contextlib.ExitStack()
        try:
            self._begin()
        except BaseException:  # whoever cannot begin does not end
            self._around.close()
            self.made, self._digests = Recording(), []
            self._storages.clear()
            raise
        return self

    def _begin(self) -> None:
        global _recording
        self._random = {f"random/{name}": state for name, state in get_state(self.model).items()}
        for name, owner, x in named_tensors(self.model, self.optimizer):
            region = self._region(x)
            self._storage(x).owner = owner
            self._storage(x).places.saw(region, True)
            self.made.names.setdefault((region.storage, region.offset), name)
            self.made.start.append(Access(region, self._digest(x)))
        _recording = weakref.ref(self)
        self._around.callback(_ended)
        watch = self.modules.hook()
        self._around.callback(watch.remove)
        watch.install()
        self._around.enter_context(_uncompiled())
        self._around.enter_context(graph_seeds.watched(self._refuse_replay))
        for register, hook in (
            (register_optimizer_step_pre_hook, self._step_begins),
            (register_optimizer_step_post_hook, self._step_ends),
        ):
            self._around.callback(register(hook).remove)
        self._thread = threading.get_ident()
        super().__enter__()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._around:
                super().__exit__(error_type, error, trace)
            if error_type is None:
                self._finish()
                self._write()
        finally:
            self._storages.clear()

    def _finish(self) -> None:
        """Note the step's results."""
        made = self.made
        if not made.ops:
            raise RuntimeError(
                "record: no op ran in this thread's block, so there is nothing to compare and nothing was written; a "
                "step of a model is accepted."
            )
        for name, _, x in named_tensors(self.model, self.optimizer, gradients=True):
            storage, region = self._storage(x), self._region(x)
            made.names.setdefault((region.storage, region.offset), name)
            if storage.written and region.words:
                known = storage.known or region in storage.fed
                (made.end if known else made.found).append(Access(region, self._digest(x)))
        made.tensors |= self._random
        made.digests = _on_host(self._digests)
        made.about = about(self.model, OPS[self.keep], sorted(self._optimizers))

    def _write(self) -> None:
        self.made.write(self.path)

    def _refuse_replay(self) -> None:
        """A CUDA graph is about to be replayed."""
        # Backward runs in threads of its own; what another thread does beside is no part of the step.
        if threading.get_ident() == self._thread or self.modules.phase() == "backward":
            raise RuntimeError(
                "record: a CUDA graph is replayed in the block, whose ops cannot be seen; a step without one is "
                "accepted."
            )

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        self._optimizers.add(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")
        self._in_step += 1

    def _step_ends(self, *_: Any) -> None:
        self._in_step -= self._in_step > 0  # a step that began before the block ends in it

    # --- ops ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in given):
            return NotImplemented  # a weight in FP8, a DTensor: its own ops come here
        if func in ALLOCATIONS:
            made = func(*args, **kwargs)
            if has_numbers(made):
                self._storage(made, written=False)
            return made
        kind = kind_of(func, args, kwargs, given)
        if func.is_view or func is torch.ops.aten._unsafe_view.default:
            return func(*args, **kwargs)
        op = Op(kind, func._schema.name, phase="optimizer" if self._in_step else self.modules.phase())
        op.at = self._read(op, args, kwargs, given)
        out = func(*args, **kwargs)
        given = [x for x in given if has_numbers(x)]
        self._wrote(op, func, args, kwargs, given, [x for x in tensors_of(out) if has_numbers(x)])
        return out

    def _read(self, op: Op, args: Any, kwargs: Any, given: list[torch.Tensor]) -> str:
        """Note what an op is about to read; return its module's path."""
        if op.kind == "fed":
            given = [x for x in given if has_numbers(x)]
            for x in given:
                self._found(op, x)
        else:
            for x in given:
                op.reads.append(self._access(op, x))
            numbers = iter(range(len(given)))
            op.args = [encoded(x, numbers) for x in args]
            op.kwargs = {name: encoded(x, numbers) for name, x in kwargs.items()}
        owners = {self._storage(x).owner for x in given} - {None}
        for found in (self._owners(given), owners):
            if len(found) == 1:
                return str(found.pop())
        return self.modules.path()

    def _owners(self, given: list[torch.Tensor]) -> set[str | None]:
        """The modules of the named tensors among these."""
        return {self._storage(x).owner for x in given if self._region(x)[:2] in self.made.names} - {None}

    def _found(self, op: Op, x: torch.Tensor) -> None:
        """Note what an op that is not run again is about to read."""
        storage, region = self._storage(x), self._region(x)
        if not storage.written or not region.words:
            return
        if not (storage.known or region in storage.fed):
            self._look_around(op, x, storage.places.around(region))
        elif all(access.region != region for access in op.reads):
            op.reads.append(Access(region, self._digest(x)))

    def _look_around(self, op: Op, x: torch.Tensor, regions: list[Region]) -> None:
        """Note digests of regions of a tensor's storage."""
        for one in regions:
            if all(access.region != one for access in op.found):
                op.found.append(Access(one, self._digest(_part(x, one))))
                self._storage(x).places.saw(one, True)

    def _access(self, op: Op, x: torch.Tensor) -> Access:
        storage, region = self._storage(x), self._region(x)
        if not storage.written or not region.words:
            return Access(region, None)
        number = self._digest(x)
        if storage.known or region in storage.fed:
            return Access(region, number)
        self._look_around(op, x, [one for one in storage.places.around(region) if one != region])
        storage.places.saw(region, True)
        storage.fed.add(region)
        storage.known = region.is_whole(storage.nbytes)
        name = f"model/{self.made.names.get((region.storage, region.offset), '')}"
        if name == "model/" or name in self.made.tensors:
            name = f"op/{len(self.made.ops)}/read/{len(op.reads)}"
        self.made.tensors[name] = x.detach().cpu().clone().contiguous()
        return Access(region, number, name)

    def _wrote(
        self, op: Op, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """Note what an op has written; a result of torch's that is an argument's memory is none."""
        changed = [x for x in changed_by(func, args, kwargs, given) if has_numbers(x)]
        memory = {self._storage(x).number for x in given}
        new = [x for x in results if self._storage(x, written=False).number not in memory]
        named = self._owners(given)
        if op.kind == "fed" and not new and not changed and (results or not (op.found or op.reads)):
            return
        for i, x in enumerate((*new, *changed)):
            storage, region = self._storage(x), self._region(x)
            storage.written = True
            if op.kind == "fed":
                storage.known = False
                storage.fed.clear()
            else:
                storage.known |= region.is_whole(storage.nbytes)
            if i < len(new) and len(named) == 1:
                storage.owner = next(iter(named))
            # What other libraries' ops write may not be there yet: collectives run beside.
            digested = region.words and func.namespace in ("aten", "twin")
            storage.places.wrote(region, True if digested else None)
            kept = None
            if self.keep and digested:
                kept = f"op/{len(self.made.ops)}/write/{i}"
                self.made.tensors[kept] = x.detach().cpu().clone().contiguous()
            op.writes.append(Access(region, self._digest(x) if digested else None, kept))
        self.made.ops.append(op)

    # --- tensors -----------------------------------------------------------------------------------------

    def _storage(self, x: torch.Tensor, written: bool = True) -> _Storage:
        """A tensor's storage; `written` is whether a new one may hold numbers."""
        storage = x.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is None or found[1].nbytes != storage.nbytes():  # it may have been resized
            made = _Storage(len(self.made.storages), storage.nbytes(), written)
            self.made.storages.append(made.nbytes)
            found = self._storages[storage._cdata] = (StorageWeakRef(storage), made)
        return found[1]

    def _region(self, x: torch.Tensor) -> Region:
        number = self._storage(x).number
        return Region(number, int(x.storage_offset()), tuple(x.shape), tuple(x.stride()), dtype_name(x.dtype))

    def _digest(self, x: torch.Tensor) -> int:
        self._digests.append(digest(x))
        return len(self._digests) - 1


def _part(x: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a tensor's storage."""
    whole = torch.empty(0, dtype=region.torch_dtype, device=x.device)
    return whole.set_(x.untyped_storage(), region.offset, region.shape, region.stride)


def _on_host(digests: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Digests of any devices, in their order; one copy for each device."""
    found: dict[int, tuple[int, int]] = {}
    for device in {x.device for x in digests}:
        mine = [i for i, x in enumerate(digests) if x.device == device]
        rows = torch.stack([digests[i] for i in mine]).tolist()
        found |= {i: (one, two) for i, (one, two) in zip(mine, rows, strict=True)}
    return [found[i] for i in range(len(digests))]
