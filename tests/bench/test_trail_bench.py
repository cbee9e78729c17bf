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
    monkeypatch.setattr(trail, "LARGE_STEPS", 1)
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
    of_large_steps, every, tenth = written
    assert of_large_steps == 3 + 2 * (trail.UNCOUNTED + 1) + trail.ALONE
    assert every == 3 + 2 * (trail.UNCOUNTED + 2) + trail.ALONE  # two rounds, of which the first is not counted
    assert tenth == (every - trail.ALONE) // 10
    model = trail.Trainer(settings, training_text.corpus(), "cpu").model
    numbers = sum(p.numel() for p in model.parameters())
    assert 8 * numbers < payload["bytes"] < 9 * numbers + 10000  # with gradients, and a little FP8 state
    assert payload["tensors"] > 2 * len(list(model.parameters()))
    assert 32 * payload["tensors"] < payload["bytes_a_line"] < 40 * payload["tensors"] + 1000
    (table,) = trail.tables(payload)
    names = [(settings.tokens, name) for name in ("without", *trail.EVERY)]
    names += [(trail.ACCUMULATE * settings.tokens, name) for name in ("without", next(iter(trail.EVERY)))]
    assert [(row["tokens"], row["name"]) for row in payload["rows"]] == names
    assert [row[0] for row in table.rows] == [f"{tokens:,} bytes a step, {name}" for tokens, name in names]
    ms = [row["ms"]["median"] for row in payload["rows"]]
    ratios = [one / ms[0 if i < 3 else 3] for i, one in enumerate(ms)]
    assert [row[1:] for row in table.rows] == [(f"{a:.2f}", f"{b:.3f}×") for a, b in zip(ms, ratios, strict=True)]
    (fast,) = trail.tables(payload | {"bytes": 2 * 10**9})
    assert "2.00 GB: 0.50 ms of the GPU (4.0 TB/s)" in fast.note
