"""`te.digest` and `te.trail`: what changes is seen, what does not is the same, and a file survives its process."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared.recorded_steps import RECIPES, given, made, step
from torch.utils._python_dispatch import TorchDispatchMode

import optimized
import reference as te
from reference.inspect.trails import compare, file, sums
from reference.numbers.splitmix import splitmix64
from reference.ops.digests import word_sums
from reference.support import files

BF16 = torch.bfloat16


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# --- sums ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 4 * 4096, 4 * 4096 + 5, 30000])
def test_a_digest_is_what_its_definition_says(count: int) -> None:
    data = random_bytes(count)
    raw = data.numpy().tobytes()
    words = np.frombuffer(raw + b"\0" * (-len(raw) % 4), "<i4").astype(object)

    def h(j: int) -> int:
        return int(splitmix64(np.array([j], dtype=np.uint64))[0]) | 1

    expected = [0, 0, 0]
    for i, w in enumerate(words):
        block, row, column = i // 4096, i // 64 % 64, i % 64
        expected[0] += int(w)
        expected[1] += int(w) * h(row) * h((1 << 32) + block)
        expected[2] += int(w) * h(64 + column) * h((1 << 33) + block)
    (found,) = sums.sums([data]).tolist()
    assert [n % 2**64 for n in found] == [n % 2**64 for n in expected]


@pytest.mark.parametrize("limits", [(1 << 20, 1 << 24), (4096, 1 << 24), (1 << 30, 4096), (10000, 5000)])
def test_a_digest_does_not_depend_on_what_is_beside(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = (torch.uint8, torch.float32, BF16, torch.float8_e4m3fn, torch.int64, torch.bool)
    tensors = [(random_bytes(n * 8, n) % 2).view(dtypes[n % 6]) for n in (1, 2, 3, 2048, 5000, 20001, 0, 8192)]
    tensors += [random_bytes(90).view(9, 10).t(), random_bytes(64)[3:41]]  # another layout, an odd address
    alone = torch.cat([sums.sums([x.contiguous().clone()]) for x in tensors])
    monkeypatch.setattr(word_sums, "_ALONE", limits[0])
    monkeypatch.setattr(word_sums, "_BATCH", limits[1])
    word_sums._layout.cache_clear()
    assert torch.equal(sums.sums(tensors), alone)
    word_sums._layout.cache_clear()


def test_every_flipped_bit_changes_a_digest_and_is_found() -> None:
    data = random_bytes(4 * 5000 + 2)
    before = sums.sums([data])[0].tolist()
    for at in torch.randint(0, data.numel(), (60,), generator=torch.Generator().manual_seed(1)).tolist():
        for bit in (0, 3, 7):
            data[at] ^= 1 << bit
            found = sums.changed_word(5001, before, sums.sums([data])[0].tolist())
            assert found is not None
            assert found[0] == at // 4
            k = 8 * (at % 4) + bit
            assert abs(found[1]) == 1 << k
            data[at] ^= 1 << bit
    assert sums.changed_word(5001, before, before) is None
    data[:12] ^= 1
    assert sums.changed_word(5001, before, sums.sums([data])[0].tolist()) is None


def test_many_small_tensors_need_no_more_kernels() -> None:
    class Count(TorchDispatchMode):
        launches = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.launches += not func.is_view and "empty" not in str(func)
            return func(*args, **(kwargs or {}))

    found = []
    for n in (4, 400):
        tensors = [torch.randn(40, 64) for _ in range(n)]
        sums.sums(tensors)
        with Count() as count:
            sums.sums(tensors)
        found.append(count.launches)
    assert found[0] == found[1] < 30


# --- te.digest -------------------------------------------------------------------------------------------


def trained(name: str = "LayerNormMLP") -> tuple[torch.nn.Module, Any]:
    model = made(name)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    torch.manual_seed(3)
    step(model, given(), RECIPES["delayed"], optimizer)
    return model, optimizer


def test_a_digest_names_everything_that_a_step_changes() -> None:
    model, optimizer = trained()
    one = te.digest(model, optimizer)
    assert str(one) == str(te.digest(*trained()))
    assert list(one) == list(te.digest(*trained()))
    kinds = [name.partition("/")[0] for name in one]
    assert kinds == sorted(kinds, key=("gradients", "parameters", "buffers", "fp8", "optimizer").index)
    assert {"gradients", "parameters", "fp8", "optimizer"} <= set(kinds)
    assert {"parameters/fc1_weight", "gradients/fc1_weight.grad", "optimizer/fc1_weight.exp_avg"} <= set(one)
    for kind, tensor in {
        "parameters": model.fc2_weight.data,
        "gradients": model.fc2_weight.grad,
        "fp8": model.fp8_meta["scaling_fwd"].amax_history,
        "optimizer": optimizer.state[model.fc2_weight]["exp_avg"],
    }.items():
        tensor.view(torch.uint8).view(-1)[5] ^= 1
        two = te.digest(model, optimizer)
        tensor.view(torch.uint8).view(-1)[5] ^= 1
        differs = [name for name in one if one[name] != two[name]]
        assert len(differs) == 1
        assert differs[0].startswith(f"{kind}/")
        assert one.of(kind) != two.of(kind)
        assert str(one) != str(two)


def test_a_digest_of_any_model() -> None:
    """Tied weights stand once; a shape and a dtype count; a buffer has its own kind."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    found = te.digest(model, optimizer)
    assert "parameters/0.weight" in found
    assert "parameters/2.weight" not in found
    assert "buffers/1.running_mean" in found
    assert "optimizer/0.weight.exp_avg_sq" in found
    optimizer.param_groups[0]["lr"] = 2e-3
    assert str(te.digest(model, optimizer)) != str(found)
    flat, square = torch.nn.Module(), torch.nn.Module()
    flat.w, square.w = torch.nn.Parameter(torch.zeros(16)), torch.nn.Parameter(torch.zeros(4, 4))
    assert str(te.digest(flat)) != str(te.digest(square))
    with pytest.raises(ValueError, match=r"digest: kind='weights'; one of 'gradients', 'parameters', "):
        found.of("weights")


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda m, p: te.digest(3), TypeError, r"digest: model=3; a torch.nn.Module is accepted"),
        (lambda m, p: te.digest(m, 3), TypeError, r"digest: optimizer=3; a torch.optim.Optimizer or None"),
        (lambda m, p: te.trail(p, 3), TypeError, r"trail: model=3; a torch.nn.Module is accepted"),
        (lambda m, p: te.trail(3, m), TypeError, r"trail: path=3; a path is accepted"),
        (lambda m, p: te.trail(p, m, every=0), ValueError, r"trail: every=0; an int of at least 1"),
        (lambda m, p: te.trail(p, m, every=True), ValueError, r"trail: every=True; an int of at least 1"),
        (lambda m, p: te.trail(p, m, start=-1), ValueError, r"trail: start=-1; None or an int of at least 0"),
        (lambda m, p: te.digest(m.to("meta")), TypeError, r"parameters/weight is on the meta device; dense"),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=sentence):
        call(made("Linear"), tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_sparse_gradient_is_refused_by_its_name() -> None:
    model = torch.nn.Embedding(8, 4, sparse=True)
    model(torch.arange(3)).sum().backward()
    with pytest.raises(TypeError, match=r"digest: gradients/weight.grad is torch.sparse_coo; dense tensors"):
        te.digest(model)


# --- te.trail --------------------------------------------------------------------------------------------


def plain_run(path: Path, steps: int, every: int = 1, start: int | None = None) -> torch.nn.Module:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with te.trail(path, model, optimizer, every, start=start):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
    return model


def test_a_trail_has_a_line_for_each_step_of_any_model(tmp_path: Path) -> None:
    model = plain_run(tmp_path / "a", 5)
    trail = file.read(tmp_path / "a")
    assert list(trail.steps) == [1, 2, 3, 4, 5]
    named, digests = trail.steps[5]
    assert [one.name for one in named][:2] == ["gradients/0.weight.grad", "gradients/0.bias.grad"]
    assert [one.name for one in named][4:] == [f"parameters/{name}" for name, _ in model.named_parameters()]
    assert digests.tolist() == sums.sums([p.grad for p in model.parameters()] + list(model.parameters())).tolist()
    assert (tmp_path / "a").stat().st_size < 5 * (len(named) * 32 + 60) + 1000
    plain_run(tmp_path / "b", 5, every=2)
    assert list(file.read(tmp_path / "b").steps) == [2, 4]
    assert np.array_equal(file.read(tmp_path / "b").steps[4][1], trail.steps[4][1])


def test_a_line_stays_what_it_was(tmp_path: Path) -> None:
    """Of parameters of 16 and 32 bits and of seven bytes at an odd address, as the first version wrote them."""
    model = torch.nn.Linear(110, 41)
    model.weight.data = torch.arange(110 * 41).view(41, 110).bfloat16()
    model.bias.data = torch.arange(-20.0, 21.0)
    model.register_buffer("odd", torch.arange(100).to(torch.int8)[3:10])
    with te.trail(tmp_path / "a", model) as trail:
        trail.step()
    head, line = (tmp_path / "a").read_text().splitlines()
    assert head == (
        '{"twin_engine":"trail","version":1,"rank":0,"ranks":1,"tensors":[["parameters/weight","bfloat16",[41,110]],'
        '["parameters/bias","float32",[41]],["buffers/odd","int8",[7]]]}'
    )
    assert line == (
        '{"step":1,"digests":"tPVYOl4CAADk70o5PjZm7bA+UGslSGS9AAAgKAAAAAAAAGApgQGvIwAAMG6RTgc/CgwOBgAAAABul0RvHKK6r8pO'
        'BrS38mN7","crc32":832482419}'
    )


def test_a_trail_of_our_layers_has_their_fp8_state(tmp_path: Path) -> None:
    model, optimizer = trained()
    with te.trail(tmp_path / "a", model, optimizer) as trail:
        step(model, given(), RECIPES["delayed"], optimizer)
        trail.step()  # of no change
    found = file.read(tmp_path / "a")
    names = [one.name for one in found.steps[1][0]]
    assert "fp8/scaling_fwd.scale" in names
    assert "fp8/scaling_fwd.amax_history" in names
    assert np.array_equal(found.steps[1][1], found.steps[2][1])


def test_a_trail_changes_no_bit_and_ends(tmp_path: Path, same_bits) -> None:
    one, two = plain_run(tmp_path / "a", 3), plain_run(tmp_path / "b", 3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        same_bits(a, b)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    trail = te.trail(tmp_path / "c", one, optimizer)
    optimizer.step()
    trail.close()
    trail.close()
    optimizer.step()
    assert list(file.read(tmp_path / "c").steps) == [1]


def test_a_killed_process_leaves_a_trail_that_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a"
    plain_run(path, 4)
    whole = path.read_bytes()
    for cut in (1, 20, 150):
        path.write_bytes(whole[:-cut])
        trail = file.read(path)
        assert list(trail.steps) == [1, 2, 3]
        assert str(trail.notice).startswith(f"{path}: the last line is not whole (")
    plain_run(path, 2)
    assert "was left out: its process was stopped (said once)." in caplog.text
    trail = file.read(path)
    assert trail.notice is None
    assert list(trail.steps) == [1, 2, 3, 4, 5]
    before = trail.steps[2][1]
    plain_run(path, 1, start=1)  # goes on from a checkpoint of step 1: what was made again counts
    assert not np.array_equal(file.read(path).steps[2][1], before)
    assert list(file.read(path).steps) == [1, 2, 3, 4, 5]
    path.write_bytes(whole[:30])
    plain_run(path, 1)
    assert list(file.read(path).steps) == [1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda lines: ["my thesis", *lines], r"is no trail; te.trail writes those\.$"),
        (lambda lines: [], r"is no trail; te.trail writes those\.$"),
        (lambda lines: ["[1]", *lines], r"is no trail"),
        (
            lambda lines: [lines[0].replace('"version":1', '"version":7'), *lines[1:]],
            r"is a trail of version 7; a trail",
        ),
        (lambda lines: [lines[0], "{}", *lines[1:]], r"is damaged, at line 2 \('digests'\)\.$"),
        (
            lambda lines: [lines[0], lines[1].replace("A", "B", 1), *lines[2:]],
            r"is damaged, at line 2 \(its digests are not those that were written\)\.$",
        ),
        (lambda lines: [lines[0].replace("float32", "float3"), *lines[1:]], r"is no trail"),
        (lambda lines: [lines[0], lines[1].replace('"step":1', '"step":"1"')], r"at line 2 \(8 digests and a step"),
    ],
)
def test_another_file_is_one_sentence(change: Any, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    plain_run(path, 2)
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    content = path.read_bytes()
    with pytest.raises(files.Damaged, match=sentence):
        file.read(path)
    if content:
        with pytest.raises(files.Damaged, match=sentence):
            te.trail(path, made("Linear"))
    assert path.read_bytes() == content


def test_a_head_comes_again_where_tensors_are_others(tmp_path: Path) -> None:
    """Gradients that are there at times."""
    model = torch.nn.Linear(4, 4)
    with te.trail(tmp_path / "a", model) as trail:
        trail.step()
        model(torch.ones(4)).sum().backward()
        trail.step()
        model.zero_grad()
        trail.step()
    assert [json.loads(line).get("step") for line in (tmp_path / "a").read_text().splitlines()] == [
        None, 1, None, 2, None, 3,
    ]  # fmt: skip
    assert [len(named) for named, _ in file.read(tmp_path / "a").steps.values()] == [2, 4, 2]


def test_both_packages_have_them() -> None:
    assert (optimized.digest, optimized.trail) == (te.digest, te.trail)


@pytest.mark.gpu
def test_a_gpu_writes_the_same_trail(tmp_path: Path) -> None:
    tensors = [random_bytes(n * 4, n).view(torch.int32) for n in (1, 5000, (1 << 20) + 77, 3, 1 << 21)]
    assert torch.equal(sums.sums([x.cuda() for x in tensors]).cpu(), sums.sums(tensors))
    for device in ("cpu", "cuda"):
        model = made("LayerNormMLP", device)
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2)
        with te.trail(tmp_path / device, model, optimizer):
            for _ in range(9):
                model.zero_grad()
                step(model, given(device), RECIPES["delayed"], optimizer)
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "cuda").read_bytes()


@pytest.mark.parametrize(
    ("every", "wrong", "since", "before"),
    [
        (1, 1, "in step 1", "It is the first step that all of them have."),
        (1, 4, "in step 4", "3 steps before are the same."),
        (3, 5, "between steps 3 and 6", "1 steps before are the same."),
    ],
)
def test_two_trails_part_at_the_first_step_of_other_bits(
    tmp_path: Path, every: int, wrong: int, since: str, before: str
) -> None:
    """And after every step that is alike: those are counted."""
    for name in "ab":
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        with te.trail(tmp_path / name, torch.nn.ParameterList([weight]), optimizer, every):
            for step in range(1, 8):
                weight.grad = torch.full((3,), 2.0 if name == "b" and step == wrong else 1.0)
                optimizer.step()
    found = compare.compare([file.read(tmp_path / name) for name in "ab"])
    assert found.lines[0].startswith(f"Different bits {since}: ")
    assert before in found.lines
    assert not found.equal
