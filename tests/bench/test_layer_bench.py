"""`twin bench layer`: what it counts, and that its contestants compute the same layer."""

import dataclasses
import os
from typing import Any
from unittest import mock

import pytest
import torch

import reference as te
from optimized.bench.layers import layer, layer_models, layer_tables, small_layers, tutorial_layers
from optimized.bench.memory_bound import COPY_BYTES

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


def test_ceilings_of_a_run() -> None:
    """Medians by the sizes of products, and of a copy the bytes that it reads and writes in a millisecond."""
    names = {"fc1.fprop": 2.0, "attention forward": 3.0, "copy": 4.0}
    times = {name: [9.0 * ms, ms, 0.1 * ms] for name, ms in names.items()}
    with (
        mock.patch.object(layer.measure, "interleave", return_value=times) as timed,
        mock.patch.object(layer, "large_copy", return_value=print),
    ):
        found = layer._ceilings(CASE, dict.fromkeys(list(names)[:2], print))
    assert timed.call_args.args[0].keys() == names.keys()
    assert found == {"32×128×64": 2.0, "attention forward": 3.0, "copy": 2 * COPY_BYTES / 4}


def test_the_twelve_products() -> None:
    products = CASE.products()
    assert len(products) == 12
    assert products["fc1.fprop"] == (32, 128, 64, "fast")
    assert products["fc1.dgrad"] == (32, 64, 128, "split")
    assert products["qkv.wgrad"] == (192, 64, 32, "split")


LLAMA = dataclasses.replace(CASE, dtype=torch.float32, llama=True, kv_heads=2, rotary=True)


def test_the_gemms_of_a_llama_like_layer() -> None:
    products = LLAMA.products()
    assert products["qkv.fprop"] == (32, 64 + 2 * 2 * 16, 64, "fast")
    assert products["fc1.dgrad"] == (32, 64, 256, "split")
    assert products["fc2.wgrad"] == (64, 128, 32, "split")


@pytest.mark.parametrize("case", [*layer_models.CASES, *small_layers.SIZES], ids=lambda case: case.name)
def test_a_case_is_a_layer_of_ours_with_the_weights_of_its_products(case: layer_models.Case) -> None:
    """What the layer refuses, a dropout for example, is refused here; nothing is allocated."""
    ours = layer_models._transformer_layer(te, case, device="meta")
    products = [(n, k) for name, (_, n, k, _) in case.products().items() if name.endswith("fprop")]
    assert sum(p.numel() for p in ours.parameters() if p.dim() == 2) == sum(n * k for n, k in products)


def test_the_angles_are_those_of_the_library() -> None:
    """In fp32, whose steps are 2^-23 of a number; powers and products round three times."""
    wanted = te.RotaryPositionEmbedding(64)(512)
    torch.testing.assert_close(layer_models.angles(512, 64), wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("rotary", [True, False])
def test_the_plain_llama_is_our_layer(monkeypatch: pytest.MonkeyPatch, rotary: bool) -> None:
    """The same parameters in float64 and, through `TransformerLayer`, in fp32."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, p: float) -> torch.Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    monkeypatch.setattr(layer_models, "cudnn", attend)
    case = dataclasses.replace(LLAMA, rotary=rotary)
    plain, ours = layer_models.Llama(case).double(), layer_models._transformer_layer(te, case)
    parameters = dict(ours.named_parameters())
    # Ours has the rows of q, k and v group by group: two heads of queries, then theirs of keys and of values.
    mixed = parameters["self_attention.layernorm_qkv.weight"].detach().view(2, 4, 16, 64)
    rows = (mixed[:, :2], mixed[:, 2:3], mixed[:, 3:])
    for weight, value in (
        (plain.qkv.weight, torch.cat([part.flatten(0, 2) for part in rows])),
        (plain.projection.weight, parameters["self_attention.proj.weight"]),
        (plain.fc1.weight, parameters["layernorm_mlp.fc1_weight"]),
        (plain.fc2.weight, parameters["layernorm_mlp.fc2_weight"]),
    ):
        weight.data.copy_(value)
    x = torch.randn(16, 2, 64)
    keywords = {"rotary_pos_emb": layer_models.angles(16, 16)} if rotary else {}
    exact, found = plain(x.double()), ours(x, **keywords).double()
    # fp32 has 24 bits; some hundred roundings of terms of order 1 leave 100 dB. Another equation has 20 dB.
    assert float((exact - found).detach().norm() / exact.detach().norm()) < 1e-5


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

    sizes = {"hidden": 1, "ffn": 2, "heads": 3, "sequence": 4, "batch": 5}
    case = {
        "case": {"name": "small", **sizes},
        "rows": [row("PyTorch", 3.0, False), row("ours", 1.5, True)],
        "parts_ms": 1.25,
    }
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
    assert "small: hidden 1, ffn 2, 3 heads, sequence 4, batch 5." in whole.note
    (ops,) = layer_tables.layer_ops(payload)
    assert ops.rows == (("gemm_fp8", "1×2×3", "2", "0.500", "7.00 TFLOP", "90 %"),)


def test_what_rotary_embedding_costs_is_in_the_table() -> None:
    def case(name: str, ms: float, turns: tuple[float, ...]) -> dict[str, Any]:
        ops = [{"op": "rotary", "ms": one} for one in turns] + [{"op": "gemm_fp8", "ms": 9.0}]
        row = {"step": layer_tables.FP8, "attention": "exact", "in_contract": True, "ms": {"median": ms}}
        sizes = {"hidden": 1, "ffn": 2, "heads": 4, "kv_heads": 2, "sequence": 4, "batch": 5, "llama": True}
        rows = [{**row, "peak_bytes": 2**30, "ops": ops}]
        return {"case": {"name": name, **sizes}, "rows": rows, "parts_ms": 1.0}

    origin = {"cuda": "13.0", "torch": "2", "cupy": "14", "date": "2026-11-21T", "kernels": {}}
    cases = [case("turned", 3.0, (0.25, 0.5)), case("not turned", 2.0, ())]
    (table,) = layer_tables.tables({"cases": cases, "provenance": origin})
    assert table.title == "One Llama-like layer, forward and backward"
    assert table.rows[1] == ("of it the rotary kernels, TransformerLayer, FP8", "exact", "", "0.75", "–", "")
    assert "4 heads (2 of keys)" in table.note


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
    held = [
        {"what": what, "dtype": "bfloat16", "shape": "4×4", "count": 2, "bytes": size}
        for what, size in (("input", 2**20), ("parameter", 64 << 10), ("saved for backward", (64 << 10) - 1))
    ]
    row = {"step": "ours", "attention": "exact", "peak_bytes": 2**31, "memory": held}
    origin = {"cuda": "13.0", "torch": "2", "cupy": "14", "date": "2026-11-21T", "kernels": {}}
    (table,) = layer_tables.layer_memory({"cases": [{"rows": [row]}], "provenance": origin})
    shown = [("input", "1.0"), ("parameter", "0.1")]  # all of at least 64 KiB
    assert table.rows == tuple((what, "4×4", "bfloat16", "2", size) for what, size in shown)
    assert "at least 64 KiB" in table.how
