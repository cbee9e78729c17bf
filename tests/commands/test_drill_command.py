"""`twin drill`: what it prints and writes, and its exit codes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from shared import processes

from optimized import measure
from optimized.commands import drill, main
from reference.inspect.drills.drill import KINDS, Outcome

pytestmark = pytest.mark.usefixtures("one_thread")


def test_drill_counts_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one process and with two the same; a flip that is missed has the exit code 1."""
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(drill, "multiprocessing", SimpleNamespace(get_context=processes.context))
    monkeypatch.setattr(drill.drill_plot, "plot", lambda payload: (tmp_path / "plot").touch())
    monkeypatch.setattr(measure.write_result, "__defaults__", (tmp_path,))
    found = []
    for more in ([], ["--processes", "2"]):
        assert main(["drill", "--flips", "1", "--write", *more]) == 0
        payload = json.loads((tmp_path / "drill.json").read_text())
        found.append(payload["kinds"])
        assert payload["command"] == "twin drill --flips 1 --seed 1 --write"
    assert found[0] == found[1]
    assert (tmp_path / "plot").exists()
    assert list(found[0]) == list(KINDS)
    assert all(sum(one["outcomes"].values()) == one["flips"] == 1 for one in found[0].values())
    assert "| weight | 1 |" in capsys.readouterr().out
    monkeypatch.setattr(drill, "_outcomes", lambda args: [[(kind, [Outcome("missed", True, "")]) for kind in KINDS]])
    assert main(["drill"]) == 1
    assert main(["drill", "--flips", "0"]) == 2
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err
