"""Amaxes are maximised over a process group, and scales stay equal on all ranks."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.processes import free_port, ranks

import reference as te


def data(rank: int, step: int) -> torch.Tensor:
    return ((torch.arange(8 * 32).reshape(8, 32) * 3).remainder(7) - 3).to(torch.bfloat16) * (1 + rank * 4 + step)


def steps(layer: te.Linear, rank: int, recipe: te.DelayedScaling, group: object = None) -> dict[str, torch.Tensor]:
    for step in range(3):
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            y = layer(data(rank, step).to(layer.weight.device))
        y.backward(torch.full_like(y, 2.0**rank))
    forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
    return {"fwd": forward.scale.cpu(), "bwd": backward.scale.cpu(), "history": forward.amax_history.cpu()}


def in_two_groups(
    shared: te.Linear, lonely: te.Linear, rank: int, groups: tuple[object, object]
) -> list[dict[str, torch.Tensor]]:
    """Steps of two layers under one recipe, each with a process group of its own."""
    recipe = te.DelayedScaling(amax_history_len=4)
    for step in range(3):
        with te.autocast(recipe=recipe, amax_reduction_group=groups[0]):
            y = shared(data(rank, step).to(shared.weight.device))
            with te.autocast(recipe=recipe, amax_reduction_group=groups[1]):
                z = lonely(data(rank, step).to(shared.weight.device))
        (y + z).backward(torch.full_like(y, 2.0**rank))
    metas = [(layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]) for layer in (shared, lonely)]
    return [
        {"fwd": forward.scale.cpu(), "bwd": backward.scale.cpu(), "history": forward.amax_history.cpu()}
        for forward, backward in metas
    ]


def worker(rank: int, processes: int, backend: str, port: int, folder: str) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        import optimized  # noqa: F401  (registers the CUDA implementations)

        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    try:
        torch.manual_seed(0)
        layer = te.Linear(32, 16, params_dtype=torch.bfloat16).to(device)
        fresh = copy.deepcopy(layer)
        lonely = copy.deepcopy(layer)
        shared, apart, changing = (copy.deepcopy(layer) for _ in range(3))
        group = dist.new_group(range(processes))
        own = [dist.new_group([one]) for one in range(processes)][rank]
        with te.quantized_model_init(recipe=te.DelayedScaling(amax_history_len=4)):
            kept = te.Linear(32, 16, params_dtype=torch.bfloat16).to(device)
        with torch.no_grad():
            kept.weight.mul_(1 + rank)  # weights differ and their scale does not
        results = {
            "default": steps(layer, rank, te.DelayedScaling(amax_history_len=4)),
            "group": steps(fresh, rank, te.DelayedScaling(amax_history_len=4), group),
            "kept in FP8": steps(kept, rank, te.DelayedScaling(amax_history_len=4)),
            "off": steps(lonely, rank, te.DelayedScaling(amax_history_len=4, reduce_amax=False)),
        }
        results["shared"], results["apart"] = in_two_groups(shared, apart, rank, (group, own))
        recipe = te.DelayedScaling(amax_history_len=4)
        steps(changing, rank, recipe, own)
        results["changed"] = steps(changing, rank, recipe, group)
        copy.deepcopy(fresh)  # a module that has seen a process group can still be copied
        torch.save(results, Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def run(backend: str, folder: Path, processes: int) -> list[dict[str, dict[str, torch.Tensor]]]:
    folder.mkdir()
    ranks(worker, (processes, backend, free_port(), str(folder)), processes)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)]


def test_amax_reduction(tmp_path: Path) -> None:
    ranks = run("gloo", tmp_path / "gloo", 2)
    for name in ("default", "group", "kept in FP8", "shared"):
        for key in ("fwd", "bwd", "history"):
            assert torch.equal(ranks[0][name][key], ranks[1][name][key]), (name, key)
        assert ranks[0][name]["fwd"][0].item() == torch.tensor(448.0).div(3 * 7).item()
        assert ranks[0][name]["bwd"][0].item() == 57344 / 2
    assert ranks[0]["kept in FP8"]["fwd"][1] < ranks[0]["default"]["fwd"][1] / 1.5, "the larger weights decide"
    for name in ("off", "apart"):
        for key in ("fwd", "bwd", "history"):
            assert not torch.equal(ranks[0][name][key], ranks[1][name][key]), (name, key)
            assert torch.equal(ranks[0]["off"][key], ranks[0][name][key]), (name, key)
    assert torch.equal(ranks[0]["changed"]["fwd"], ranks[1]["changed"]["fwd"]), "a layer follows its last group"
    assert ranks[0]["off"]["fwd"][0].item() == torch.tensor(448.0).div(3 * 3).item()


def test_the_collective_runs_in_the_group_of_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes have no group of several that is not the default one: here is one that only notes its calls."""
    seen: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda amaxes, op, group: seen.append((list(amaxes.shape), op, group)))
    layers = [te.Linear(32, 16, params_dtype=torch.bfloat16) for _ in range(3)]
    recipe = te.DelayedScaling(amax_history_len=4)
    every, some = dist.ProcessGroup(0, 2), dist.ProcessGroup(0, 2)
    with te.autocast(recipe=recipe, amax_reduction_group=every):
        layers[0](data(0, 0))
        layers[1](data(0, 0))
        with te.autocast(recipe=recipe, amax_reduction_group=some):
            layers[2](data(0, 0))
    ours = [call for call in seen if call[-1] in (every, some)]  # modules of other tests may still be registered
    assert ours == [([6], dist.ReduceOp.MAX, every), ([3], dist.ReduceOp.MAX, some)]


@pytest.mark.gpu
def test_every_gpu_over_nccl_has_the_scales_of_a_cpu_over_gloo(tmp_path: Path) -> None:
    processes = torch.cuda.device_count()
    expected, actual = (run(backend, tmp_path / backend, processes) for backend in ("gloo", "nccl"))
    for rank, name in itertools.product(range(processes), expected[0]):
        for key, value in expected[rank][name].items():
            assert_same_bits(value, actual[rank][name][key], f"rank {rank}, {name}, {key}")
