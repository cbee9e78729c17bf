"""`twin bench generator`: all of it small and on the CPU, and its tables."""

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from shared.generator_sizes import CASE, SMALL
from shared.on_a_cpu import OnACpu

from optimized import measure
from optimized.bench.models import generator
from optimized.bench.models import generator_contestants as contestants


def run(**options: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {"synchronize": lambda: None, "reset_peak_memory_stats": lambda: None}
    nothing |= {"memory_allocated": lambda: 3 << 20, "max_memory_allocated": lambda: 5 << 20}
    with mock.patch.multiple(generator, **SMALL), mock.patch.multiple(torch.cuda, **nothing):
        found = generator.run(
            **{"repeats": 1, "case": CASE, "vocabulary": 64, "device": "cpu", **options},
        )
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_the_whole_benchmark_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[float] = []
    payload = run(progress=told.append)
    said = capsys.readouterr().out
    assert told == sorted(told)
    assert told[-1] <= 1
    assert payload["missing"].keys() <= {generator.THEIRS}  # where transformers is not installed
    names = (generator.OURS, generator.OURS_16, generator.LOOP, generator.LOOP_16)
    ours = [(row["name"], row["batch"], row["context"]) for row in payload["rows"]]
    assert ours == [(name, batch, 112) for batch in (1, 2) for name in names]
    for row in payload["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["ms"]["median"] * 1e3)
        assert f"batch {row['batch']}, context 112, {row['name']}" in said
    memory = {row["name"]: row for row in payload["memory"]["rows"]}
    tokens, each = payload["memory"]["tokens"], 2 * 2 * 16 * 2  # keys and values, 2 heads of 16 channels, bf16
    assert memory["without pages"]["bytes"] == 3 * 140 * each
    assert tokens * each <= memory["in pages"]["bytes"] < (tokens + 3 * 128) * each
    assert memory["in pages, FP8"]["bytes"] == memory["in pages"]["bytes"] * (16 + 4) // 32
    assert all(row["peak_bytes"] == 2 << 20 for row in memory.values())
    titles = [one.title for one in generator.tables(payload)]
    assert titles == ["Decoding with te.Generator", "The price of a written order", "A cache in pages"]


def test_contestants_take_turns_where_their_caches_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one sequence just fit, those of two do not."""
    groups, ticks = list[list[str]](), list[int]()
    for name in ("Model", "Engine", "Weights", "Loop"):
        monkeypatch.setattr(generator, name, mock.Mock())
    monkeypatch.setattr(generator, "_rows", lambda run, blocks, *rest: groups.append(list(blocks)) or [])
    one = 2 * 112 * 2 * 16 * 2  # keys and values of 112 tokens, 2 heads of 16 channels, bf16
    names = [generator.OURS, generator.OURS_16, generator.LOOP, generator.LOOP_16]
    with mock.patch.multiple(generator, **SMALL, TOGETHER=len(names) * one):
        generator.decoding(generator._Run(1e9), CASE, 64, 1, "cpu", lambda: ticks.append(1))
    assert groups == [names, *([name] for name in names)]
    assert len(ticks) == 2


@pytest.mark.parametrize(("segment", "counts"), [(111, 10), (112, 8)])
def test_a_text_of_one_segment_is_not_decoded_twice(segment: int, counts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In segments it would be the same chain; a text of one token more has two."""
    names: list[str] = []
    for name in ("Model", "Engine", "Weights", "Loop"):
        monkeypatch.setattr(generator, name, mock.Mock())
    monkeypatch.setattr(generator, "_rows", lambda run, blocks, *rest: names.extend(blocks) or [])
    with mock.patch.multiple(generator, **SMALL, SEGMENT=segment):
        generator.decoding(generator._Run(1e9), CASE, 64, 1, "cpu", lambda: None)
    assert len(names) == counts
    assert (generator.SEGMENTED in names) == (counts > 8)


def test_hugging_faces_speed_stands_beside_ours() -> None:
    """At each size at which it decodes, ours does, too; otherwise a row of the table had no number of ours."""
    assert set(generator.THEIR_PAIRS) <= set(generator.PAIRS)


@torch.no_grad()
def test_attentions_that_are_timed_side_by_side_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query with all keys: a query that did not see the last ones would be a hundredth off."""
    found: list[Any] = []
    monkeypatch.setattr(measure, "graph", lambda call, calls: found.append(call(calls - 1)))
    monkeypatch.setattr(measure, "interleave", lambda graphs, *rest: {})
    now, case = generator._Run(1e9), replace(CASE, heads=8)
    torch.manual_seed(0)
    with mock.patch.multiple(generator, PAIRS=((1, 2048),), CALLS=2), OnACpu():
        generator.attention(now, case, 1)
    assert now.missing.keys() <= {"attention alone, cuDNN, context 2048"}  # a CPU has none
    (ours, *_), theirs = found
    exact = theirs[0].transpose(0, 1).double()  # [queries, heads of keys, channels]
    assert float((ours.view_as(exact) - exact).norm() / exact.norm()) < 0.005


def test_a_gib_of_a_cache_is_a_power_of_two() -> None:
    sizes = {"without pages": (3 << 29, 5 << 30), "in pages": (1 << 28, 7 << 28)}
    rows = [{"name": name, "bytes": held, "peak_bytes": most} for name, (held, most) in sizes.items()]
    payload: dict[str, Any] = {
        **{"rows": [], "attention": [], "transformers": None, "sizes": {"layers": 4, "vocabulary": 9}},
        "memory": {"sequences": 3, "tokens": 4321, "longest": 8192, "page": 128, "rows": rows},
        "provenance": {"date": "2026-01-02T03:04:05", "cuda": "13", "torch": "2", "cupy": "14", "kernels": {}},
    }
    found = generator.tables(payload)[-1]
    assert found.columns[1:] == ("cache, GiB", "at most, GiB")
    assert found.rows == (("without pages", "1.50", "5.00"), ("in pages", "0.25", "1.75"))
    assert "3 sequences with 4,321 tokens together, of up to 8,192, in 4 layers" in found.how


def test_a_part_that_fails_or_comes_too_late_leaves_a_sentence() -> None:
    with mock.patch.object(generator, "Loop", side_effect=RuntimeError("no loop\nat all")):
        payload = run()
    assert payload["missing"][f"{generator.LOOP}, batch 1, context 112"] == "RuntimeError: no loop"
    assert {row["name"] for row in payload["rows"]} >= {generator.OURS, generator.OURS_16}
    assert generator.tables(payload)
    late = run(seconds=-1.0)
    assert late["rows"] == []
    assert late["memory"] is None
    assert late["missing"]["memory"].startswith("TimeoutError: the time of the run")
    assert generator.tables(late) == []


def test_the_speed_is_compared_with_the_better_of_the_others() -> None:
    names = {generator.OURS: 2.0, generator.SEGMENTED: 1.5, generator.OURS_16: 4.0, generator.LOOP: 1.0}
    names |= {generator.LOOP_16: 3.0, generator.THEIRS: 5.0}
    rows = [
        {"name": name, "batch": 1, "context": 2048, "tokens_per_second": 1e3 / ms, "ms": {"median": ms}}
        for name, ms in names.items()
    ]
    times = {"in order": 90.0, "flash": 30.0, "cuDNN": 45.0}
    payload: dict[str, Any] = {
        **{"rows": rows, "memory": None, "transformers": "5.0", "sizes": {"layers": 4, "vocabulary": 9}},
        "attention": [{"name": name, "context": 2048, "us": {"median": us}} for name, us in times.items()],
        "provenance": {"date": "2026-01-02T03:04:05", "cuda": "13", "torch": "2", "cupy": "14", "kernels": {}},
    }
    decoding, price = generator.tables(payload)
    speeds = ("500", "667", "250", "1,000", "333", "200")
    assert decoding.rows == (("batch 1, 2,048 tokens", *speeds, "1.50×", "2.00×", "0.75×"),)
    assert price.rows == (("2,048 tokens", "2.00×", "1.33×", "90", "30", "45", "3.0×"),)


@torch.no_grad()
def test_the_plain_loop_decodes_as_a_layer_of_plain_pytorch() -> None:
    """The last of the cache's places: then all that attention without a mask reads are tokens."""
    from optimized.bench.layers.layer_models import Llama

    with mock.patch.object(contestants, "LEFT", 1):
        weights = contestants.Weights(CASE, 1, 64, False, "cpu")
        loop = contestants.Loop.__new__(contestants.Loop)
        loop.weights, loop.at = weights, torch.tensor([7])
        loop.parts = (contestants.before_attention, contestants.after_attention)
        loop.caches = [[torch.randn(2, 2, 8, 16).bfloat16() for _ in range(2)]]
        loop.tokens = torch.tensor([3, 4])
        model = Llama(replace(CASE, sequence=8)).bfloat16()
        with torch.no_grad():
            for name, value in zip(("qkv", "projection", "fc1", "fc2"), weights.layers[0], strict=True):
                getattr(model, name).weight.copy_(value)
        keys, values = (one.clone() for one in loop.caches[0])
        h = torch.nn.functional.embedding(loop.tokens, weights.table)[None]
        loop.forward()
        q, k, v = model.qkv(model.ln1(h)).unflatten(2, (-1, 16)).split((4, 2, 2), 2)
        turns = [one[7:8] for one in model.turns]
        q, k = contestants.turned(q, *turns), contestants.turned(k, *turns)
        keys[:, :, 7], values[:, :, 7] = k[0], v[0]
        torch.testing.assert_close(loop.caches[0][0], keys)
        out = torch.nn.functional.scaled_dot_product_attention(q[0][:, :, None], keys, values, enable_gqa=True)
        h = h + model.projection(out[:, :, 0].reshape(h.shape))
        first, second = model.fc1(model.ln2(h)).chunk(2, 2)
        h = h + model.fc2(torch.nn.functional.silu(first) * second)
        logits = torch.nn.functional.rms_norm(h[0], (64,), weights.norm, 1e-5) @ weights.head.t()
        assert loop.tokens.tolist() == logits.argmax(1).tolist()
        assert loop.at.tolist() == [8]
