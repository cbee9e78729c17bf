"""Scales that ranks share: which modules take part in a reduction of amaxes."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.tensor_ranks import BF16, in_one, numbers, on_ranks

import reference as te
from reference.recipe import DelayedScaling
from reference.state import scaling

RECIPE = DelayedScaling(amax_history_len=2)


def step(layer: Any, seed: int) -> None:
    with te.autocast(recipe=RECIPE):
        y = layer(numbers(seed, 256, 1, layer.in_features))
    y.backward(numbers(seed + 1, *y.shape))


def made(width: int) -> te.Linear:
    torch.manual_seed(width)
    return te.Linear(width, 32, params_dtype=BF16)


def program(group: Any, count: int, rank: int, how: str, meeting: str) -> dict[str, torch.Tensor]:
    """The scales of a layer; one that was made before it is gone, on rank 0 only when garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        before, layer = made(64), made(16)
        own = dist.new_group(list(range(count))) if how == "destroyed" and group is not None else None
        te.parallel.share_tokens(before, own)
        step(before, 1)
        step(layer, 3)
        if rank == 0:
            before.itself = [before]  # type: ignore[assignment]
        del before
        if own is not None:  # nothing is reduced in it again
            gc.collect()
            dist.destroy_process_group(own)
        if how == "another world" and group is not None:
            gc.collect()
            dist.destroy_process_group()
            if rank == 1:  # as a process that was not there
                scaling._MODULES.clear()
                scaling.register(layer)
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
        step(layer, 7)
        gc.collect()
        step(layer, 9)
        return {key: getattr(layer.fp8_meta[key], part) for key in scaling.KEYS for part in ("scale", "amax_history")}
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["kept", "destroyed", "another world"])
def test_ranks_may_collect_garbage_at_different_times(how: str, tmp_path: Path) -> None:
    case = {how: (how, str(tmp_path / "meeting"))}
    for one in on_ranks(2, tmp_path, program, case):
        for name, x in in_one(program, case)[how].items():
            assert_same_bits(x, one[how][name], name)
