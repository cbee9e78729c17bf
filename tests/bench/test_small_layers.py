"""`twin bench small_layers` on a GPU that only takes notes: both sides are launched alike; times are made up."""

import statistics

import pytest
from shared.dry_bench import is_summary, is_table
from shared.dry_runs import launches, layers, run

from optimized.bench.layers import small_layers


@pytest.mark.parametrize("size", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_small_layers(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    case = small_layers.SIZES[size]
    monkeypatch.setattr(small_layers, "SIZES", [case])
    with layers():
        ran = run(small_layers, lambda told: small_layers.run(told, repeats=2))
    (row,), (timed,) = ran.payload["rows"], ran.rounds
    sides = (small_layers.THEIRS, small_layers.PLAIN, small_layers.FP8)
    assert list(row["ms"]) == [f"{side}{way}" for side in sides for way in ("", small_layers.GRAPH)]
    for name, times in timed.samples.items():
        is_summary(row["ms"][name], times)
    for name, kernel in zip(sides[1:], ("gemm.", "gemm_fp8."), strict=True):
        assert any(one.startswith(kernel) for one in launches(timed.noted[name])), name
    assert launches(timed.noted[small_layers.THEIRS]) == []
    medians = {name: statistics.median(times) for name, times in timed.samples.items()}
    faster = [
        medians[f"{small_layers.THEIRS}{way}"] / medians[f"{small_layers.FP8}{way}"] for way in ("", small_layers.GRAPH)
    ]
    cells = (case.name, *(f"{ms:.3f}" for ms in medians.values()), *(f"{one:.2f}×" for one in faster))
    is_table(ran.tables[0], ran.tables[0].columns, [cells])
    (summary,) = small_layers.summary(ran.payload)
    assert summary[-1] == f"{faster[1]:.2f} to {faster[1]:.2f}×"


def test_the_sizes_are_small_and_have_as_many_tokens() -> None:
    assert {case.tokens for case in small_layers.SIZES} == {8192}
    assert {case.hidden for case in small_layers.SIZES} == {768, 1024, 2048}
