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
from shared.recorded_steps import RECIPES, given, made, step

import reference as te
from reference.inspect.drills.faulty import Fault, Faulty
from reference.inspect.recorded_step import file
from reference.inspect.recorded_step.ops import argument_name
from reference.inspect.recorded_step.replay import Replay, Result
from reference.inspect.recorded_step.words import coverage, in_words

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
    reading = [number for number, op in enumerate(clean.ops) if op.reads or op.found]
    counts: dict[str, int] = {}
    while (i := sum(counts.values())) < count:
        draws = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        moment = moments[i % len(moments)]
        drawn = reading if moment == "before" else rerun
        fault = Fault(drawn[int(draws[0] * len(drawn))], moment, draws[1], draws[2])
        try:
            run(ready, recipe, path, fault, keep)
        except IndexError:  # an index of torch's embedding that is out of range now
            continue
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
    """A bit flipped between the op that wrote a tensor and the one that reads it; names are those in the model."""
    ready, path = prepared("TransformerLayer", "delayed"), tmp_path / "step.safetensors"
    number, read = reads(run(ready, "delayed", path, Fault(-1, "before"), False), op, argument)
    fault = Fault(number, "before", read=read)
    run(ready, "delayed", path, fault, False)
    recording = file.read(path)
    result = Replay(recording).run()
    first = result.differences[0]
    assert (first.op, first.read, first.words) == (number, True, 1)
    access = recording.ops[number].reads[read]
    name = recording.names.get(access.region[:2])
    assert first.tensor == (f"its argument {argument}" if name is None else f"{name} (its argument {argument})")
    assert (name is None) == (argument in ("a", "b_scale_inv", "q", "m", "grad"))
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


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model, **how: torch.optim.AdamW(model.parameters(), lr=1e-2, **how),
    "SGD": lambda model, **how: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, **how),
}


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_weight_that_changed_before_a_step_of_torch_is_named(optimizer: str, how: Any, tmp_path: Path) -> None:
    """Also a gradient, and what the optimizer keeps; none of them has bytes in the file."""
    model, path = made("LayerNormMLP"), tmp_path / "step.safetensors"
    steps = OPTIMIZERS[optimizer](model, **how)
    weight = model.fc2_weight
    step(model, given(), RECIPES["delayed"], steps)
    for what in ("weight", "gradient", "moment"):
        model.zero_grad()
        state = steps.state[weight]
        moment = state["exp_avg" if optimizer == "AdamW" else "momentum_buffer"]
        with te.record(model, path, steps):
            step(model, given(), RECIPES["delayed"])
            flipped = {"weight": weight, "gradient": weight.grad, "moment": moment}[what]
            flipped.data.view(torch.uint8).numpy()[3, 21] ^= 4  # beside torch's dispatcher
            steps.step()
        recording = file.read(path)
        result = Replay(recording).run()
        first = result.differences[0]
        sentence = in_words(recording, first)
        assert recording.ops[first.op].phase == "optimizer", sentence
        name = {"weight": "fc2_weight", "gradient": "fc2_weight.grad", "moment": "fc2_weight.momentum_buffer"}
        if optimizer == "AdamW":
            name["moment"] = "fc2_weight.exp_avg"
        assert name[what] in first.tensor, sentence
        assert first.word is not None, sentence
        size = flipped.element_size()
        assert first.word.index == (3, 21 // size), sentence
        assert len(result.differences) == 1
        assert "not judged: torch's " + optimizer in coverage(recording, result)


def test_what_was_judged_is_what_ran_until_the_end() -> None:
    """Of a replay that could not go on, too; where it ended at the last op, nothing came after that."""
    result = file.Access(file.Region(0, 0, (1,), (1,), "float32"), None)
    names = ("twin::gemm_fp8", "twin::cast", "twin::gemm")
    recording = file.Recording([file.Op("twin", name, writes=[result]) for name in names])
    for ended, said in (
        (None, "3 of 3 ops judged, all 2 GEMMs"),
        (0, "1 of 3 ops judged, 1 of 2 GEMMs; not judged: what came after op 0"),
        (1, "2 of 3 ops judged, 1 of 2 GEMMs; not judged: what came after op 1"),
        (2, "3 of 3 ops judged, all 2 GEMMs"),
    ):
        assert coverage(recording, Result(ended=ended)) == said


def test_a_flip_beside_ops_of_torch_is_seen(tmp_path: Path) -> None:
    """In what torch's own ops wrote and read: whole, and through a view."""
    for flip, view in ((False, False), (True, False), (True, True)):
        model, path = made("Linear"), tmp_path / "step.safetensors"
        with te.record(model, path):
            y = torch.tanh(model(given()))
            if flip:
                y.detach().view(torch.uint8).numpy()[1, 1, 9] ^= 1
            (y[:, :1] if view else y).exp().sum()
        recording = file.read(path)
        result = Replay(recording).run()
        assert result.equal != flip
        if flip:
            (first,) = result.differences
            assert first.word is not None
            assert "aten::exp" in in_words(recording, first)
            assert "its bits changed by " in in_words(recording, first)
            assert first.word.index == (1, 1, 4)


def test_what_batch_norm_changes_has_not_changed_by_itself(tmp_path: Path) -> None:
    """Torch's schema of it declares none of its statistics as changed."""
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(32, dtype=torch.bfloat16), te.Linear(32, 32, params_dtype=torch.bfloat16)
    )
    with te.record(model, tmp_path / "a"):
        for _ in range(2):
            model(torch.randn(8, 32).bfloat16())
    assert Replay(file.read(tmp_path / "a")).run().equal


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


def test_each_bit_of_each_tensor_can_be_the_one_that_flips() -> None:
    """`choice` is a share of the tensors that have numbers, `bit` one of the chosen one's bits, in their order."""
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        size = 8 * dtype.itemsize
        for chosen in range(2):
            for place in range(3 * size):
                tensors = [torch.zeros(3, 1, dtype=dtype), torch.zeros(0), torch.zeros(1, 3, dtype=dtype)]
                fault = Fault(0, "before", chosen / 2, (place + 0.5) / (3 * size))
                assert fault.flip(tensors) is tensors[2 * chosen]
                words = [x.flatten().view(torch.uint8).tolist() for x in (tensors[0], tensors[2])]
                assert sum(words[1 - chosen]) == 0
                assert int.from_bytes(words[chosen], "little") == 1 << place
    assert Fault(0, "before").flip([torch.zeros(0)]) is None
