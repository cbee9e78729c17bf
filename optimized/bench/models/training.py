"""The walkthrough's GPT, trained for longer on a GPU in bf16 and in FP8 (docs/results/training.json).

It measures no speed. Both runs start alike and read the same bytes of Python's standard library; the result has their
losses, and the losses on bytes that neither has seen. `twin walkthrough` draws them beside what its machine trained.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from optimized.bench import Payload, Progress, bits, last_tenth, result, silent
from optimized.bench.table import Table, table
from optimized.training import corpus
from optimized.training.settings import Settings
from optimized.training.trainer import Trainer

NAME = "training"
WHAT = "a small GPT's losses in bf16 and in FP8"
KERNELS = ()  # the result has no times
STEPS, EVERY = 3000, 100  # steps of a run, and from one look at held-out text to the next


def train(
    settings: Settings, fp8: bool, text: corpus.Corpus, tick: Callable[[], object], device: str = "cuda"
) -> dict[str, Any]:
    """One run: the loss of each step, and after every `EVERY` steps the loss on held-out text, in nats per byte."""
    trainer = Trainer(replace(settings, precision="delayed" if fp8 else "bf16"), text, device)
    losses, validation = [], []
    for step in range(1, settings.steps + 1):
        losses.append(trainer.train().mean())
        if step % EVERY == 0:
            validation.append([step, round(trainer.evaluate(), 4)])
        tick()
    train = [round(float(loss), 4) for loss in losses]
    return {"precision": "FP8" if fp8 else "bf16", "train": train, "validation": validation}


def run(progress: Progress = silent, steps: int = STEPS) -> Payload:
    settings, text = replace(Settings(), steps=steps), corpus.read()
    ticks = itertools.count(1)
    runs = [train(settings, fp8, text, lambda: progress(next(ticks) / (2 * steps))) for fp8 in (False, True)]
    what = "losses in nats per byte of the walkthrough's GPT, from one start, on Python's standard library"
    about = {"files": text.files, "bytes": len(text.data), "sha256": text.digest}
    return result(what, KERNELS, settings=asdict(settings), text=about, runs=runs)


def tables(payload: Payload) -> list[Table]:
    """The losses at the end of both runs, in bits per byte."""
    rows = []
    for one in payload["runs"]:
        losses = (last_tenth(one["train"]), one["validation"][-1][1])
        rows.append((one["precision"], *(f"{bits(loss):.3f}" for loss in losses)))
    settings, text = payload["settings"], payload["text"]
    note = (
        f"{settings['steps']} steps of {settings['rows'] * settings['sequence']} bytes each, out of {text['bytes']:,} "
        "bytes of Python's standard library. One run of each does not tell which is better."
    )
    how = "Bits for each byte of text: a model that knows nothing needs 8."
    columns = ("", "last tenth of the steps", "held-out text")
    return [table(payload, "A small GPT, trained in bf16 and in FP8", columns, rows, how, note)]
