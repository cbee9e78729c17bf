"""README's pictures and sentence, and the pictures of results: what they show is what was recorded."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from optimized import measure
from optimized.bench import bandwidth_plot, last_tenth
from optimized.bench.layers import layer_tables, speed_plot
from optimized.bench.models import seeds


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """What is drawn, by name."""
    found: dict[str, Figure] = {}
    monkeypatch.setattr(measure, "write_plot", lambda path, figure: found.update({Path(path).stem: figure}))
    return found


def _bars(figure: Figure) -> list[float]:
    (axes,) = figure.axes
    return [float(bar.get_width()) for bar in axes.patches]  # type: ignore[attr-defined]


def test_four_bars(drawn: dict[str, Figure]) -> None:
    payload = measure.read_result("layer")
    speed_plot.plot(payload)
    (axes,) = drawn["speed"].axes
    case = payload["cases"][0]
    times = {(row["step"], row["attention"]): row["ms"]["median"] for row in case["rows"]}
    wanted = [times["PyTorch, compiled", "cuDNN"], times["Transformer Engine, FP8", "its own"]]
    assert _bars(drawn["speed"]) == [*wanted, times[layer_tables.FP8, "exact"], case["parts_ms"]]
    assert min(text.get_fontsize() for text in [*axes.texts, *axes.get_yticklabels()]) >= 13  # a phone halves them


def test_bandwidths_and_optimizers(drawn: dict[str, Figure]) -> None:
    bandwidth_plot.shares("casts", bandwidth_plot.CASTS)
    bandwidth_plot.shares("loss", bandwidth_plot.LOSS)
    bandwidth_plot.optimizers()
    for name, figure in drawn.items():
        (axes,) = figure.axes
        assert len(axes.get_yticklabels()) == len(_bars(figure)) > 5, name
    assert _bars(drawn["optimizer"]) == [row["ms"]["median"] for row in measure.read_result("adam")["rows"]]


def _run(precision: str, seed: int, last: float) -> dict[str, Any]:
    return {"precision": precision, "seed": seed, "losses": [9.0] * 9 + [last]}


def test_the_sentence_has_the_least_and_the_greatest() -> None:
    runs = [_run("bf16", 1, 1.0), _run("bf16", 2, 2.0), _run("delayed", 1, 0.99), _run("block", 2, 2.06)]
    assert [last_tenth(run["losses"]) for run in runs] == [1.0, 2.0, 0.99, 2.06]
    text = seeds.sentence({"runs": runs, "settings": {"steps": 1000}})
    assert "1,000 steps from 2 seeds" in text
    assert "between 1.0 % below and 3.0 % above that in bf16" in text
