"""A loop of microbatches that is left, however it is left, keeps nothing of its step."""

from typing import Any

import pytest
import torch

import reference as te


def left(order: te.parallel.GradientOrder) -> tuple[Any, ...]:
    return order.left, order._done


@pytest.mark.parametrize("how", ["microbatches", "pipelined"])
def test_an_error_in_the_loop_leaves_no_sums(how: str) -> None:
    model, order = torch.nn.Linear(4, 4), te.parallel.GradientOrder(4)

    def step() -> None:
        for number, _ in enumerate(getattr(order, how)(model, 4)):
            if number == 2:
                raise KeyError("in the third")
            model(torch.ones(1, 4)).sum().backward()

    with pytest.raises(KeyError, match="in the third"):
        step()
    assert left(order) == (0, [])
    model.zero_grad()
    for number in order.microbatches(model, 4):
        model(torch.full((1, 4), float(number))).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 6.0 / 4))


@pytest.mark.parametrize("how", ["microbatches", "pipelined"])
def test_a_loop_that_is_refused_inside_of_another_leaves_that_one_alone(how: str) -> None:
    model, order = torch.nn.Linear(4, 4), te.parallel.GradientOrder(4)
    for number in order.microbatches(model, 4):
        if number == 2:
            with pytest.raises(RuntimeError, match="a step of several microbatches is open in this thread"):
                next(getattr(order, how)(model, 4))
        model(torch.full((1, 4), float(number))).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 6.0 / 4))


@pytest.mark.parametrize("count", [1, 2])
def test_a_loop_that_is_left_early_changes_no_scale(count: int) -> None:
    """Also after the last backward: scales are updated when the loop ends."""
    model, order = te.Linear(16, 16), te.parallel.GradientOrder(count)
    recipe = te.DelayedScaling(amax_history_len=1)

    def run() -> None:
        with te.autocast(recipe=recipe):
            y = model(torch.full((16, 16), 3.0))
        y.sum().backward()

    def scales() -> list[float]:
        return [x for key in ("scaling_fwd", "scaling_bwd") for x in model.fp8_meta[key].scale.tolist()]

    for _ in order.microbatches(model, count):
        run()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        model.weight.mul_(64)
    before = scales()
    for number in order.microbatches(model, count):
        run()
        if number == count - 1:
            break
    assert scales() == before
    model.zero_grad(set_to_none=True)
    for _ in order.microbatches(model, count):
        run()
    assert scales() != before
