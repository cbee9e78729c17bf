"""README keeps its word: its code runs, its commands are CI's, its tables come from the results."""

import doctest
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimized import measure
from optimized.commands import main, tables

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_first_example_gives_what_it_shows() -> None:
    found = doctest.testfile(str(ROOT / "README.md"), module_relative=False, encoding="utf-8")
    assert found.attempted >= 2
    assert found.failed == 0


def test_ci_runs_readmes_two_commands() -> None:
    commands = re.findall(r"```bash\n(pip .*)\n```", README)
    assert len(commands) == 2
    script = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for command in commands:
        assert command in script
        assert command in contributing


def test_the_layout_is_the_layout() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    listing = page.split("## What is where")[1].split("```")[1]
    parent = ""
    for line in listing.strip().splitlines():
        name = line.split()[0].partition("<")[0]
        parent = parent if line.startswith(" ") else name
        assert (ROOT / (name if name == parent else parent + name)).is_dir(), line


@pytest.fixture(scope="module", autouse=True)
def each_table_is_built_once() -> Iterator[None]:
    build = tables.recorded
    built = functools.cache(lambda name, folder: build(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "recorded", lambda name: built(name, measure.RESULTS))
        yield


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.name)
def test_the_tables_are_the_results(path: Path) -> None:
    assert tables.updated(path) == path.read_text("utf-8"), "run `python -m optimized.commands.tables` and commit"


def _timing(kind: str, name: str, ours: float, theirs: float) -> dict[str, object]:
    return {
        "kind": kind,
        "name": name,
        "m": 64,
        "n": 128,
        "k": 32,
        "tflops": {"ours": ours, "theirs": theirs},
        "speed_over_theirs": {"median": ours / theirs},
        "sustained_speed_over_theirs": ours / theirs / 2,
    }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of invented results, one kernel of which has changed since."""
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    origin = {
        "date": "2026-01-02T03:04:05+00:00",
        "gpu": {"name": "An H200"},
        "nvidia_smi": {"driver_version": "1.2"},
        "cuda": "13.0",
        "torch": "2.11",
        "cupy": "14",
        "kernels": {"gemm": "not today's hash"},
    }
    gemm = {
        "rows": [_timing("fast", "fc1", 900.0, 1000.0), _timing("bf16", "fc1", 600.0, 500.0)],
        "geometric_mean_speed_over_theirs": {"fast": 0.9, "bf16": 1.2},
        "provenance": origin,
    }
    cast = {
        "rows": [
            {"op": "cast", "dtype": "bf16", "of_copy": 0.5, "of_copy_of_as_many_bytes": 0.6},
            {"op": "cast", "dtype": "bf16", "of_copy": 0.9, "of_copy_of_as_many_bytes": 0.95},
            {"op": "cast", "dtype": "bf16", "of_copy": 0.8, "of_copy_of_as_many_bytes": 0.85},
        ],
        "provenance": {**origin, "kernels": {}},
    }
    equality = {
        "problems": 2,
        "problems_with_every_word_equal": 1,
        "rows": [
            {"m": 1, "n": 16, "k": 32, "accumulate": "fast", "words": 16, "differing_words": 0},
            {"m": 2, "n": 16, "k": 32, "accumulate": "fast", "words": 32, "differing_words": 5, "why": "K split by 2"},
        ],
        "provenance": {**origin, "kernels": {}},
    }
    norm = {
        "rows": [
            {"op": "norm_backward", "kind": "layernorm", "of_copy": 0.5, "of_copy_of_as_many_bytes": 0.6},
            {"op": "norm_backward", "kind": "layernorm", "of_copy": 0.7, "of_copy_of_as_many_bytes": 0.75},
            {"op": "norm_backward", "kind": "rmsnorm", "of_copy": 0.9, "of_copy_of_as_many_bytes": 0.95},
        ],
        "provenance": {**origin, "kernels": {}},
    }
    times = {"forward": 2.0, "cuDNN forward": 1.0, "backward": 4.0, "cuDNN backward": 5.0}
    attention = {
        "ms": {
            "attention": {
                "b=4 h=32 hkv=32 s=2048 d=128 none dropout=0.0": {name: {"median": ms} for name, ms in times.items()}
            },
            "FP8": {"b=4 h=32 hkv=32 s=2048 d=128 none dropout=0.0": {"FP8": {"median": 1}, "bf16": {"median": 2}}},
            "elementwise": {"copy": {"TB/s": 4.0}, "softmax_backward": {"TB/s": 3.0}},
        },
        "provenance": {**origin, "kernels": {}},
    }
    (tmp_path / "norm.json").write_text(json.dumps(norm))
    (tmp_path / "attention.json").write_text(json.dumps(attention))
    (tmp_path / "gemm_equality.json").write_text(json.dumps(equality))
    (tmp_path / "gemm.json").write_text(json.dumps(gemm))
    (tmp_path / "cast_transpose.json").write_text(json.dumps(cast))
    return tmp_path


def test_tables_are_built_from_the_results(results: Path) -> None:
    text = tables.markdown()
    assert "| fc1 64×128×32 | 900 | 90 % | 600 | 120 % |" in text
    assert "of cuBLASLt (geometric means): FP8, fast accumulation: 45 %; bf16: 60 %." in text
    assert "| geometric mean |  | 90 % |  | 120 % |" in text
    assert "| 1 of 2 GEMMs | 16 | 0 |  |" in text
    assert "| 2×16×32, fast accumulation | 32 | 5 | K split by 2 |" in text
    assert "| cast | 80 % (50 %; 60 %) |" in text
    assert "| kernel | LayerNorm | RMSNorm |" in text
    assert "| norm backward | 60 % (50 %; 60 %) | 90 % (90 %; 95 %) |" in text
    assert "| b=4 h=32 hkv=32 s=2048 d=128 | 2 | 137 | 50 % | 4 | 172 | 125 % |" in text
    assert "| softmax backward | 3.00 | 75 % |" in text
    assert "An H200, driver 1.2, CUDA 13.0, torch 2.11, CuPy 14, 2026-01-02." in text
    assert text.count("Measured before the last change of gemm.") == 1


def test_bench_shows_the_recorded_results_and_says_so(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--recorded"]) == 0
    out = capsys.readouterr().out
    assert "Recorded on an H200, not measured now" in out
    assert "120 %" in out
    assert main(["bench", "cast_transpose", "--table"]) == 0
    assert capsys.readouterr().out.startswith("**Casts, transposes and reductions.** Bandwidth as a share ")


def test_tables_fit_a_terminal_and_no_word_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "all", "--recorded"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for name in tables.BUILDERS:
        for one in tables.recorded(name):
            for cell in (*one.columns, *(row[0] for row in one.rows), *(row[-1] for row in one.rows)):
                assert all(word in out for word in cell.split()), cell


def test_bench_lists_every_benchmark_and_its_results(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, of at most 80 columns."""
    assert main(["bench"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(tables.BUILDERS)
    assert max(map(len, lines)) <= 80
    found = {line.split()[0]: line for line in lines}
    assert found["gemm"].endswith(" 2026-01-02*")
    assert found["norm"].endswith(" 2026-01-02")
    assert found["activation"].endswith(" not measured")
    assert last == "* measured before the last change of its kernels"


def test_readme_shows_one_small_table() -> None:
    rows = [line for line in tables.summary().splitlines() if line.startswith("|")][2:]
    assert 4 <= len(rows) <= 10
    assert "cuBLASLt" in rows[-1]
    assert all("tokens/s" in row for row in rows if "training" in row or "Trainer" in row)


@pytest.mark.parametrize("name", tables.README_RESULTS)
def test_no_row_of_readme_is_older_than_its_kernels(name: str) -> None:
    payload = tables.load(name)
    assert payload is not None, f"{name} has not been measured: `twin bench {name} --write` on a Hopper GPU"
    changed = measure.outdated(payload)
    left_out = re.search(r"Left out, since a kernel .*: (.*)\.$", README, re.M)
    if left_out is None or name not in left_out[1].split(", "):
        assert not changed, f"{', '.join(changed)} changed after {name} was measured: `twin bench {name} --write` again"


def test_readme_leaves_out_rows_that_are_older_than_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "outdated", lambda: ["trainer"])
    assert "Trainer" not in tables.summary()
    assert "to be measured again: trainer." in tables.summary()
    monkeypatch.setattr(tables, "outdated", lambda: ["layer", "seeds"])
    assert "Measured before the last change of their kernels: layer, seeds." in tables.summary()
    monkeypatch.setattr(tables, "outdated", list)
    assert "Trainer" in tables.summary()
    assert "Measured before" not in tables.summary()
    assert "Left out" not in tables.summary()


def test_the_rows_that_are_checked_are_readmes_rows() -> None:
    named = [line.split(" | ")[0].removeprefix("| ") for line in tables.equality().splitlines() if line[:2] == "| "]
    assert named[2:] == list(tables.CHECKS)
    assert [line.split(" | ")[0].removeprefix("| ") for line in tables.checks().splitlines() if line[:2] == "| "][
        2:
    ] == named[2:]


def test_results_has_every_table_and_says_how_to_read_it() -> None:
    assert sorted(name for group in tables.GROUPS for name in group.results) == sorted(
        [*tables.BUILDERS, *tables.DETAILS]
    )
    for group in tables.GROUPS:
        page = group.path.read_text("utf-8")
        assert page.startswith(f"# {group.title}\n\n![")
        for table in (table for name in group.results for table in tables.recorded(name)):
            assert table.markdown() in page
            assert re.fullmatch(r"[A-Z0-9].+\.", table.how), table.title


def test_every_recorded_result_has_its_table() -> None:
    recorded = {path.stem for path in measure.RESULTS.glob("*.json")}
    assert recorded <= set(tables.BUILDERS)
    for name in recorded:
        for table in tables.recorded(name):
            assert table.rows
            assert {len(row) for row in table.rows} == {len(table.columns)}


def test_bench_says_what_is_not_recorded(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (results / "gemm.json").unlink()
    assert main(["bench", "--recorded"]) == 0
    assert "gemm.json is not there: this result has not been recorded." in capsys.readouterr().out


def test_bench_does_not_store_what_it_did_not_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--recorded", "--write"]) == 2
    assert "--write stores what was measured" in capsys.readouterr().err
