"""Amaxes are maximised over a process group (gloo, two processes), and scales stay equal on all ranks."""

import copy
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import reference as te


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def data(rank: int, step: int) -> torch.Tensor:
    return ((torch.arange(8 * 32).reshape(8, 32) * 3).remainder(7) - 3).to(torch.bfloat16) * (1 + rank * 4 + step)


def steps(layer: te.Linear, rank: int, recipe: te.DelayedScaling, group: object = None) -> dict[str, torch.Tensor]:
    for step in range(3):
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            y = layer(data(rank, step))
        y.backward(torch.full_like(y, 2.0**rank))
    forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
    return {
        "fwd": forward.scale.clone(),
        "bwd": backward.scale.clone(),
        "history": forward.amax_history.clone(),
    }


def worker(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
        fresh = copy.deepcopy(layer)
        lonely = copy.deepcopy(layer)
        group = dist.new_group([0, 1])
        results = {
            "default": steps(layer, rank, te.DelayedScaling(amax_history_len=4)),
            "group": steps(fresh, rank, te.DelayedScaling(amax_history_len=4), group),
            "off": steps(lonely, rank, te.DelayedScaling(amax_history_len=4, reduce_amax=False)),
        }
        copy.deepcopy(fresh)  # a module that has seen a process group can still be copied
        torch.save(results, Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_amax_reduction(tmp_path: Path) -> None:
    mp.spawn(worker, args=(free_port(), str(tmp_path)), nprocs=2, join=True)
    ranks = [torch.load(tmp_path / f"rank{r}.pt") for r in range(2)]
    for name in ("default", "group"):
        for key in ("fwd", "bwd", "history"):
            assert torch.equal(ranks[0][name][key], ranks[1][name][key]), (name, key)
        assert ranks[0][name]["fwd"][0].item() == torch.tensor(448.0).div(3 * 7).item()
        assert ranks[0][name]["bwd"][0].item() == 57344 / 2
    assert not torch.equal(ranks[0]["off"]["fwd"], ranks[1]["off"]["fwd"])
    assert ranks[0]["off"]["fwd"][0].item() == torch.tensor(448.0).div(3 * 3).item()
