"""A packed FP8 state takes the rows of the checkpoint that torch.distributed.checkpoint loads; else it is a tensor."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import reference as te
from reference.checkpoints.packed_state import PackedState

KEY = "_extra_state"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(rows: int | None, seed: int = 0) -> torch.nn.Module:
    """A model that has run in FP8 with a history of so many rows; a fresh one for None."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(te.Linear(32, 32), te.LayerNormMLP(32, 64))
    for _ in range(0 if rows is None else 2):
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=rows or 1)):
            model(torch.randn(16, 32)).square().mean().backward()
    return model


@pytest.mark.parametrize("saved", [None, 1, 8, 1024])
@pytest.mark.parametrize("mine", [None, 3, 16])
def test_a_distributed_checkpoint_loads_into_another_length(
    saved: int | None, mine: int | None, tmp_path: Path
) -> None:
    there, here = trained(saved), trained(mine, 1)
    dcp.save({"model": there.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state: dict[str, Any] = {"model": here.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    here.load_state_dict(state["model"])
    found = here.state_dict()
    for name, x in there.state_dict().items():
        assert x.shape == found[name].shape
        assert torch.equal(x, found[name]), name


def test_another_number_of_columns_is_refused_as_before(tmp_path: Path) -> None:
    dcp.save({KEY: te.LayerNormMLP(32, 64).state_dict()[KEY]}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({KEY: te.Linear(32, 32).state_dict()[KEY]}, checkpoint_id=tmp_path, no_dist=True)


def test_it_is_a_plain_tensor_to_everyone_else(tmp_path: Path) -> None:
    packed = trained(4).state_dict()[f"0.{KEY}"]
    assert type(packed) is PackedState
    assert packed.size() == packed.shape == torch.Size([5, 5])
    assert packed.size(0) == 5
    for other in (copy.deepcopy(packed), copy.copy(packed), packed.clone(), packed.detach(), packed + 0):
        assert type(other) is torch.Tensor
        assert torch.equal(other, packed)
    file = io.BytesIO()
    torch.save({KEY: packed}, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)[KEY]
    assert type(back) is torch.Tensor
    assert torch.equal(back, packed)
    safetensors.torch.save_file({KEY: packed}, tmp_path / "a")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "a")[KEY], packed)
