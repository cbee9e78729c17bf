"""`te.diff` and `twin diff`: what was planted in one of two runs, or on one rank, is found: step, op and word."""

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import processes, ranks_with_a_trail
from shared.recorded_steps import RECIPES, given, made, step

import optimized
import reference as te
from optimized.commands import main
from reference.inspect.drills.faulty import Fault, Faulty
from reference.inspect.recorded_step import file
from reference.inspect.recorded_step.replay import first_word

BF16 = torch.bfloat16
PLANTED = 37


class Program:
    """A training program that adds four losses: from the first to the last, or, in one step, in another order."""

    def __init__(self, other: int | None) -> None:
        torch.manual_seed(4)
        self.model = torch.nn.Sequential(te.Linear(32, 32, params_dtype=BF16), te.Linear(32, 16, params_dtype=BF16))
        self.optimizer = te.optimizers.FusedAdam(self.model.parameters(), lr=1e-2)
        self.other = other

    def train(self, steps: int = 40) -> None:
        for number in range(1, steps + 1):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(16, 32, generator=generator).bfloat16()
            self.optimizer.zero_grad()
            with te.autocast(recipe=RECIPES["current"]):
                parts = self.model(x).chunk(4)
            order = (3, 1, 2, 0) if number == self.other else (0, 1, 2, 3)
            total = parts[order[0]] + parts[order[1]]
            for i in order[2:]:
                total = total + parts[i]
            total.float().square().mean().backward()
            self.optimizer.step()


def test_another_order_of_a_sum_in_one_step_is_found_to_step_op_and_word(tmp_path: Path) -> None:
    """First the trails of both runs, and then recordings of the step that they name."""
    runs = {"a": None, "b": PLANTED}
    for name, other in runs.items():
        program = Program(other)
        with te.trail(tmp_path / f"{name}.trail", program.model, program.optimizer):
            program.train()
    found = te.diff(tmp_path / "a.trail", tmp_path / "b.trail")
    assert (found.equal, found.step, found.op) == (False, PLANTED, None)
    assert str(found.tensor).startswith("gradients/")
    assert f"Different bits in step {PLANTED}: {tmp_path}/b.trail has other bits than {tmp_path}/a.trail." in str(found)
    assert f"{PLANTED - 1} steps before are the same." in str(found)

    for name, other in runs.items():
        program = Program(other)
        path = tmp_path / f"{name}.safetensors"
        with te.record(program.model, path, program.optimizer, "outputs", step=found.step):
            program.train(PLANTED)
    found = te.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    recording = file.read(tmp_path / "a.safetensors")
    assert found.op is not None
    assert recording.ops[found.op].name == "aten::add"
    assert recording.ops[found.op - 1].name.startswith("twin::gemm")  # the first of the three sums
    assert found.index is not None
    assert len(found.index) == 2
    said = str(found)
    gemm = rf"op {found.op - 1}, twin::gemm_fp8 \(1, forward\)"
    assert re.search(
        rf"Different bits: op {found.op}, aten::add \(1\) reads other tensors as its argument self: in a.safetensors "
        rf"from {gemm}, in b.safetensors from {gemm} \(from its number 192 on\)\.",
        said,
    )
    assert re.search(r"at \[\d+, \d+\]: a.safetensors has [0-9A-F]{4} \(\S+\), b.safetensors [0-9A-F]{4} \(", said)
    assert f"The {found.op} ops before, of {len(recording.ops)}, are the same." in said


@pytest.mark.parametrize(("count", "others"), [(2, "rank 0"), (3, "rank 0 and rank 2")])
def test_the_rank_that_differs_is_named(count: int, others: str, tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    processes.ranks(ranks_with_a_trail.train, (port, count, str(tmp_path), 1, 5), count)
    paths = [tmp_path / f"run.rank{rank}.trail" for rank in range(count)]
    found = te.diff(*paths)
    assert (found.equal, found.step, found.who) == (False, 5, ("rank 1",))
    assert found.tensor == "parameters/0.weight"
    assert f"Different bits in step 5: rank 1 has other bits than {others}." in str(found)
    assert "4 steps before are the same." in str(found)
    assert te.diff(paths[0], paths[0]).equal


def trail_of(path: Path, flip: int | None = None, every: int = 1, steps: int = 6) -> Path:
    model = made("LayerNormMLP")
    with te.trail(path, model, every=every) as trail:
        for number in range(1, steps + 1):
            with torch.no_grad():
                model.fc2_weight.mul_(1.5)
            if number == flip:
                model.fc2_weight.data.view(torch.uint8).view(-1)[2 * 70] ^= 4
            trail.step()
    return path


def test_a_flipped_bit_is_named_by_two_trails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = trail_of(tmp_path / "a"), trail_of(tmp_path / "b", flip=4)
    found = te.diff(a, b)
    assert (found.step, found.tensor, found.index) == (4, "parameters/fc2_weight", (1, 6))
    assert re.search(r"1 word differs, at \[1, 6\]: its bits changed by [+-]0004\.", str(found))
    assert main(["diff", str(a), str(b)]) == 1
    assert capsys.readouterr().out.splitlines() == str(found).splitlines()
    assert main(["diff", str(a), str(trail_of(tmp_path / "c"))]) == 0
    assert capsys.readouterr().out == f"The same bits: 6 steps, from 1 to 6, in {a} and {tmp_path / 'c'}.\n"
    b = trail_of(tmp_path / "d", flip=4, every=3)
    assert "Different bits between steps 3 and 6: " in str(te.diff(a, b))
    a.write_bytes(a.read_bytes()[:-9])
    assert te.diff(a, tmp_path / "c").lines[-1].endswith("was left out: its process was stopped.")


# --- recordings ------------------------------------------------------------------------------------------


def record(path: Path, fault: Fault | None = None, keep: bool = False, change: Any = None) -> file.Recording:
    """Record a step, with a fault or with a model that was changed before."""
    model = made("LayerNormMLP")
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    if change is not None:
        change(model)
    torch.manual_seed(2)
    recorder = Faulty(model, path, optimizer, keep)
    recorder.fault = Fault(-1, "before") if fault is None else fault
    with recorder:
        step(model, given(), RECIPES["current"], optimizer)
    return recorder.made


@pytest.mark.parametrize("keep", [False, True])
def test_an_op_that_computed_other_bits(keep: bool, tmp_path: Path) -> None:
    clean = record(tmp_path / "a", keep=keep)
    assert te.diff(tmp_path / "a", tmp_path / "a").equal
    assert str(te.diff(tmp_path / "a", tmp_path / "a")).startswith(f"The same bits: {len(clean.ops)} ops, ")
    for number in (i for i, op in enumerate(clean.ops) if op.name.startswith("twin::gemm") or op.kind == "torch"):
        fault = Fault(number, "after", bit=0.3)
        record(tmp_path / "b", fault, keep)
        found = te.diff(tmp_path / "a", tmp_path / "b")
        if fault.flipped is None:
            continue
        assert found.op == number, str(found)
        assert found.index == fault.flipped[1]
        assert " computed other bits in " in str(found)
        assert "from the same inputs.\n1 word differs" in str(found)
        assert "It reads " in str(found)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, BF16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32]
)
def test_a_number_is_shown_by_its_bits_and_its_value(dtype: torch.dtype) -> None:
    one = torch.tensor([[1, 3], [-2, 5]]).to(dtype)
    other = torch.tensor([[1, 3], [6, -7]]).to(dtype)
    word, count = first_word(one, other)
    assert (word.index, count) == ((1, 0), 2)
    for said, x in ((word.recorded, one[1, 0]), (word.replayed, other[1, 0])):
        memory = bytes(x.reshape(1).view(torch.uint8).tolist())
        assert said == f"{memory[::-1].hex().upper()} ({int(x)})"  # from the highest byte to the lowest


def test_memory_that_changed_in_one_of_them(tmp_path: Path) -> None:
    clean = record(tmp_path / "a")
    number = next(i for i, op in enumerate(clean.ops) if op.name == "twin::gemm_fp8")
    record(tmp_path / "b", Fault(number, "before", read=0))
    found = te.diff(tmp_path / "a", tmp_path / "b")
    assert found.op == number
    assert re.search(
        rf"op {number}, twin::gemm_fp8 \(.*\) found other bits in its argument a, which op \d+, .* had left", str(found)
    )


def test_steps_that_began_apart(tmp_path: Path) -> None:
    def change(model: torch.nn.Module) -> None:
        model.fc1_weight.data.view(torch.uint8)[2, 5] ^= 1

    record(tmp_path / "a")
    record(tmp_path / "b", change=change)
    found = te.diff(tmp_path / "a", tmp_path / "b")
    assert (found.op, found.tensor, found.index) == (-1, "fc1_weight", (2, 2))
    assert str(found).startswith(
        "Different bits: the steps began with other bits in fc1_weight.\n1 word differs, at [2, 2]"
    )


def test_programs_that_part(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    for name, function in (("a", torch.tanh), ("b", torch.exp), ("c", lambda y: torch.tanh(y).exp())):
        with te.record(model, tmp_path / name):
            function(model(torch.ones(4)))
    found = te.diff(tmp_path / "a", tmp_path / "b")
    assert re.search(
        r"Different bits: a runs op \d+, aten::tanh, and b op \d+, aten::exp; the programs part\.", str(found)
    )
    assert found.op is not None
    assert re.search(
        r"c goes on with op \d+, aten::exp, where the other ends", str(te.diff(tmp_path / "a", tmp_path / "c"))
    )


def test_an_op_that_reads_another_result_of_the_same_shape(tmp_path: Path) -> None:
    """Both results are the same in both runs, and the op reads one here and the other there."""
    model = torch.nn.Linear(4, 4)
    for name, which in (("a", 0), ("b", 1)):
        with te.record(model, tmp_path / name), torch.no_grad():
            x = torch.full((4,), 0.5)
            results = x.exp(), x.sqrt()
            torch.tanh(results[which])
    said = str(te.diff(tmp_path / "a", tmp_path / "b"))
    assert re.search(
        r"aten::tanh reads other tensors as .*: in a from op \d+, aten::exp, in b from op \d+, aten::sqrt\.", said
    )


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["a.trail", "absent"], r"absent"),
        (["a.trail"], r"twin diff: 1 paths; two or more are accepted\."),
        (["a.trail", "a.step"], r"twin diff: \S+a.trail is a trail and \S+a.step is none; files of one kind"),
        (["a.step", "a.step", "a.step"], r"twin diff: 3 recordings; two are accepted, or any number of trails\."),
        (
            ["a.trail", "later.trail"],
            r"twin diff: \S+a.trail and \S+later.trail have no step in common; trails of the s",
        ),
        (["text", "text"], r"text is no whole safetensors file"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    names: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trail_of(tmp_path / "a.trail", steps=1)
    with te.trail(tmp_path / "later.trail", made("Linear"), start=7) as trail:
        trail.step()
    record(tmp_path / "a.step")
    (tmp_path / "text").write_text("my thesis")
    assert main(["diff", *(str(tmp_path / name) for name in names)]) == 2
    error = capsys.readouterr().err
    assert re.search(sentence, error), error
    assert error.count("\n") == 1


def test_a_path_is_asked_for_and_both_packages_have_it() -> None:
    with pytest.raises(TypeError, match=r"diff: path=3; a path is accepted"):
        te.diff(3, 4)  # type: ignore[arg-type]
    assert optimized.diff is te.diff
