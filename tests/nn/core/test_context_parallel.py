"""Parallelism over one rank: Transformer Engine's arguments for it are accepted, and change no bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reference as te
from reference.recipe import Float8CurrentScaling

BF16 = torch.bfloat16
PLAIN: dict[str, Callable[..., Any]] = {
    "Linear": lambda **more: te.Linear(32, 32, **more),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(32, 32, **more),
    "LayerNormMLP": lambda **more: te.LayerNormMLP(32, 64, **more),
    "MultiheadAttention": lambda **more: te.MultiheadAttention(32, 4, attention_dropout=0.0, **more),
    "TransformerLayer": lambda **more: te.TransformerLayer(
        32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, **more
    ),
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process group of one rank, and one of which this process is no part."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=0, world_size=1)
    yield dist.new_group([0]), dist.GroupMember.NON_GROUP_MEMBER
    dist.destroy_process_group()


def trained(layer: torch.nn.Module) -> list[torch.Tensor]:
    x = (torch.arange(4 * 2 * 32).reshape(4, 2, 32).remainder(17) - 8).to(BF16).requires_grad_()
    with te.autocast(recipe=te.DelayedScaling(amax_history_len=2)):
        y = layer(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", PLAIN)
def test_a_group_of_one_rank_changes_no_bit(name: str, groups: Any, same_bits: Any) -> None:
    results = []
    modes: dict[str, Any] = {"set_parallel_mode": True}
    if name in ("Linear", "LayerNormLinear"):
        modes = {"parallel_mode": "column"}
    for more in ({}, {"tp_group": groups[0], "tp_size": 1, "sequence_parallel": True, **modes}):
        torch.manual_seed(1)
        layer = PLAIN[name](params_dtype=BF16, **more)
        if more:
            layer.set_tensor_parallel_group(groups[0])
        results.append(trained(layer))
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("name", PLAIN)
def test_a_group_without_this_process_is_refused_by_name(name: str, groups: Any) -> None:
    sentence = f"^{name}: tp_group=<a process group of -1 ranks>; None and a process group of which this process is a"
    with pytest.raises(ValueError, match=sentence):
        PLAIN[name](tp_group=groups[1])
    with pytest.raises(ValueError, match=f"^{name}: tp_size=0; an int from 1"):
        PLAIN[name](tp_size=0)


def test_attentions_take_megatrons_arguments_for_context_parallelism(groups: Any) -> None:
    core = te.DotProductAttention(
        4, 8, tp_group=groups[0], cp_group=groups[0], cp_global_ranks=[0], cp_stream=torch.Stream(device="cpu")
    )
    assert core.num_attention_heads == 4
    with pytest.raises(ValueError, match=r"cp_global_ranks=\[0, 1\]; None and a list of the ranks of cp_group, 1, are"):
        te.DotProductAttention(4, 8, cp_group=groups[0], cp_global_ranks=[0, 1])


def test_the_group_of_a_layer_can_be_given_later(groups: Any) -> None:
    layer = te.Linear(32, 32)
    layer.set_tensor_parallel_group(groups[0])
    layer.set_tensor_parallel_group(None)
    with pytest.raises(TypeError, match=r"^Linear: tp_group='tp'; None and a process group of which this process is a"):
        layer.set_tensor_parallel_group("tp")


@pytest.mark.parametrize("name", ["DotProductAttention", "MultiheadAttention", "TransformerLayer"])
def test_a_group_for_context_parallelism_can_be_given_later(
    name: str, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo and Megatron-LM give it to every layer of a model that has the method."""
    layer = te.DotProductAttention(4, 8) if name == "DotProductAttention" else PLAIN[name]()
    layer.set_context_parallel_group(groups[0], [0], torch.Stream(device="cpu"))
    layer.set_context_parallel_group(groups[0], [0], None, "a2a")
    layer.set_context_parallel_group(None, None, None)
    with pytest.raises(ValueError, match=rf"^{name}: cp_comm_type='ring'; one of \('p2p', 'all_gather', "):
        layer.set_context_parallel_group(None, None, None, "ring")
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    refused = "cp_comm_type='p2p' with a cp_group of 2 ranks is not offered; 'all_gather' is accepted"
    with pytest.raises(NotImplementedError, match=rf"^{name}: {refused}"):
        layer.set_context_parallel_group(groups[0], [0, 1], None)
    if name != "DotProductAttention":
        with pytest.raises(
            ValueError, match=rf"^{name}: tp_group=<a process group of 2 ranks>; the layer was made for"
        ):
            layer.set_tensor_parallel_group(groups[0])


@pytest.mark.parametrize("other", [object(), Float8CurrentScaling(), "MXFP8BlockScaling"])
def test_an_autocast_that_is_off_reads_no_recipe(other: Any, same_bits: Any) -> None:
    layer, x = te.Linear(32, 32, params_dtype=BF16), torch.ones(4, 32, dtype=BF16)
    recipe = te.DelayedScaling(amax_history_len=2)
    with te.autocast(recipe=recipe):
        with te.autocast(enabled=False, recipe=other):
            off = layer(x)
        layer(x)
    same_bits(off, layer(x))
    assert layer.fp8_meta["recipe"] is recipe.fixed
    with te.fp8_autocast(enabled=False, fp8_recipe=other):
        same_bits(off, layer(x))


@pytest.mark.parametrize("settings", [{}, {"enabled": False, "calibrating": True}])
def test_an_autocast_that_is_on_refuses_other_recipes(settings: dict[str, bool]) -> None:
    with pytest.raises(TypeError, match=r"autocast: recipe='delayed'; a recipe of te\.recipe or None is accepted"):
        te.autocast(recipe="delayed", **settings)  # type: ignore[arg-type]
