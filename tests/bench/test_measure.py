"""Result files: what they must say, and how a change of the kernels since is noticed."""

import json
from pathlib import Path

import pytest
import torch
from shared.bits import changed_sources, sources

from optimized import measure
from optimized.bench.kernels import cast, gemm
from optimized.bench.layers import ladder
from optimized.cuda import compiler


def test_provenance_names_what_a_reader_needs() -> None:
    found = measure.provenance(["cast", "dbias"])
    assert {"date", "gpu", "nvidia_smi", "python", "torch", "cuda", "cupy", "nvrtc", "commit", "kernels"} <= set(found)
    assert found["date"].endswith("+00:00")
    assert found["kernels"] == {name: compiler.source_hash(name) for name in ("cast", "dbias")}


def test_a_result_without_provenance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="payload of 'x' has no 'provenance'"):
        measure.write_result("x", {"rows": []}, tmp_path)


def test_kernels_that_changed_since_are_named(tmp_path: Path) -> None:
    payload = {"rows": [], "provenance": measure.provenance(["cast", "amax"])}
    written = json.loads(measure.write_result("x", payload, tmp_path).read_text())
    assert measure.outdated(written) == []
    written["provenance"]["kernels"]["amax"] = "0" * 64
    written["provenance"]["kernels"]["gone"] = "0" * 64
    assert measure.outdated(written) == ["amax", "gone"]


def test_a_kernel_with_another_source_but_the_same_machine_code_has_not_changed() -> None:
    old, now = {"cast": "1" * 64, "gone": "2" * 64}, compiler.source_hash
    result = {"provenance": {"kernels": old}}
    middle = {"kernel": "cast", "from": "1" * 64, "now": "cast", "to": "3" * 64}
    last = {"kernel": "cast", "from": "3" * 64, "now": "cast", "to": now("cast")}
    renamed = {"kernel": "gone", "from": "2" * 64, "now": "amax", "to": now("amax")}
    assert measure.outdated(result, []) == ["cast", "gone"]
    assert measure.outdated(result, [middle, last, renamed]) == []
    assert measure.outdated(result, [last, renamed]) == ["cast"]  # no chain
    for wrong in ({"from": "4" * 64}, {"to": "4" * 64}, {"kernel": "amax"}, {"now": "amax"}):  # made by hand
        assert measure.outdated(result, [middle, {**last, **wrong}, renamed]) == ["cast"]
    circle = {"kernel": "cast", "from": "3" * 64, "now": "cast", "to": "1" * 64}
    assert measure.outdated(result, [middle, circle]) == ["cast", "gone"]


def test_what_is_noted_of_the_same_machine_code_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SAME_CODE", tmp_path / "same_code.json")
    assert measure.same_code() == []
    link = {"kernel": "cast", "from": "1" * 64, "now": "cast", "to": compiler.source_hash("cast")}
    measure.note_same_code([link], measure.SAME_CODE)
    measure.note_same_code([{**link, "from": "2" * 64}], measure.SAME_CODE)
    assert [one["from"] for one in measure.same_code()] == ["1" * 64, "2" * 64]
    assert measure.outdated({"provenance": {"kernels": {"cast": "2" * 64}}}) == []


def test_sources_that_changed_are_named() -> None:
    then = sources()
    assert {
        "optimized/kernels/casts/cast.cu",
        "reference/ops/casts/cast.py",
        "tests/bench/test_measure.py",
    } <= then.keys()
    assert changed_sources(then) == []
    then["reference/ops/casts/cast.py"] = "0" * 16
    then["reference/gone.py"] = then.pop("tests/bench/test_measure.py")
    assert changed_sources(then) == ["reference/gone.py", "reference/ops/casts/cast.py", "tests/bench/test_measure.py"]


def test_summary_is_the_median_with_its_spread() -> None:
    assert measure.summary([3.0]) == {"median": 3.0, "p10": 3.0, "p90": 3.0}
    found = measure.summary([float(i) for i in range(101)])
    assert found == {"median": 50.0, "p10": 10.0, "p90": 90.0}


def test_the_fastest_is_not_chosen_by_the_samples_that_it_is_compared_by() -> None:
    lucky, steady = [1.0, 9.0, 1.0, 9.0], [5.0, 6.0, 7.0, 8.0]
    assert gemm.fastest({"lucky": lucky, "steady": steady}) == [5.0, 9.0, 7.0, 9.0]
    assert gemm.fastest({"steady": steady}) == steady


def test_bytes_of_the_casts() -> None:
    # bf16: read 2, write 1 + 1.
    assert cast.bytes_moved("cast_transpose", 10, 16, 2) == 640
    assert cast.bytes_moved("amax", 10, 16, 4) == 640


@pytest.mark.gpu
def test_interleave_times_every_variant() -> None:
    small, large = (torch.ones(size, device="cuda") for size in (1 << 10, 1 << 26))
    times = measure.interleave({"small": small.clone, "large": large.clone}, repeats=5, flush=measure.Flush(1 << 24))
    assert {name: len(samples) for name, samples in times.items()} == {"small": 5, "large": 5}
    assert measure.summary(times["small"])["median"] < measure.summary(times["large"])["median"]


def test_the_interval_of_a_median_is_what_the_binomial_says() -> None:
    twenty = [float(i) for i in range(20, 0, -1)]
    # P(at most 5 heads of 20) = 0.0207: the 6th and the 15th value enclose the median with 95.9 %.
    assert measure.interval(twenty) == {"median": 10.5, "low": 6.0, "high": 15.0}
    assert measure.interval([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert measure.spread(twenty) == {**measure.summary(twenty), **measure.interval(twenty)}


def test_a_result_of_the_ladder_is_not_older_than_kernels_that_have_not_changed() -> None:
    """Its kernels are none of `compiler.names()`, which a lesson runs alone."""
    assert measure.outdated({"provenance": measure.provenance([rung.kernel for rung in ladder.RUNGS])}) == []
