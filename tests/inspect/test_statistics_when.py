"""`collect_stats`: which forwards and modules it measures, and that no bit of training changes."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.statistics_cases import BF16, CURRENT, DELAYED, LAYERS, made, numbers, step

import reference as te
from reference.inspect import statistics
from reference.nn.core import autograd

pytestmark = pytest.mark.usefixtures("same_runner")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT, None], ids=["delayed", "current", "16 bits"])
def test_no_bit_of_training_changes(name: str, recipe: Any) -> None:
    model = made(name)
    other = copy.deepcopy(model)
    with te.collect_stats(model, every=2, recipes=[CURRENT]):
        found = [step(model, i, recipe) for i in range(4)]
    for i in range(4):
        for a, b in zip(found[i], step(other, i, recipe), strict=True):
            assert_same_bits(a, b)


ROLES = ("input", "weight", "grad_output")


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (9, [0])])
def test_each_nth_forward_is_measured(every: int, expected: list[int]) -> None:
    model = made("Linear")
    with te.collect_stats(model, every=every) as stats:
        for i in range(5):
            step(model, i)
            installed = autograd.runner
            assert (type(installed) is statistics._Observer) == (i % every == 0)
    assert sorted({one.step for one in stats.samples()}) == expected
    assert {role: [one.step for one in stats.samples() if one.role == role] for role in ROLES} == dict.fromkeys(
        ROLES, expected
    )


def test_opened_again_it_goes_on() -> None:
    model = made("Linear")
    stats = te.collect_stats(model, every=2)
    for i in range(4):
        with stats:
            step(model, i)
    assert [one.step for one in stats.samples() if one.role == "input"] == [0, 2]
    assert stats.forwards == 4


def test_values_can_be_read_inside() -> None:
    model = made("Linear")
    with te.collect_stats(model, every=1) as stats:
        step(model)
        assert len(stats.samples()) == 3
        step(model, 1)
        assert len(stats.samples()) == 6
    assert len(stats.samples()) == 6


def test_a_checkpoints_recomputation_is_not_measured_again() -> None:
    plain, recomputed = made("two layers"), made("two layers")
    with te.collect_stats(plain, every=1) as stats:
        step(plain)
    for whole in (False, True):
        model = copy.deepcopy(recomputed)
        part = model if whole else model[0]
        forward = (
            (lambda x, m=model: te.checkpoint(m, x)) if whole else (lambda x, m=model: m[1](te.checkpoint(m[0], x)))
        )
        target = model if whole else part
        with te.collect_stats(target, every=1) as again:
            step(model, forward=forward)
        prefix = "" if whole else "0."
        expected = [one for one in stats.summary() if one.layer.startswith(prefix)]
        found = [dataclasses.replace(one, layer=prefix + one.layer) for one in again.summary()]
        assert found == expected
        assert again.forwards == 1


def test_only_the_models_layers_are_measured() -> None:
    model, other = made("two layers"), made("Linear")
    with te.collect_stats(model[1], every=1) as stats:
        step(model)
        step(other)
    assert {one.layer.split(".")[0] for one in stats.samples()} == {"self_attention", "layernorm_mlp"}
    assert len(stats.samples()) == 12


def test_two_models_at_once() -> None:
    """Closed in either order."""
    for order in ((0, 1), (1, 0)):
        models = [made("Linear"), made("LayerNormLinear")]
        stats = [te.collect_stats(model, every=1) for model in models]
        for one in stats:
            one.__enter__()
        for model in models:
            step(model)
        assert all(len(one.samples()) == 3 for one in stats)
        stats[order[0]].__exit__(None, None, None)
        step(models[order[1]], 1)
        stats[order[1]].__exit__(None, None, None)
        assert len(stats[order[1]].samples()) == 6
        assert len(stats[order[0]].samples()) == 3


def test_a_backward_after_the_end_is_not_measured_and_is_the_same() -> None:
    model = made("TransformerLayer")
    expected = step(copy.deepcopy(model))
    x = numbers(0, 16, 2, 32).requires_grad_()
    torch.manual_seed(0)
    with te.collect_stats(model, every=1) as stats, te.autocast(recipe=DELAYED):
        y = model(x)
    y.backward(numbers(100, *y.shape) * 2.0**-16)
    assert_same_bits(x.grad, expected[1])
    assert {one.role for one in stats.samples()} == {"input", "weight"}


def test_weights_without_numbers_to_compare_with_are_not_measured() -> None:
    """Those kept in FP8, and those that an earlier microbatch has cast."""
    with te.quantized_model_init():
        kept = te.Linear(32, 48, params_dtype=BF16)
    with te.collect_stats(kept, every=1) as stats:
        step(kept)
    assert [one.role for one in stats.samples()] == ["input", "grad_output"]
    cached: Any = made("Linear")
    with te.collect_stats(cached, every=1) as stats:
        for first in (True, False, False):
            step(cached, forward=lambda x, first=first: cached(x, is_first_microbatch=first))
    assert [one.step for one in stats.samples() if one.role == "weight"] == [0]
    assert [one.step for one in stats.samples() if one.role == "input"] == [0, 1, 2]


def test_an_error_inside_goes_on_and_leaves_nothing_behind() -> None:
    model = made("Linear")
    stats = te.collect_stats(model, every=1)

    def fails() -> None:
        with stats:
            step(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(stats.samples()) == 3
    assert not model._forward_pre_hooks
    with pytest.raises(ZeroDivisionError), te.collect_stats(model, every=1):
        raise ZeroDivisionError
