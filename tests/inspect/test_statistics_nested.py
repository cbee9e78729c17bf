"""`collect_stats` inside of another one, beside `te.record`, in several threads, and left by an error."""

import contextlib
import copy
import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import reference as te
from reference.inspect.recorded_step.file import read
from reference.inspect.recorded_step.replay import replay
from reference.nn.core import autograd

pytestmark = pytest.mark.usefixtures("same_runner")
BF16 = torch.bfloat16


def made() -> Any:
    torch.manual_seed(4)
    return te.TransformerLayer(32, 64, 2, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0)


def step(model: Any, i: int = 0) -> None:
    x = torch.arange(2048).view(32, 2, 32).remainder(7 + i).to(BF16).requires_grad_()
    with te.autocast():
        y = model(x)
    y.float().square().mean().backward()


@functools.cache
def alone(part: str = "", every: int = 1, steps: int = 3) -> list[str]:
    """What one `collect_stats` of that part measures."""
    model = made()
    with te.collect_stats(model.get_submodule(part), every=every) as stats:
        for i in range(steps):
            step(model, i)
    return samples(stats)


def samples(stats: Any) -> list[str]:
    return sorted(map(str, stats.samples()))


PARTS = ["", "layernorm_mlp", "self_attention.proj"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("second", PARTS)
@pytest.mark.parametrize("first", PARTS)
def test_one_inside_of_another_measures_what_each_would_alone(first: str, second: str) -> None:
    for every in ((1, 1), (2, 1)):
        model = made()
        one, two = (te.collect_stats(model.get_submodule(n), k) for n, k in zip((first, second), every, strict=True))
        with one, two:
            for i in range(3):
                step(model, i)
        assert samples(one) == alone(first, every[0])
        assert samples(two) == alone(second, every[1])


@pytest.mark.parametrize("first", [0, 1])
def test_they_may_end_in_any_order_and_by_an_error(first: int) -> None:
    model, usual = made(), autograd.runner
    every = [te.collect_stats(model, 1), te.collect_stats(model.layernorm_mlp, 1)]
    for one in every:
        one.__enter__()
    step(model)
    every[first].__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    step(model, 1)
    every[1 - first].__exit__(None, None, None)
    assert autograd.runner is usual
    step(model, 2)
    for i, part in enumerate(("", "layernorm_mlp")):
        assert samples(every[i]) == alone(part, steps=1 + (i != first))


@pytest.mark.sample(2)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("outer", ["record", "statistics"])
def test_a_step_is_recorded_while_statistics_are_open(outer: str, every: int, tmp_path: Path) -> None:
    """Each statistics' hook comes and goes while the recorder's stands in the chain."""
    model, usual = made(), autograd.runner
    stats = te.collect_stats(model, every)
    with contextlib.ExitStack() as stack:
        if outer == "statistics":
            stack.enter_context(stats)
            step(model)
        for i in range(1, 3):
            model.zero_grad()
            with te.record(model, tmp_path / str(i)), stats if outer == "record" else contextlib.nullcontext():
                step(model, i)
            recording = read(tmp_path / str(i))
            assert replay(recording).equal
            assert {"self_attention.proj", "layernorm_mlp"} <= {op.at for op in recording.ops}
    assert autograd.runner is usual
    found = [one.step for one in stats.samples() if one.role == "input" and one.part == "fc1"]
    assert found == [i for i in range(3 if outer == "statistics" else 2) if i % every == 0]


def test_threads_measure_their_own_models() -> None:
    usual, expected = autograd.runner, alone()
    found: dict[int, list[str]] = {}
    models = [made() for _ in range(4)]

    def run(number: int) -> None:
        model = models[number]
        with te.collect_stats(model, 1) as stats:
            for i in range(3):
                step(model, i)
        found[number] = samples(stats)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [found[i] for i in range(4)] == [expected] * 4
    assert autograd.runner is usual


def test_a_copy_made_inside_is_not_measured() -> None:
    model = made()
    with te.collect_stats(model, 1) as stats:
        step(model)
        step(copy.deepcopy(model), 1)
    assert {one.step for one in stats.samples()} == {0}
