"""The benchmark of a layer that GPUs share, small, on two gloo ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.multiprocessing
from shared.processes import ranks

from optimized.bench.models import tensor_parallel
from optimized.bench.models.on_ranks import OURS
from optimized.bench.models.tensor_parallel import Way


def test_a_layer_that_ranks_share_is_timed_with_and_without_communication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda work, args, nprocs: ranks(work, args, nprocs))
    case = replace(tensor_parallel.CASE, hidden=256, ffn=256, heads=4, kv_heads=2, sequence=256)
    ways = (Way(OURS, False), Way(OURS, True), Way(OURS, True, passes=True))
    tensor_parallel.run(str(tmp_path / "found.json"), 2, "cpu", case, ways)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["way"] for row in rows] == [way.name for way in ways]
    assert all(row["ms"]["median"] > 0 for row in rows), rows
    shared = rows[1:]
    assert all(row[name]["median"] > 0 for row in shared for name in ("communication alone", "without communication"))
    assert shared[0]["bytes"] == shared[1]["bytes"] > 0  # of few tokens they are one way
