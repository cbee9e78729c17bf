"""A cached FP8 weight: what drops it, and what a copy of its module has of it."""

import pickle

import pytest
import torch
from test_linear import CACHING, RECIPES, numbers

import reference as te

Layer = torch.nn.Module


def run(module: Layer, x: torch.Tensor, first: bool | None) -> torch.Tensor:
    with te.autocast(recipe=RECIPES[0]):
        return module(x, is_first_microbatch=first)


@pytest.mark.parametrize("name", CACHING)
def test_reset_parameters_drops_the_cached_weight(name: str, same_bits) -> None:
    layer, fresh = CACHING[name](), CACHING[name]()
    x = numbers(30, 8, 32).to(torch.bfloat16).requires_grad_()
    run(layer, x, True)
    layer.reset_parameters()
    fresh.load_state_dict(layer.state_dict())
    same_bits(run(layer, x, False), run(fresh, x, None))


@pytest.mark.parametrize("name", CACHING)
def test_a_module_with_a_cached_weight_can_be_pickled(name: str, same_bits) -> None:
    layer = CACHING[name]()
    x = numbers(30, 8, 32).to(torch.bfloat16).requires_grad_()
    run(layer, x, True)
    copied = pickle.loads(pickle.dumps(layer))
    same_bits(run(layer, x, False), run(copied, x, False))
