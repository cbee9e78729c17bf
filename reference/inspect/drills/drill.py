"""Faults of each kind in a recorded training step, and what became of them.

    weight, optimizer state      memory that has a name in the model, between two ops
    activation, gradient         a tensor that an op of forward, or of backward, wrote, before another op reads it
    code, scale                  FP8 codes; scales and amax histories
    result                       a result of an op, torch's own among them, before anybody has seen it
    product, aligned sum,        inside one step of the tensor core's model, while a GEMM runs
    accumulator                  (`reference.numbers.tensor_core.faults`)

One bit flips in each, drawn at random: the op, the tensor and the bit. The step is one of a small TransformerLayer in
FP8 with its loss and FusedAdam, always the same; it is recorded with the fault and replayed. What became of it:

    no effect      every result of the step is as without the fault, and replay says that all is the same
    word, op       replay names the op and the word, or, where many words differ, the op
    later          replay names a later op, which found what had been flipped
    not judged     an op of torch's that the verdict says it does not judge computed something else
    missed         results have changed, and replay says that all is the same
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reference.inspect.drills.faulty import Fault, Faulty
from reference.inspect.recorded_step.file import Access, Op, Recording
from reference.inspect.recorded_step.ops import argument_name
from reference.inspect.recorded_step.replay import Difference, Replay
from reference.inspect.recorded_step.tensor_names import every_named
from reference.nn.transformer.transformer_layer import TransformerLayer
from reference.numbers.tensor_core.faults import STAGES
from reference.optimizers import FusedAdam
from reference.recipe import DelayedScaling
from reference.state.autocast import autocast

MEMORY = ("weight", "optimizer state", "activation", "gradient", "code", "scale")
KINDS = (*MEMORY, "result", *STAGES)
OUTCOMES = ("no effect", "word", "op", "later", "not judged", "missed")
_NAMED = {"parameters": "weight", "optimizer": "optimizer state", "fp8": "scale", "gradients": "gradient"}
_WIDE = ("float32", "bfloat16", "float16")


class Outcome(NamedTuple):
    """What became of a fault: one of `OUTCOMES`; whether a result of the step changed; the op that was named, or ""."""

    what: str
    changed: bool
    at: str


class _Drilled(Faulty):
    """A recorder whose recording stays in memory."""

    def _write(self) -> None:
        pass


class Drill:
    """A step, what its recording is without a fault, and where faults can be."""

    def __init__(self) -> None:
        devices: list[Any] = []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(7)
            self._model = TransformerLayer(32, 64, 2, params_dtype=torch.bfloat16, device="cpu")
            self._optimizer = FusedAdam(self._model.parameters(), lr=1e-2, master_weights=True)
            self._x = torch.randn(12, 2, 32).bfloat16()
            self._step(self._model, self._optimizer)  # which makes scales and the optimizer's state, and draws a mask
        self._kinds = {name: _NAMED.get(kind) for kind, name, *_ in every_named(self._model, self._optimizer, True)}
        self.clean = self.record(Fault(-1, "before"))
        self._results = list(_results(self.clean))
        self._places = self._found_places()

    def _step(self, model: torch.nn.Module, optimizer: Any) -> None:
        model.zero_grad()
        with autocast(recipe=DelayedScaling(amax_history_len=4)):
            y = model(self._x.clone().requires_grad_())
        y.float().square().mean().backward()
        optimizer.step()
        for module in model.modules():
            module._membership = None  # type: ignore[assignment]  # steps of copies do not update each other's scales

    def record(self, fault: Fault) -> Recording:
        """The step with a fault."""
        model, optimizer = copy.deepcopy((self._model, self._optimizer))
        faulty = _Drilled(model, Path(), optimizer, False)
        faulty.fault = fault
        devices: list[Any] = []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(2)
            with faulty:
                self._step(model, optimizer)
        return faulty.made

    def _found_places(self) -> dict[str, list[Callable[[float], Fault]]]:
        """By kind, where a fault can be: a function of which bit, as a part of 1, for each."""
        found: dict[str, list[Callable[[float], Fault]]] = {kind: [] for kind in KINDS}
        wrote = {access.region.storage: -1 for access in self.clean.start}
        for number, op in enumerate(self.clean.ops):
            for i, access in enumerate((*op.reads, *op.found)):
                writer = wrote.get(access.region.storage)
                if writer is None or access.digest is None:  # what it was before is not known
                    continue
                kind = self._kind(op, i, access, self.clean.ops[writer] if writer >= 0 else None)
                if kind is not None:
                    found[kind].append(_before(number, access))
            if op.writes:
                found["result"].append(lambda bit, op=number: Fault(op, "after", bit=bit))  # type: ignore[misc]
            if op.name.startswith("twin::gemm"):
                for stage in STAGES:
                    found[stage].append(lambda bit, op=number, stage=stage: Fault(op, "inside", bit=bit, stage=stage))  # type: ignore[misc]
            wrote.update({access.region.storage: number for access in (*op.reads, *op.writes)})
        return found

    def _kind(self, op: Op, i: int, access: Access, writer: Op | None) -> str | None:
        """What a tensor that an op reads is."""
        region = access.region
        name = self.clean.names.get((region.storage, region.offset))
        if name is not None and self._kinds.get(name) is not None:
            return self._kinds[name]
        if region.dtype.startswith("float8"):
            return "code"
        if op.kind == "twin" and i < len(op.reads):
            argument = argument_name(op.name, op.args, op.kwargs, i)
            if "scale" in argument or "amax" in argument:
                return "scale"
        if writer is None or region.dtype not in _WIDE or not region.words:
            return None
        return {"forward": "activation", "backward": "gradient"}.get(writer.phase)

    def fault(self, kind: str, generator: torch.Generator) -> Outcome:
        """What became of a fault of a kind that is in `KINDS`."""
        places = self._places[kind]
        while True:
            which, bit, choice = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
            fault = places[int(which * len(places))](bit)
            if kind == "result" or kind in STAGES:
                fault.choice = choice
            recording = self.record(fault)
            if fault.flipped is not None:
                return self._judge(fault, recording, _first_difference(recording))

    def _judge(self, fault: Fault, recording: Recording, first: Difference | None) -> Outcome:
        changed = list(_results(recording)) != self._results
        if first is None:
            fed = recording.ops[fault.op].kind == "fed" and fault.moment != "before"
            return Outcome("no effect" if not changed else "not judged" if fed else "missed", changed, "")
        at = recording.ops[first.op].name if first.op < len(recording.ops) else "the end of the step"
        if first.op < fault.op or (first.op == fault.op and first.read != (fault.moment == "before")):
            return Outcome("missed", changed, at)  # another op is blamed
        what = "later" if first.op > fault.op else "op" if first.word is None else "word"
        return Outcome(what, changed, at)


class _Found(Exception):
    """Replay has seen a difference."""


class _Replay(Replay):
    """A replay that ends at the first difference."""

    def _differs(self, *given: Any) -> None:
        super()._differs(*given)
        raise _Found


def _first_difference(recording: Recording) -> Difference | None:
    """What replay names first."""
    run = _Replay(recording)
    try:
        with torch.device("cpu"):
            run.run()
    except _Found:
        return run.result.differences[0]
    return None


def _before(number: int, access: Access) -> Callable[[float], Fault]:
    return lambda bit: Fault(number, "before", bit=bit, region=access.region)


def _results(recording: Recording) -> Iterator[tuple[int, int] | None]:
    """The digests of everything that a step wrote and left."""
    for op in recording.ops:
        for access in op.writes:
            yield None if access.digest is None else recording.digests[access.digest]
    for access in (*recording.end, *recording.found):
        yield None if access.digest is None else recording.digests[access.digest]
