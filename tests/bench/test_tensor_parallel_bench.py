"""The benchmark of a layer that GPUs share, small, on two gloo ranks, and PyTorch's layer in it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from shared.processes import ranks

from optimized.bench.layers import layer_models
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


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_that_share_a_layer_share_its_tokens(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, shapes = replace(tensor_parallel.CASE, hidden=16, sequence=48), list[list[int]]()
    layer = torch.nn.Linear(16, 16, bias=False).to(case.dtype)
    layer.register_forward_pre_hook(lambda _, given: shapes.append(list(given[0].shape)))
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    monkeypatch.setattr(tensor_parallel, "_in_fp8", lambda *given: layer)
    tensor_parallel.stepper(Way(OURS, shared), case, torch.device("cpu"))()
    assert shapes == [[24 if shared else 48, 1, 16]]


def test_pytorchs_layer_is_the_plain_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, with weights of the same numbers; activations have the batch first here."""
    case = replace(tensor_parallel.CASE, hidden=64, ffn=96, heads=4, kv_heads=2, sequence=16)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, p: float) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    monkeypatch.setattr(layer_models, "cudnn", attend)
    found, plain = tensor_parallel.Layer(case).double(), layer_models.Llama(case).double()
    attention, mlp = found.attention, found.mlp
    for weight, parts in (
        (plain.qkv.weight, (attention.wq, attention.wk, attention.wv)),
        (plain.projection.weight, (attention.wo,)),
        (plain.fc1.weight, (mlp.w1, mlp.w3)),
        (plain.fc2.weight, (mlp.w2,)),
    ):
        weight.data.copy_(torch.cat([part.weight.data for part in parts]))
    x = torch.randn(2, 16, 64, dtype=torch.float64)
    torch.testing.assert_close(found(x), plain(x.transpose(0, 1)).transpose(0, 1), rtol=1e-9, atol=1e-9)
