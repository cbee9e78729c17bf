"""The losses of a GPT in FP8 beside those in bf16, from several seeds (docs/results/seeds.json).

The 124m model of `twin train`, with eight microbatches a step. Runs of one seed start from the same weights and read
the same bytes in the same order. The text is Python's standard library and torch's own Python sources. Losses do not
depend on the GPU, as every bit is defined; if a machine has several GPUs, each trains one run at a time.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimized import measure
from optimized.bench import Payload, Progress, last_tenth, result, silent
from optimized.bench.models import train
from optimized.bench.plots import BLUE, GREEN, ORANGE, drawing
from optimized.bench.table import Table, table
from optimized.training import corpus
from optimized.training.settings import SIZES, Settings
from optimized.training.trainer import Trainer

NAME = "seeds"
WHAT = "a GPT's loss in FP8 and in bf16, by seed"
KERNELS = train.KERNELS
SETTINGS = replace(SIZES["124m"], accumulate=8, steps=2000, warmup=200)
RUNS = tuple((precision, seed) for seed in (2026, 2027) for precision in ("bf16", "delayed"))  # a quarter of an hour
LABELS = {"bf16": "bf16", "delayed": "FP8, delayed scaling", "current": "FP8, current scaling"}
COLOURS = {"bf16": BLUE, "delayed": ORANGE, "current": GREEN}


def text() -> corpus.Corpus:
    """Python's standard library and torch's Python sources, in the order of their paths."""
    root = Path(torch.__file__).parent
    paths = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    return corpus.joined([*corpus.sources(), *paths])


def losses(settings: Settings, text: corpus.Corpus, device: str = "cuda") -> dict[str, Any]:
    """One run: the mean loss of each step, and the loss of held-out text at the end, in nats per byte."""
    trainer = Trainer(settings, text, device)
    found = torch.stack([trainer.train().mean() for _ in range(settings.steps)])
    held_out = trainer.evaluate()
    return {
        "precision": settings.precision,
        "seed": settings.seed,
        "losses": [round(loss, 4) for loss in found.tolist()],
        "held_out": round(held_out, 4),
    }


def _take_gpu(free: Any) -> None:
    """Take one of the GPUs that are free, for all of this process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = free.get()


def _gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def _all(runs: Sequence[Settings], text: corpus.Corpus, device: str, tick: Callable[[], object]) -> list[Any]:
    """Every run, in the order of `runs`."""
    gpus = _gpus() if device == "cuda" else []
    if len(gpus) < 2:
        found = []
        for one in runs:
            found.append(losses(one, text, device))
            tick()
        return found
    context = multiprocessing.get_context("spawn")
    free = context.Queue()
    for gpu in gpus:
        free.put(gpu)
    with ProcessPoolExecutor(len(gpus), context, _take_gpu, (free,)) as pool:
        futures = [pool.submit(losses, one, text) for one in runs]
        for _ in as_completed(futures):
            tick()
        return [future.result() for future in futures]


def run(
    progress: Progress = silent,
    settings: Settings = SETTINGS,
    runs: Sequence[tuple[str, int]] = RUNS,
    read: Callable[[], corpus.Corpus] = text,
    device: str = "cuda",
) -> Payload:
    bytes_of_text = read()
    done = [0]

    def tick() -> None:
        done[0] += 1
        progress(done[0] / len(runs))

    every = [replace(settings, precision=precision, seed=seed) for precision, seed in runs]
    return result(
        "losses of one GPT by precision and seed",
        KERNELS,
        settings=asdict(settings),
        text={"bytes": len(bytes_of_text.data), "sha256": bytes_of_text.digest},
        runs=_all(every, bytes_of_text, device, tick),
    )


def tail(one: dict[str, Any]) -> float:
    """The mean loss of a run's last tenth."""
    return last_tenth(one["losses"])


def _by_seed(payload: Payload) -> dict[int, dict[str, dict[str, Any]]]:
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for one in payload["runs"]:
        found.setdefault(one["seed"], {})[one["precision"]] = one
    return found


def tables(payload: Payload) -> list[Table]:
    """The loss of the last tenth by seed; FP8's beside bf16's of the same seed."""
    seeds = _by_seed(payload)
    rows = []
    for precision, label in LABELS.items():
        of = {seed: runs for seed, runs in seeds.items() if precision in runs}
        if not of:
            continue
        more = [tail(runs[precision]) / tail(runs["bf16"]) - 1 for runs in of.values()]
        cells = [f"{tail(seeds[seed][precision]):.4f}" if seed in of else "–" for seed in seeds]
        above = [f"{100 * one:+.2f} %" for one in (*more, sum(more) / len(more))]
        rows.append((label, *cells, *(("–", "–") if precision == "bf16" else (", ".join(above[:-1]), above[-1]))))
    settings = payload["settings"]
    tokens = settings["accumulate"] * settings["rows"] * settings["sequence"]
    how = f"Mean loss of the last tenth of {settings['steps']:,} steps of {tokens:,} bytes, in nats per byte. "
    how += "Runs of one seed have the same first weights and the same bytes."
    columns = ("124 million parameters", *(f"seed {seed}" for seed in seeds), "beside bf16, by seed", "mean")
    return [table(payload, "A GPT's loss by precision and seed", columns, rows, how)]


def plot(payload: Payload) -> None:
    """Draw docs/seeds.png: the losses, and how far FP8's are from those of bf16 with the same seed."""
    with drawing("seeds", 1, 2, (10, 3.6)) as (_, (curves, differences)):
        for runs in _by_seed(payload).values():
            few = max(1, len(runs["bf16"]["losses"]) // 50)
            means = {name: np.array(one["losses"]).reshape(-1, few).mean(1) for name, one in runs.items()}
            steps = few * (np.arange(len(means["bf16"])) + 0.5)
            for precision, values in means.items():
                curves.plot(steps, values, color=COLOURS[precision], linewidth=1, label=LABELS[precision])
                if precision != "bf16":
                    differences.plot(steps, 100 * (values / means["bf16"] - 1), color=COLOURS[precision], linewidth=1)
        curves.set(xlabel="step", ylabel="nats per byte", title="Loss, 124 million parameters", yscale="log")
        ticks = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6)
        curves.set_yticks(ticks, labels=map(str, ticks))
        curves.minorticks_off()
        handles, labels = curves.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        curves.legend(unique.values(), unique.keys())
        differences.axhspan(-0.5, 0.5, color=BLUE, alpha=0.15)
        differences.axhline(0, color=BLUE, linewidth=1)
        differences.set(xlabel="step", ylabel="% above bf16", title="FP8 beside bf16 of the same seed; band: 0.5 %")


if __name__ == "__main__":
    plot(measure.read_result(NAME))
