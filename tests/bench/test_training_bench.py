"""The benchmark that trains the walkthrough's GPT for longer: its runs, its table and its picture."""

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from optimized import measure
from optimized.bench.models import seeds, training, training_plot
from optimized.training import corpus
from optimized.training.corpus import Corpus
from optimized.training.settings import Settings

TINY = replace(Settings(), steps=4, rows=2, hidden=32, sequence=16)
TEXT = Corpus(np.frombuffer(b"for word in text: print(word)\n" * 400, np.uint8), 1)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_run_has_every_loss_and_the_held_out_ones(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EVERY", 2)
    ticks: list[int] = []
    found = training.train(TINY, fp8, TEXT, lambda: ticks.append(1), "cpu")
    assert found["precision"] == ("FP8" if fp8 else "bf16")
    assert len(found["train"]) == len(ticks) == 4
    assert [step for step, _ in found["validation"]] == [2, 4]
    assert found["train"][0] == pytest.approx(math.log(256), rel=0.02)  # it knows nothing
    assert found["train"][-1] < found["train"][0]
    json.dumps(found)


def test_a_text_is_split_and_no_byte_is_in_both() -> None:
    seen, unseen = TEXT.split(0.25)
    assert np.array_equal(np.concatenate([seen.data, unseen.data]), TEXT.data)
    assert len(unseen.data) == len(TEXT.data) // 4


def test_the_recorded_runs_have_a_table_and_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = measure.read_result("training")
    (table,) = training.tables(payload)
    assert [row[0] for row in table.rows] == ["bf16", "FP8"]
    losses = {run["precision"]: run["validation"][-1][1] / math.log(2) for run in payload["runs"]}
    assert [row[2] for row in table.rows] == [f"{losses[name]:.3f}" for name in ("bf16", "FP8")]
    drawn: list[Figure] = []
    monkeypatch.setattr(measure, "write_plot", lambda path, figure: drawn.append(figure))
    training_plot.main()
    curves, words = drawn[0].axes
    assert curves.get_xlabel() == "training step"
    texts = [one.get_text() for one in words.texts]
    assert texts[1:6] == texts[7:12] != texts[13:18]  # the H200's words, this CPU's, an ordinary sum's


def test_runs_of_a_seed_begin_alike_in_every_precision() -> None:
    settings = replace(TINY, accumulate=2, warmup=1)
    runs = [("bf16", 1), ("delayed", 1), ("current", 1), ("bf16", 2), ("delayed", 2)]
    payload = seeds.run(settings=settings, runs=runs, read=lambda: TEXT, device="cpu")
    assert [(one["precision"], one["seed"]) for one in payload["runs"]] == runs
    assert all(len(one["losses"]) == 4 and one["losses"][-1] < one["losses"][0] for one in payload["runs"])
    first = [one["losses"][0] for one in payload["runs"][:3]]  # before any FP8 rounding could be large
    assert max(first) - min(first) < 0.02
    assert payload["runs"][0]["losses"] != payload["runs"][3]["losses"]
    (table,) = seeds.tables(payload)
    assert table.rows[0][0] == "bf16"
    assert table.rows[1][3].count("%") == 2
    assert all(one["tokens_per_second"] > 0 for one in payload["runs"])


def test_runs_that_were_made_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in its second run, the benchmark goes on with it; other settings do not mix with what is there."""
    runs, lines, made = [(name, 1) for name in ("bf16", "block", "current")], tmp_path / "seeds.jsonl", list[str]()

    def losses(settings: Settings, *_: object) -> dict[str, Any]:
        if settings.precision == "block" and made == ["bf16"]:
            made.append("stopped")
            raise KeyboardInterrupt
        made.append(settings.precision)
        return {"precision": settings.precision, "seed": settings.seed, "losses": [1.0] * 4}

    def run(settings: Settings) -> dict[str, Any]:
        return seeds.run(told.append, settings, runs, lambda: TEXT, "cpu", lines)

    told: list[float] = []
    monkeypatch.setattr(seeds, "losses", losses)
    with pytest.raises(KeyboardInterrupt):
        run(TINY)
    payload = run(TINY)
    assert made == ["bf16", "stopped", "block", "current"]
    assert told == pytest.approx([1 / 3, 2 / 3, 1])
    assert [one["precision"] for one in payload["runs"]] == ["bf16", "block", "current"]
    assert payload == run(TINY)
    assert len(lines.read_text().splitlines()) == 3
    with pytest.raises(ValueError, match=r"seeds\.jsonl has a run of other settings, or of another text"):
        run(replace(TINY, accumulate=2))


@pytest.mark.parametrize("gpus", [["3"], ["3", "5"], ["3", "5", "6"]], ids=len)
def test_every_gpu_has_a_process_that_trains(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU is this process's own. The processes are pretended: each takes its GPU, and one makes all runs."""
    taken, made = list[str](), list[int]()

    class Pool:
        def __init__(self, count: int, context: Any, begin: Callable[..., None], given: tuple[Any, ...]) -> None:
            for _ in range(count):
                begin(*given)
                taken.append(os.environ["CUDA_VISIBLE_DEVICES"])

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
            found: Future[Any] = Future()
            found.set_result(call(*given))
            return found

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    monkeypatch.setattr(seeds, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(seeds, "losses", lambda settings, text, device="cuda": {"seed": settings.seed})
    seeds._all([replace(TINY, seed=seed) for seed in range(4)], TEXT, "cuda", lambda one: made.append(one["seed"]))
    assert sorted(made) == [0, 1, 2, 3]
    assert taken == (gpus if len(gpus) > 1 else [])


def test_the_text_of_the_seeds_has_the_library_and_torch() -> None:
    text = seeds.text()
    library = corpus.read()
    assert text.files > library.files
    assert np.array_equal(text.data[: len(library.data)], library.data)
