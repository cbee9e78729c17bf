"""The losses of a GPT in each FP8 recipe beside those in bf16, from several seeds (docs/results/seeds.json).

The 124m model of `twin train`, with two microbatches of 8,192 bytes a step: a step of one takes 15 to 18 ms on an H200,
so the ten runs take some 330 s on two of them, and eight microbatches, as before, would take 20 minutes. Runs of one
seed start from the same weights and read the same bytes in the same order. The text is Python's standard library and
torch's own Python sources. Losses do not depend on the GPU, as every bit is defined; if a machine has several GPUs,
each trains one run at a time.

    python -m optimized.bench.models.seeds                      draw docs/seeds.png
    python -m optimized.bench.models.seeds --measure FOLDER     train what FOLDER/seeds.jsonl lacks; FOLDER/seeds.json

Each run is a line of FOLDER/seeds.jsonl as soon as it ends, so what is stopped can be asked for again, and goes on.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimized import measure
from optimized.bench import Payload, Progress, bits, last_tenth, result, silent
from optimized.bench.layers import layer
from optimized.bench.models import train
from optimized.bench.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, drawing
from optimized.bench.table import Table, table
from optimized.training import corpus
from optimized.training.settings import SIZES, Settings
from optimized.training.trainer import Trainer
from reference.support import files

NAME = "seeds"
WHAT = "a GPT's loss in FP8 and in bf16, by seed"
KERNELS = (
    *train.KERNELS,
    *("activation_cast_blocks", "cast_blocks", "cat_cast_blocks", "gemm_fp8_blocks", "gemm_fp8_blocks_fused"),
    *("cast_rowwise", "gemm_fp8_rowwise", "norm_cast_blocks", "norm_statistics"),
)
SETTINGS = replace(SIZES["124m"], accumulate=2, steps=2000, warmup=200)
LABELS = {
    "bf16": "bf16",
    "delayed": "FP8, delayed scaling",
    "current": "FP8, current scaling",
    "block": "FP8, blocks of 128",
    "rowwise": "FP8, row-wise scaling",
}
COLOURS = {"bf16": GREY, "delayed": ORANGE, "current": GREEN, "block": BLUE, "rowwise": PURPLE}
# What is wanted most comes first: a whole seed, and in it the recipes of which nothing is recorded.
ORDER = ("bf16", "block", "current", "rowwise", "delayed")
RUNS = tuple((precision, seed) for seed in (2026, 2027) for precision in ORDER)
UNTIMED = 10  # steps at the start: kernels are loaded, graphs are captured

Done = Callable[[dict[str, Any]], object]


def text() -> corpus.Corpus:
    """Python's standard library and torch's Python sources, in the order of their paths."""
    root = Path(torch.__file__).parent
    paths = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    return corpus.joined([*corpus.sources(), *paths])


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def losses(settings: Settings, text: corpus.Corpus, device: str = "cuda") -> dict[str, Any]:
    """One run: the mean loss of each step, the loss of held-out text at the end, in nats per byte, and tokens/s."""
    trainer = Trainer(settings, text, device)
    untimed = min(UNTIMED, settings.steps - 1)
    start, found = 0.0, []
    for step in range(settings.steps):
        if step == untimed:
            start = _now(device)
        found.append(trainer.train().mean())
    seconds = _now(device) - start
    held_out = trainer.evaluate()
    values = torch.stack(found).tolist()
    if device == "cuda":
        del trainer
        layer.clear()
    return {
        "precision": settings.precision,
        "seed": settings.seed,
        "losses": [round(loss, 4) for loss in values],
        "held_out": round(held_out, 4),
        "tokens_per_second": round(settings.tokens * (settings.steps - untimed) / seconds),
    }


def _take_gpu(free: Any) -> None:
    """Take one of the GPUs that are free, for all of this process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = free.get()


def _gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def _all(runs: Sequence[Settings], text: corpus.Corpus, device: str, done: Done) -> None:
    """Every run; `done` is told of each as it ends."""
    gpus = _gpus() if device == "cuda" else []
    if len(gpus) < 2:
        for one in runs:
            done(losses(one, text, device))
        return
    context = multiprocessing.get_context("spawn")
    free = context.Queue()
    for gpu in gpus:
        free.put(gpu)
    with ProcessPoolExecutor(len(gpus), context, _take_gpu, (free,)) as pool:
        for future in as_completed([pool.submit(losses, one, text) for one in runs]):
            done(future.result())


def _key(run: dict[str, Any]) -> tuple[str, int]:
    return run["precision"], run["seed"]


def run(
    progress: Progress = silent,
    settings: Settings = SETTINGS,
    runs: Sequence[tuple[str, int]] = RUNS,
    read: Callable[[], corpus.Corpus] = text,
    device: str = "cuda",
    lines: Path | None = None,
) -> Payload:
    """Train.

    Args:
        progress: is told which part of the runs is done.
        settings: of all runs, but for precision and seed.
        runs: precision and seed of each.
        read: gives the text.
        device: "cuda" or "cpu".
        lines: a file to which each run is added as a result of one line, and whose runs are not made again.

    Raises:
        ValueError: the file has a run of other settings or another text.
    """
    bytes_of_text = read()
    about = {
        "settings": json.loads(json.dumps(asdict(settings))),
        "text": {"bytes": len(bytes_of_text.data), "sha256": bytes_of_text.digest},
    }
    known = [] if lines is None or not lines.exists() else list(map(json.loads, lines.read_text().splitlines()))
    for one in known:
        if {name: one[name] for name in about} != about:
            raise ValueError(f"{lines} has a run of other settings, or of another text; a new file is accepted.")
    found = {_key(one["runs"][0]): one for one in known}

    def done(made: dict[str, Any]) -> None:
        one = result("losses of one GPT by precision and seed", KERNELS, **about, runs=[made])
        found[_key(made)] = one
        if lines is not None:
            files.append(lines, json.dumps(one) + "\n")
        progress(sum(key in found for key in runs) / len(runs))

    missing = [
        replace(settings, precision=precision, seed=seed) for precision, seed in runs if (precision, seed) not in found
    ]
    _all(missing, bytes_of_text, device, done)
    last = max((found[key] for key in runs), key=lambda one: one["provenance"]["date"])
    return {**last, "runs": [found[key]["runs"][0] for key in runs]}


def tail(one: dict[str, Any]) -> float:
    """The mean loss of a run's last tenth."""
    return last_tenth(one["losses"])


def _by_seed(payload: Payload) -> dict[int, dict[str, dict[str, Any]]]:
    """Runs by seed and precision, of the seeds that have one in bf16."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for one in payload["runs"]:
        found.setdefault(one["seed"], {})[one["precision"]] = one
    return {seed: runs for seed, runs in found.items() if "bf16" in runs}


def by_precision(payload: Payload) -> Iterator[tuple[str, dict[int, dict[str, dict[str, Any]]]]]:
    """Each precision that was run, and the seeds that have it."""
    for precision in LABELS:
        of = {seed: runs for seed, runs in _by_seed(payload).items() if precision in runs}
        if of:
            yield precision, of


def _percents(shares: Sequence[float]) -> str:
    return ", ".join(f"{100 * one:+.2f} %" for one in shares)


def tables(payload: Payload) -> list[Table]:
    """The loss of the last tenth by seed; FP8's beside bf16's of the same seed, there and of held-out text."""
    seeds = _by_seed(payload)
    timed = all("tokens_per_second" in one for one in payload["runs"])
    rows = []
    for precision, of in by_precision(payload):
        more = [tail(runs[precision]) / tail(runs["bf16"]) - 1 for runs in of.values()]
        cells = [f"{bits(tail(seeds[seed][precision])):.4f}" if seed in of else "–" for seed in seeds]
        unseen = [runs[precision]["held_out"] / runs["bf16"]["held_out"] - 1 for runs in of.values()]
        above, mean, held_out = map(_percents, (more, [sum(more) / len(more)], unseen))
        cells += ("–",) * 3 if precision == "bf16" else (above, mean, held_out)
        if timed:
            cells.append(f"{sum(runs[precision]['tokens_per_second'] for runs in of.values()) / len(of):,.0f}")
        rows.append((LABELS[precision], *cells))
    settings = payload["settings"]
    tokens = settings["accumulate"] * settings["rows"] * settings["sequence"]
    how = f"Mean loss of the last tenth of {settings['steps']:,} steps of {tokens:,} bytes, in bits per byte. "
    how += "Runs of one seed have the same first weights and the same bytes. Held-out text: no run was trained on it."
    beside = ("beside bf16, by seed", "mean", "of held-out text, by seed")
    columns = ("124 million parameters", *(f"seed {seed}" for seed in seeds), *beside)
    return [table(payload, "A GPT's loss by precision and seed", columns + ("tokens/s",) * timed, rows, how)]


def curve(of: dict[int, dict[str, dict[str, Any]]], precision: str, few: int) -> Any:
    """The losses `[seeds, steps / few]` of a precision, each the mean of `few` steps."""
    losses = np.array([one[precision]["losses"] for one in of.values()])
    return losses[:, : losses.shape[1] // few * few].reshape(len(of), -1, few).mean(2)


def sentence(payload: Payload) -> str:
    """README's sentence: how far FP8's loss ends from bf16's of the same seed."""
    recipes = [(precision, of) for precision, of in by_precision(payload) if precision != "bf16"]
    more = [tail(runs[name]) / tail(runs["bf16"]) - 1 for name, of in recipes for runs in of.values()]
    count, steps = len(_by_seed(payload)), payload["settings"]["steps"]

    def beside(share: float) -> str:
        return f"{abs(100 * share):.1f} % {'above' if share > 0 else 'below'}"

    low, high = beside(min(more)), beside(max(more))
    span = f"at most {high}" if low.startswith("0.0 %") else f"between {low} and {high}"
    return (
        f"A GPT of 124 million parameters was trained for {steps:,} steps from {count} seeds. At the end its loss in "
        f"{len(recipes)} recipes of FP8 is {span} that in bf16."
    )


def band(axes: Any, x: Any, of_seeds: Any, precision: str) -> None:
    """The mean over seeds as a line, and all between the least and the greatest as a band."""
    axes.plot(x, np.mean(of_seeds, 0), color=COLOURS[precision], linewidth=1.2, label=LABELS[precision])
    axes.fill_between(x, np.min(of_seeds, 0), np.max(of_seeds, 0), color=COLOURS[precision], alpha=0.2, linewidth=0)


def plot(payload: Payload) -> None:
    """Draw docs/seeds.png: the losses, how far FP8's are from those of bf16 of the same seed, and the last tenth."""
    with drawing("seeds", 1, 3, (13, 3.8), width_ratios=(4, 5, 3)) as (_, (curves, differences, ends)):
        found = list(by_precision(payload))
        for place, (precision, of) in enumerate(found):
            few = max(1, payload["settings"]["steps"] // 50)
            runs, bf16 = (curve(of, name, few) for name in (precision, "bf16"))
            steps = few * (np.arange(runs.shape[1]) + 0.5)
            band(curves, steps, bits(runs), precision)
            if precision != "bf16":
                band(differences, steps, 100 * (runs / bf16 - 1), precision)
                more = [100 * (tail(one[precision]) / tail(one["bf16"]) - 1) for one in of.values()]
                ends.plot(more, [place] * len(more), "o", color=COLOURS[precision], markersize=6)
                ends.plot([sum(more) / len(more)], [place], "|", color=COLOURS[precision], markersize=22)
        curves.set(xlabel="step", ylabel="bits per byte", title="Loss, 124 million parameters", yscale="log")
        ticks = (0.8, 1, 1.5, 2, 3, 4, 6, 8)
        curves.set_yticks(ticks, labels=map(str, ticks))
        curves.minorticks_off()
        curves.legend()
        for axes, line in ((differences, differences.axhline), (ends, ends.axvline)):
            line(0, color=GREY, linewidth=1)
            axes.grid(True, axis="y" if axes is differences else "x", alpha=0.3)
        seeds = len(_by_seed(payload))
        title = f"Beside bf16 of the same seed; bands: {seeds} seeds"
        differences.set(xlabel="step", ylabel="% above bf16", title=title)
        labels = [LABELS[precision].removeprefix("FP8, ") for precision, _ in found if precision != "bf16"]
        ends.set_yticks(range(1, 1 + len(labels)), labels)
        ends.set(ylim=(0.5 + len(labels), 0.5), xlabel="% above bf16", title="The last tenth, by seed")


def main() -> None:
    """Draw, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="train, and write seeds.jsonl and seeds.json")
    folder = parser.parse_args().measure
    if folder is None:
        plot(measure.read_result(NAME))
        return
    start = time.perf_counter()
    payload = run(
        lambda done: print(f"{done:.0%}, {time.perf_counter() - start:.0f} s", flush=True), lines=folder / "seeds.jsonl"
    )
    print(measure.write_result(NAME, payload, folder))


if __name__ == "__main__":
    main()
