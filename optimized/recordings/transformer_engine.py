"""What Transformer Engine computed on an H200, and the same by `reference`, step by step and op by op.

tests/golden/record_transformer_engine.py recorded the training steps of each of `transformer_engine_cases`, and every
call of an op of Transformer Engine in these steps, with its arguments and results. There are two recordings: one of
delayed scaling, one of the other recipes.

    PYTHONPATH=. python -m optimized.recordings.transformer_engine [CASE ...]    how many words differ, and where first

`steps` trains `reference`'s layer. Each step starts from Transformer Engine's state: parameters follow from recorded
gradients, scales and histories are the recorded ones. `calls` repeats each recorded call with the corresponding op of
this project on Transformer Engine's own arguments, so that a difference comes from this op alone.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

import reference as te
from optimized.compare import Tally
from optimized.recordings.reader import RESTORED, arrays
from optimized.recordings.transformer_engine_cases import (
    CASES,
    Run,
    Tensors,
    first_parameters,
    inputs,
    known,
    updated,
)
from optimized.recordings.transformer_engine_ops import OPS, named, scaling_of
from reference.ops.library import twin
from reference.support import files

RECORDING, RECORDING_RECIPES = "transformer_engine_h200", "transformer_engine_recipes_h200"
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]

_NORM = "its norm adds a row in another order, contracts to fma, and takes rsqrtf"
_SUM = "its order of the column sum"
_GELU = "its GELU in tanhf, contracted to fma; ours are recorded fp32 words"
_SILU = "its sigmoid in expf, contracted to fma; ours are recorded fp32 words"
_ROUNDED = "it rounds a gated activation's gradient to 16 bits before the cast and the sum, which read fp32 here"
# Why a part of an op's result may differ, by op and part. All other parts must not differ.
WHY = {
    (op, part): why
    for op, parts, why in (
        ("norm", "codes amax mean rstd", _NORM),
        ("norm_backward", "dx", _NORM),
        ("norm_backward", "dgamma dbeta", _SUM),
        ("gelu", "codes amax", _GELU),
        ("gelu_backward", "codes amax", _GELU),
        ("gelu_backward", "dbias", f"{_GELU}; {_SUM}"),
        ("swiglu", "codes amax", _SILU),
        ("swiglu_backward", "dx", _SILU),
        ("cast_dbias", "dbias", _SUM),
        ("dbias", "dbias", _SUM),
        ("swiglu_backward with its cast", "codes amax", _ROUNDED),
        ("swiglu_backward with its cast", "dbias", f"{_ROUNDED}; {_SUM}"),
        ("current norm", "mean rstd", _NORM),
        ("block norm", "mean rstd", _NORM),
        ("current gelu", "scale_inv", _GELU),
        ("gelu in 16 bits", "out", _GELU),
        ("bias_dropout_add", "out", "torch.compile fuses it and keeps fp32 between its two additions"),
    )
    for part in parts.split()
}


class Step(NamedTuple):
    """One recorded step: what it started from (x, g, parameters), the results by name, the calls, and the file."""

    start: Tensors
    results: Tensors
    calls: list[dict[str, Any]]
    recording: str

    def stored(self, place: list[Any]) -> torch.Tensor:
        """The tensor at `[name or number, shape]`."""
        return _stored(place, self.start, self.recording)


def recording_of(name: str) -> str:
    """The recording of a case."""
    return RECORDING if CASES[name].recipe == "delayed" else RECORDING_RECIPES


def names() -> list[str]:
    """The cases, in their order.

    Raises:
        files.Damaged: a recording is not there, or a case is not in it.
    """
    for name in CASES:
        _entries(name)
    return list(CASES)


def _entries(name: str) -> list[dict[str, Any]]:
    """What is recorded of a case's steps."""
    recording = recording_of(name)
    cases: dict[str, Any] = _file(recording)[0]["cases"]
    if name not in cases:
        raise files.Damaged(f"{recording}.npz is damaged: it has no {name!r}{RESTORED}.")
    return cases[name]  # type: ignore[no-any-return]


@cache
def _file(recording: str) -> tuple[dict[str, Any], np.ndarray]:
    found = arrays(recording)
    try:
        return json.loads(found["index"].tobytes()), found["data"]
    except (TypeError, ValueError) as error:
        raise files.Damaged(f"{recording}.npz is damaged: {error!r}{RESTORED}.") from error


def _stored(place: list[Any], start: Tensors, recording: str) -> torch.Tensor:
    """The tensor at `[name or number, shape]`: a name is one of the step's start, a number one of the file."""
    where, shape = place
    if isinstance(where, str):
        return start[where].reshape(shape)
    index, data = _file(recording)
    dtype, first, size = index["arrays"][where]
    return torch.from_numpy(data[first : first + size].copy()).view(getattr(torch, dtype)).reshape(shape)


@cache
def recorded(name: str) -> list[Step]:
    """The steps of a case."""
    found: list[Step] = []
    recording = recording_of(name)
    entries = _entries(name)
    if len(entries) != CASES[name].steps:
        raise files.Damaged(f"{recording}.npz is damaged: {name!r} has {len(entries)} steps{RESTORED}.")
    parameters = first_parameters(name, Run(name, te, te.recipe, "cpu").shapes())
    for number, entry in enumerate(entries):
        start = known(*inputs(name, number), parameters)
        results = {key: _stored(place, start, recording) for key, place in entry["results"].items()}
        found.append(Step(start, results, entry["calls"], recording))
        parameters = updated(parameters, results)
    return found


def steps(name: str) -> Iterator[Pairs]:
    """For each step of `reference`'s layer and by name, its result and the recorded one."""
    run = Run(name, te, te.recipe, "cpu")
    before: Tensors | None = None
    for x, step in enumerate(recorded(name)):
        run.load({key: step.start[key] for key in run.shapes()})
        if before is not None:
            for key, tensor in run.states().items():
                tensor.copy_(before[key])
        given = run.step(*inputs(name, x))
        if given.keys() != step.results.keys():
            has = f"{name!r} has {sorted(step.results)} and not {sorted(given)}"
            raise files.Damaged(f"{step.recording}.npz does not fit: {has}{RESTORED}.")
        yield {key: (ours, step.results[key]) for key, ours in given.items()}
        before = step.results


def calls(name: str) -> Iterator[tuple[str, Pairs]]:
    """For each recorded call the op, and for each part of its result ours and Transformer Engine's."""
    for step in recorded(name):
        for call in step.calls:
            given = {key: step.stored(place) for key, place in call["in"].items()}
            ours = OPS[call["op"]](call, given)
            yield call["op"], _pairs(ours, call, step)
            if call["op"] == "cast_dbias":
                yield from _fused(call, given, step)


def _pairs(ours: Tensors, call: dict[str, Any], step: Step) -> Pairs:
    return {key: (ours[key], step.stored(place)) for key, place in call["out"].items()}


def _fused(call: dict[str, Any], given: Tensors, step: Step) -> Iterator[tuple[str, Pairs]]:
    """For a cast of swiglu's gradient, compare the op that computes and casts it, as this project's layers do."""
    for before in step.calls:
        if before["op"] == "swiglu_backward" and before["out"]["dx"][0] == call["in"]["x"][0]:
            scaling = scaling_of(call, given)
            operands = (step.stored(before["in"][key]) for key in ("grad", "x"))
            results = twin.activation_backward_cast_transpose_dbias(*operands, "swiglu", *scaling)
            ours = named("codes codes_t scale_inv dbias", results, scaling)
            yield "swiglu_backward with its cast", _pairs(ours, call, step)


def updates(name: str) -> Iterator[Pairs]:
    """Scales and histories of each module and direction, step by step; ours follow from Transformer Engine's amaxes."""
    if CASES[name].recipe != "delayed":
        return
    run, before = Run(name, te, te.recipe, "cpu"), None
    recipe = run.recipe
    for step in recorded(name):
        for prefix in run.parts():
            for key, forward in (("scaling_fwd", True), ("scaling_bwd", False)):
                after = {part: step.results[f"{prefix}{key}.{part}"] for part in ("scale", "amax_history")}
                scale, history = torch.ones_like(after["scale"]), torch.zeros_like(after["amax_history"])
                if before is not None:
                    scale, history = (before[f"{prefix}{key}.{part}"].clone() for part in ("scale", "amax_history"))
                history[0] = after["amax_history"][-1]  # where the update has moved the step's amaxes to
                fp8_max = recipe.fp8_format.fp8_max(forward)
                twin.scale_update([scale], [history], fp8_max, recipe.margin, recipe.amax_compute_algo)
                yield {"scale": (scale, after["scale"]), "amax_history": (history, after["amax_history"])}
        before = step.results


def compare(name: str) -> Tally:
    """Compare every part of every call, except those that may differ (`WHY`)."""
    tally = Tally()
    for op, parts in _every(name):
        for part, pair in parts.items():
            if (op, part) not in WHY:
                tally.add(*pair)
    return tally


def _every(name: str) -> Iterator[tuple[str, Pairs]]:
    yield from calls(name)
    yield from (("scale_update", pairs) for pairs in updates(name))


def summary() -> dict[str, Any]:
    """Words compared and different, for each part of an op over all cases and for each tensor of a case.

    Where a case's tensor differs, `steps` has the counts by step, and `ops` names the ops of that case that differ: the
    source of the difference.
    """
    ops: dict[tuple[str, str], Tally] = {}
    cases: list[dict[str, Any]] = []
    for name in names():
        different: set[str] = set()
        for op, parts in _every(name):
            for part, pair in parts.items():
                if ops.setdefault((op, part), Tally()).add(*pair):
                    different.add(f"{op}: {part}")
        tensors: dict[str, list[Tally]] = {}
        for pairs in steps(name):
            for key, pair in pairs.items():
                tensors.setdefault(key, []).append(Tally())
                tensors[key][-1].add(*pair)
        cases += [_row(name, key, tallies, sorted(different)) for key, tallies in tensors.items()]
    rows = [
        {"op": op, "part": part, "compared": tally.compared, "different": tally.different}
        | ({"why": WHY.get((op, part), "not explained")} if tally.different else {})
        for (op, part), tally in ops.items()
    ]
    return {"ops": rows, "cases": cases}


def _row(name: str, tensor: str, tallies: list[Tally], ops: list[str]) -> dict[str, Any]:
    counts = [tally.different for tally in tallies]
    row = {"case": name, "tensor": tensor, "compared": sum(tally.compared for tally in tallies)}
    return row | {"different": sum(counts)} | ({"steps": counts, "ops": ops} if any(counts) else {})


def main(asked: list[str]) -> None:
    """Print for each case and tensor how many words differ, by step, and each call that differs, in order."""
    for name in asked or names():
        print(name)
        tensors: dict[str, list[Tally]] = {}
        for pairs in steps(name):
            for key, pair in pairs.items():
                tensors.setdefault(key, []).append(Tally())
                tensors[key][-1].add(*pair)
        for key, tallies in tensors.items():
            counts = [tally.different for tally in tallies]
            print(f"  {key:44}{sum(tally.compared for tally in tallies):>9,} words {sum(counts):>8,} differ  {counts}")
        found: dict[tuple[str, str], Tally] = {}
        for number, (op, parts) in enumerate(calls(name)):
            for part, pair in parts.items():
                tally = found.setdefault((op, part), Tally())
                if tally.add(*pair) and tally.different and (op, part) not in WHY:
                    print(f"  call {number}, {op}: {part} differs")
        for (op, part), tally in found.items():
            print(f"    {op + ': ' + part:42}{tally.compared:>9,} words {tally.different:>8,} differ")


if __name__ == "__main__":
    main(sys.argv[1:])
