"""A cached FP8 weight: what drops it, and what a copy of its module has of it."""

import copy
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


@pytest.mark.parametrize("name", CACHING)
def test_what_inference_mode_has_cached_is_read_outside_and_by_a_copy(name: str, same_bits) -> None:
    layer = CACHING[name]()
    x = numbers(30, 8, 32).to(torch.bfloat16)
    with torch.inference_mode():
        first = run(layer, x, True)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for p in (*layer.parameters(), *copied.parameters()):
            if p.dim() == 2:
                p.mul_(2)  # not seen: the first microbatch has cast the weights
        same_bits(run(layer, x, False), first)
        same_bits(run(copied, x, False), first)
        assert not torch.equal(run(layer, x, None), first)
    y = run(layer, x.requires_grad_(), False)  # trains: what is cached has no transpose, so the weights are cast anew
    y.sum().backward()
