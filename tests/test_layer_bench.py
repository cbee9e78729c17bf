"""`twin bench layer`: what it counts, and that its contestants compute the same layer."""

import dataclasses
import os
from typing import Any

import pytest
import torch

import reference as te
from optimized.bench import layer, layer_models, layer_tables, tutorial_layers

CASE = layer_models.Case("tiny", 64, 128, 4, 16, 2, torch.float32, True, 0.0)


def test_work_of_the_ops() -> None:
    a, b = torch.empty(32, 64).bfloat16(), torch.empty(16, 64).bfloat16()
    out = torch.empty(32, 16).bfloat16()
    found = layer.describe("gemm", (a, b, None, torch.bfloat16), out, causal=True)
    assert found == {
        "op": "gemm",
        "sizes": "32×16×64",
        "bytes": 2 * (32 * 64 + 16 * 64 + 32 * 16),
        "flop": 2 * 32 * 16 * 64,
        "bound": "product",
    }
    q = torch.empty(2, 4, 8, 16).bfloat16()
    forward = layer.describe("attention", (q, q, q, 1.0, "causal"), (q,), causal=True)
    backward = layer.describe("attention_backward", (q, q, q, q, q), (q, q, q), causal=False)
    assert forward["flop"] == 4 * 2 * 4 * 8 * 8 * 16 // 2
    assert backward["flop"] == 10 * 2 * 4 * 8 * 8 * 16
    history = torch.empty(4, 3)  # changed in place: not counted twice
    cast = layer.describe("cast", (a, torch.empty(3), history), (a.to(torch.float8_e4m3fn), torch.empty(1)), False)
    assert cast["bytes"] == 32 * 64 * 3 + 4 * (3 + 12 + 1)
    assert cast["bound"] == "memory"


def test_share_of_a_ceiling() -> None:
    ceilings = {"32×16×64": 0.5, "attention backward": 3.0, "copy": 100.0}
    assert (
        layer._of_ceiling({"op": "gemm", "bound": "product", "sizes": "32×16×64", "count": 2, "ms": 2}, ceilings) == 0.5
    )
    backward: dict[str, Any] = {"op": "attention_backward", "bound": "attention", "count": 1, "ms": 4}
    assert layer._of_ceiling(backward, ceilings) == 0.75
    assert layer._of_ceiling({"op": "add", "bound": "memory", "bytes": 100, "ms": 4}, ceilings) == 0.25
    assert (
        layer._of_ceiling({"op": "gemm", "bound": "product", "sizes": "1×1×1", "count": 1, "ms": 1}, ceilings) is None
    )


def test_the_twelve_products() -> None:
    products = CASE.products()
    assert len(products) == 12
    assert products["fc1.fprop"] == (32, 128, 64, "fast")
    assert products["fc1.dgrad"] == (32, 64, 128, "split")
    assert products["qkv.wgrad"] == (192, 64, 32, "split")


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_layer_attends_as_pytorch_does(causal: bool) -> None:
    plain = tutorial_layers.BasicTransformerLayer(64, 128, 4, causal=causal).double()
    q, k, v = (torch.randn(16, 2, 4, 16, dtype=torch.float64) for _ in range(3))
    heads_first = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal)
    assert torch.allclose(plain.attend(q, k, v), expected.permute(2, 0, 1, 3).flatten(2), rtol=1e-12, atol=1e-12)


def test_the_table_has_a_row_per_contestant() -> None:
    def row(step: str, ms: float, inside: bool) -> dict[str, Any]:
        op = {"op": "gemm_fp8", "sizes": "1×2×3", "count": 2, "ms": 0.5, "bytes": 9, "flop": 7e12, "of_ceiling": 0.9}
        return {
            "step": step,
            "attention": "exact",
            "in_contract": inside,
            "ms": {"median": ms},
            "peak_bytes": 2**30,
            "ops": [op] if inside else [],
        }

    case = {"case": {"name": "small"}, "rows": [row("PyTorch", 3.0, False), row("ours", 1.5, True)], "parts_ms": 1.25}
    payload = {
        "cases": [case],
        "linear": {"case": "Linear", "rows": [row("te.Linear", 0.5, True)]},
        "cupy_pool_bytes": 0,
        "provenance": {"cuda": "13.0", "torch": "2", "cupy": "14", "date": "2026-11-21T", "kernels": {}},
    }
    whole, linear = layer_tables.tables(payload)
    assert whole.rows[0] == ("PyTorch", "exact", "no", "3.00", "1.00")
    assert whole.rows[1] == ("ours", "exact", "yes", "1.50", "1.00")
    assert whole.rows[-1][-2] == "1.25"
    assert linear.rows == (("Linear", "yes", "0.500"),)
    (ops,) = layer_tables.layer_ops(payload)
    assert ops.rows == (("gemm_fp8", "1×2×3", "2", "0.500", "7.00 TFLOP", "90 %"),)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_on_one_core() -> None:
    before = os.sched_getaffinity(0)
    with layer.on_one_core():
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before


def test_what_a_step_holds_for_backward() -> None:
    """Each storage once; weights are parameters, not saved a second time."""
    tiny = dataclasses.replace(CASE, dtype=torch.bfloat16)
    contestant = layer_models.Contestant.__new__(layer_models.Contestant)
    module = te.LayerNormLinear(64, 128, params_dtype=torch.bfloat16)
    x = torch.randn(16, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    contestant.__dict__.update(
        case=tiny, module=module, x=x, context=te.autocast, keywords={}, block=lambda steps: None
    )
    contestant.parameters = [x, *module.parameters()]
    rows = {(row["what"], row["dtype"], row["shape"]): row["bytes"] for row in layer.memory(contestant)}
    assert rows["input", "bfloat16", "16×2×64"] == 2 * 32 * 64
    assert rows["saved for backward", "float8_e4m3fn", "64×32"] == 32 * 64  # the norm's output, transposed
    assert rows["saved for backward", "float8_e4m3fn", "64×128"] == 64 * 128  # the weight, transposed
    assert rows["parameter", "bfloat16", "128×64"] == 2 * 128 * 64
    row = {"step": "ours", "attention": "exact", "peak_bytes": 2**31, "memory": [{"what": "input", "dtype": "bfloat16",
        "shape": "4×4", "count": 2, "bytes": 2**20}]}  # fmt: skip
    origin = {"cuda": "13.0", "torch": "2", "cupy": "14", "date": "2026-11-21T", "kernels": {}}
    (table,) = layer_tables.layer_memory({"cases": [{"rows": [row]}], "provenance": origin})
    assert table.rows == (("input", "4×4", "bfloat16", "2", "1.0"),)
