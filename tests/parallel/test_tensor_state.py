"""A run that stops in one process goes on on ranks, and back, with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.tensor_ranks import BF16, numbers, on_ranks, part

import reference as te
from reference.parallel.tensor_state import part_of_state, whole_state

RECIPE = te.DelayedScaling(amax_history_len=3)


def model(group: Any) -> torch.nn.Module:
    of_all: dict[str, Any] = {"params_dtype": BF16, "tp_group": group, "set_parallel_mode": True}
    of_all |= {"hidden_dropout": 0.1, "attention_dropout": 0.0, "activation": "swiglu", "sequence_parallel": True}
    return torch.nn.Sequential(te.TransformerLayer(256, 512, 4, **of_all), te.TransformerLayer(256, 512, 4, **of_all))


def step(layers: torch.nn.Module, seed: int, rank: int, count: int) -> torch.Tensor:
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    with te.autocast(recipe=RECIPE):
        y: torch.Tensor = layers(part(numbers(seed, 8, 2, 256), 0, rank, count))
    y.backward(part(numbers(seed + 50, 8, 2, 256, scale=2.0**-6), 0, rank, count))
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def go_on(group: Any, count: int, rank: int, state: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(77 + rank)  # what is drawn here is overwritten
    layers = model(group)
    layers.load_state_dict(part_of_state(layers, state, rank, count))
    return {"y": step(layers, 2, rank, count), "state": layers.state_dict()}


def test_a_run_goes_on_on_two_ranks_and_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    layers = model(None)
    step(layers, 1, 0, 1)
    state = {name: x.clone() for name, x in layers.state_dict().items()}
    found = on_ranks(2, tmp_path, go_on, {"": (state,)})
    assert_same_bits(step(layers, 2, 0, 1), torch.cat([one[""]["y"] for one in found]), "y")
    of_ranks, rank = model(None), model_of_a_rank()
    of_ranks.load_state_dict(whole_state(rank, [one[""]["state"] for one in found]))
    for name, x in layers.state_dict().items():
        assert_same_bits(x, of_ranks.state_dict()[name], name)
    assert_same_bits(step(layers, 3, 0, 1), step(of_ranks, 3, 0, 1), "y after that")
    with pytest.raises(ValueError, match=r"part_of_state: 0\.self_attention\.layernorm_qkv\.query_weight has shape"):
        part_of_state(rank, found[0][""]["state"], 0, 2)
    with pytest.raises(ValueError, match=r"^whole_state: 1 states of a model whose 0 is shared by 2 ranks"):
        whole_state(rank, [found[0][""]["state"]])


def model_of_a_rank() -> torch.nn.Module:
    """One that was made for a group of two, which is given later."""
    of_all: dict[str, Any] = {"params_dtype": BF16, "tp_size": 2, "set_parallel_mode": True, "activation": "swiglu"}
    return torch.nn.Sequential(te.TransformerLayer(256, 512, 4, **of_all), te.TransformerLayer(256, 512, 4, **of_all))
