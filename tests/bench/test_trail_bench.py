"""`twin bench trail` on a CPU, with a small model, and its table."""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from shared import training_text

from optimized import measure
from optimized.bench.models import trail
from reference.inspect.trails import file


def test_the_whole_benchmark_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(trail.SETTINGS, sequence=16, hidden=32, heads=2, rows=2, layers=1, vocabulary=256)
    told: list[float] = []
    monkeypatch.setattr(trail, "STEPS", 2)
    monkeypatch.setattr(measure, "interleave", lambda calls, repeats, ahead: {name: [0.5] * repeats for name in calls})
    written: list[int] = []
    close = trail.TrailWriter.close

    def closed(writer: trail.TrailWriter) -> None:
        close(writer)
        written.append(len(file.read(writer.path).steps))

    monkeypatch.setattr(trail.TrailWriter, "close", closed)
    with mock.patch.object(torch.cuda, "synchronize"):
        found = trail.run(told.append, 1, settings, training_text.corpus(), "cpu")
    payload = json.loads(json.dumps(found))
    assert told == sorted(told)
    assert told[-1] == 1
    every, tenth = written
    assert every == 3 + 2 * (trail.UNCOUNTED + 2) + trail.ALONE  # two rounds, of which the first is not counted
    assert tenth == (every - trail.ALONE) // 10
    model = trail.Trainer(settings, training_text.corpus(), "cpu").model
    numbers = sum(p.numel() for p in model.parameters())
    assert 8 * numbers < payload["bytes"] < 9 * numbers + 10000  # with gradients, and a little FP8 state
    assert payload["tensors"] > 2 * len(list(model.parameters()))
    assert 32 * payload["tensors"] < payload["bytes_a_line"] < 40 * payload["tensors"] + 1000
    (table,) = trail.tables(payload)
    without = payload["rows"][0]["ms"]["median"]
    assert table.rows == tuple(
        (row["name"], f"{row['ms']['median']:.2f}", f"{row['ms']['median'] / without:.3f}×") for row in payload["rows"]
    )
    assert [row[0] for row in table.rows] == ["without", *trail.EVERY]
    (fast,) = trail.tables(payload | {"bytes": 2 * 10**9})
    assert "2.00 GB: 0.50 ms of the GPU (4.0 TB/s)" in fast.note
