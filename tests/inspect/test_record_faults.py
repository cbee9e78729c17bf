"""Bits flipped in a step while it is recorded: replay names the op and the word each time.

A fault is drawn at one tensor of one op, at one of three moments. "before": since the tensor was written, or since the
step began; the op reads other bits than are known. "while": after the op's inputs were digested and before it runs; it
computes with other bits. "after": in a result, before that is digested; it has computed other bits. Replay must name
that op, or, where no later digest differs from those of the same step without the fault, say that all is the same.
"""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.bit_flips import Fault, Faulty
from shared.recorded_steps import RECIPES, given, made, step

import reference as te
from reference.inspect.recorded_step import file
from reference.inspect.recorded_step.ops import argument_name
from reference.inspect.recorded_step.replay import Replay, Result, in_words

MOMENTS = ("before", "while", "after")


def prepared(name: str, recipe: str) -> tuple[torch.nn.Module, Any]:
    """A model and an optimizer that have made a step."""
    model = made(name)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    step(model, given(), RECIPES[recipe], optimizer)
    model.zero_grad()
    leave(model)
    return model, optimizer


def run(prepared: tuple[torch.nn.Module, Any], recipe: str, path: Path, fault: Fault, keep: bool) -> file.Recording:
    """Record a step with a fault; the same step each time."""
    model, optimizer = copy.deepcopy(prepared)
    x = given()
    torch.manual_seed(2)
    faulty = Faulty(model, path, optimizer, keep)
    faulty.fault = fault
    with faulty:
        step(model, x, RECIPES[recipe], optimizer)
    leave(model)
    return faulty.made


def leave(model: torch.nn.Module) -> None:
    """Let later steps of other models not update this model's scales: they would not be the same each time."""
    for module in model.modules():
        module._membership = None


def same_results(one: file.Recording, two: file.Recording) -> bool:
    """Whether every result and every tensor at the end has the same digest."""
    return all(
        (one.digests[a.digest] == two.digests[b.digest]) if a.digest is not None else b.digest is None
        for a, b in zip([*_results(one)], [*_results(two)], strict=True)
    )


def _results(recording: file.Recording) -> list[file.Access]:
    return [access for op in recording.ops for access in op.writes] + recording.end


def check(fault: Fault, recording: file.Recording, clean: file.Recording, result: Result) -> str:
    """What became of a fault: "named", "word" or "no effect"; an error otherwise."""
    assert fault.flipped is not None
    what = f"op {fault.op} of {len(recording.ops)}, {fault.moment}, {fault.choice}, {fault.bit}"
    if result.equal:
        assert same_results(recording, clean), f"{what}: results changed, and replay says they did not"
        return "no effect"
    first = result.differences[0]
    assert first.op >= fault.op, f"{what}: {in_words(recording, first)}"
    if fault.moment == "before" and fault.known:
        assert (first.op, first.read) == (fault.op, True), f"{what}: {in_words(recording, first)}"
    if fault.moment == "after":
        assert (first.op, first.read) == (fault.op, False), f"{what}: {in_words(recording, first)}"
    if fault.moment == "while":
        # Either the op computed other bits, or a later op reads what was flipped beside it.
        assert (first.op == fault.op and not first.read) or first.op > fault.op
    if fault.known:
        assert first.word is not None, f"{what}: {in_words(recording, first)}"
        assert first.word.index == fault.flipped[1] or first.words == 1, what
    return "word" if first.word is not None else "named"


def search(
    count: int, seed: int, folder: Path, name: str, recipe: str, keep: bool = False, moments: tuple[str, ...] = MOMENTS
) -> dict[str, int]:
    """Draw faults, and count what became of them."""
    generator = torch.Generator().manual_seed(seed)
    ready, path = prepared(name, recipe), folder / "step.safetensors"
    clean = run(ready, recipe, path, Fault(-1, "before"), keep)
    assert Replay(file.read(path)).run().equal
    rerun = [number for number, op in enumerate(clean.ops) if op.kind != "fed"]
    counts: dict[str, int] = {}
    while (i := sum(counts.values())) < count:
        draws = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        fault = Fault(rerun[int(draws[0] * len(rerun))], moments[i % len(moments)], draws[1], draws[2])
        run(ready, recipe, path, fault, keep)
        if fault.flipped is None:  # an op without such a tensor
            continue
        recording = file.read(path)
        became = f"{fault.moment}: {check(fault, recording, clean, Replay(recording).run())}"
        counts[became] = counts.get(became, 0) + 1
    return counts


def test_six_flipped_bits(tmp_path: Path) -> None:
    counts = search(6, 11, tmp_path, "TransformerLayer", "delayed")
    assert sum(counts.values()) == 6
    assert sum(n for what, n in counts.items() if "no effect" not in what) >= 5, counts


@pytest.fixture(scope="module")
def module_of_another_test() -> list[torch.nn.Module]:
    """A module that ran in FP8 before the test began."""
    module = made("Linear")
    step(module, given(), RECIPES["delayed"])
    return [module]


def test_a_step_is_the_same_when_a_module_of_another_test_goes(
    module_of_another_test: list[torch.nn.Module], tmp_path: Path
) -> None:
    """Python collects garbage at any time; between two faults that made one without an effect seem to have one."""
    ready, path = prepared("TransformerLayer", "delayed"), tmp_path / "step.safetensors"
    before = run(ready, "delayed", path, Fault(-1, "before"), False)
    module_of_another_test.clear()
    after = run(ready, "delayed", path, Fault(-1, "before"), False)
    assert same_results(before, after)


def reads(recording: file.Recording, op: str, argument: str) -> tuple[int, int]:
    """The first op of a name, and the number of the tensor that is its argument."""
    number = next(i for i, one in enumerate(recording.ops) if one.name == op)
    one = recording.ops[number]
    names = [argument_name(one.name, one.args, one.kwargs, i) for i in range(len(one.reads))]
    return number, names.index(argument)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("op", "argument", "writer"),
    [
        ("twin::multi_cast_transpose", "xs[1]", "the start of the step"),  # a weight
        ("twin::norm_cast_transpose", "weight", "the start of the step"),
        ("twin::multi_cast_transpose", "scales[0]", "the start of the step"),
        ("twin::norm_cast_transpose", "amax_history", "twin::multi_cast_transpose (forward)"),
        ("twin::gemm_fp8", "a", "twin::norm_cast_transpose (self_attention.layernorm_qkv, forward)"),  # codes
        ("twin::gemm_fp8", "b_scale_inv", "twin::multi_cast_transpose (forward)"),
        ("twin::attention", "q", "twin::gemm_fp8 (self_attention.layernorm_qkv, forward)"),  # an activation
        ("twin::attention", "rng_state", "aten::mul"),
        ("twin::attention_backward", "m", "twin::attention (self_attention.core_attention, forward)"),
        ("twin::norm_backward", "grad", "twin::gemm_fp8 (layernorm_mlp, backward)"),
        ("twin::adam", "exp_avgs[3]", "the start of the step"),
    ],
)
def test_memory_that_changed_is_named(op: str, argument: str, writer: str, tmp_path: Path) -> None:
    """A bit flipped between the op that wrote a tensor and the one that reads it."""
    ready, path = prepared("TransformerLayer", "delayed"), tmp_path / "step.safetensors"
    number, read = reads(run(ready, "delayed", path, Fault(-1, "before"), False), op, argument)
    fault = Fault(number, "before", read=read)
    run(ready, "delayed", path, fault, False)
    recording = file.read(path)
    result = Replay(recording).run()
    first = result.differences[0]
    assert (first.op, first.tensor, first.read, first.words) == (number, f"its argument {argument}", True, 1)
    assert fault.flipped is not None
    assert first.word is not None
    assert first.word.index == fault.flipped[1]
    sentence = in_words(recording, first)
    assert sentence.startswith(f"op {number}, {op} (" if recording.ops[number].at else f"op {number}, {op} ")
    assert writer in sentence
    assert "left there: its memory changed in between; 1 word differs, at [" in sentence
    assert len(result.differences) == 1  # what follows is judged by what was read
    assert result.ended is None


def test_many_words_are_seen_in_whole_outputs(tmp_path: Path) -> None:
    """A scale with another exponent changes many codes: the first is seen in outputs; digests name the op alone."""
    for keep in (True, False):
        ready, path = prepared("LayerNormMLP", "delayed"), tmp_path / "step.safetensors"
        clean = run(ready, "delayed", path, Fault(-1, "before"), keep)
        number, read = reads(clean, "twin::norm_cast_transpose", "scale")
        run(ready, "delayed", path, Fault(number, "while", bit=24 / 192, read=read), keep)
        recording = file.read(path)
        result = Replay(recording).run()
        first = result.differences[0]
        assert (first.op, first.tensor, first.read) == (number, "its result codes", False)
        sentence = in_words(recording, first)
        if keep:
            assert first.words is not None
            assert first.words > 100
            assert "words differ, the first, at [" in sentence
            assert result.ended is None
        else:
            assert first.word is None
            assert sentence.endswith("the recording has digests alone (record with ops='outputs').")
            assert result.ended == number


@pytest.mark.slow
def test_a_thousand_flipped_bits(tmp_path: Path) -> None:
    """In two models and three recipes; prints what became of them."""
    seed = int.from_bytes(os.urandom(3), "big")
    print(f"seed {seed}")
    total: dict[str, int] = {}
    runs = [(name, recipe) for name in ("TransformerLayer", "list") for recipe in RECIPES]
    for i, (name, recipe) in enumerate(runs):
        count = 1000 // len(runs) + (i < 1000 % len(runs))
        found = search(count, seed + i, tmp_path, name, recipe, keep=i % 2 == 1)
        print(name, recipe, found)
        for what, n in found.items():
            total[what] = total.get(what, 0) + n
    print(dict(sorted(total.items())))
    assert sum(total.values()) == 1000
