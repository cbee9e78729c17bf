"""The benchmark of several GPUs, small, on two gloo ranks, and its tables."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.multiprocessing
from shared.processes import ranks

from optimized.bench.models import data_parallel
from optimized.bench.models.data_parallel import FSDP, Stack, Way
from optimized.bench.models.on_ranks import OURS


def test_each_way_of_ours_makes_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda work, args, nprocs: ranks(work, args, nprocs))
    case = replace(data_parallel.CASE, hidden=32, ffn=64, heads=2, sequence=16, batch=1)
    llama = replace(data_parallel.LLAMA, hidden=32, ffn=64, heads=2, kv_heads=1, sequence=16)
    ways = tuple(way for way in data_parallel.WAYS if way.who == OURS)
    data_parallel.run(str(tmp_path / "found.json"), 2, "cpu", {case: Stack(3, 2), llama: Stack(1)}, ways)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["way"] for row in rows] == 2 * [way.name for way in ways]
    assert all(row["ms"]["median"] > 0 for row in rows), rows
    for of_model in data_parallel.by_model({"rows": rows}).values():
        shares = {row["way"]: share for row, share, _ in data_parallel.speedups(of_model)}
        assert [*shares] == [way.name for way in ways]
        assert shares[ways[0].name] == 1


def test_the_weights_with_which_backward_begins_stay_after_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last layers; all others are given up, and no layer is left out."""
    units: list[tuple[Any, bool]] = []

    def fully_shard(unit: Any, mesh: Any, reshard_after_forward: bool = True) -> None:
        units.append((unit, reshard_after_forward))

    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    monkeypatch.setattr(torch.distributed.device_mesh, "init_device_mesh", lambda *given: None)
    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", fully_shard)
    monkeypatch.setattr(data_parallel, "copy_engine_all_gather", lambda model: None)
    case = replace(data_parallel.CASE, hidden=32, ffn=64, heads=2, sequence=16, batch=1)
    data_parallel.stepper(Way(OURS, FSDP), case, Stack(5, 2), torch.device("cpu"))
    *parts, (model, _) = units
    assert [layer for unit, _ in parts for layer in unit] == list(model)
    assert [given_up for _, given_up in parts] == [True, True, False]


def test_a_table_says_how_many_layers_are_sharded_together() -> None:
    """Only where it is more than one; a result of before has no such number."""
    first, last = data_parallel.WAYS[:2]
    origin = {"cuda": "13.0", "torch": "2", "cupy": "14", "date": "2026-11-21T", "kernels": {}}
    rows = [
        {"model": model, "layers": 24, **stack, "tokens": 4096, "way": way.name, "ms": {"median": ms}, "GiB": 1.25}
        for model, stack in {"small": {"together": 4}, "large": {"together": 1}, "older": {}}.items()
        for way, ms in ((first, 8.0), (last, 10.0))
    ]
    found = data_parallel.tables({"ranks": 2, "rows": rows, "provenance": origin})
    assert ["4 layers together" in one.how for one in found] == [True, False, False]
    assert ["together" in one.how for one in found] == [True, False, False]
    for one, model in zip(found, ("small", "large", "older"), strict=True):
        assert f"24 layers of {model}'s shape, 4,096 tokens on each of 2 GPUs" in one.how
        assert one.rows == ((first.name, "8.0", "1.00", "", "1.2"), (last.name, "10.0", "0.80", "", "1.2"))
