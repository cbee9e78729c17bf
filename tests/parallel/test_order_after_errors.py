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
