"""What a line of `te.trail` after each step costs (docs/results/trail.json).

Whole steps of the 124m model of `twin train` in FP8, without a trail, with a line after each step and after each tenth,
in turns. A line costs as much after a long step as after a short one, so steps of eight microbatches are timed as well,
without a trail and with a line after each; models of this size are trained with larger steps still. Then apart: the
digests of all its tensors on the GPU, one kernel, and what the host does for a line while the GPU is idle, the file's
line of an earlier step included.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import optimized as te
from optimized import measure
from optimized.bench import Payload, Progress, result, silent
from optimized.bench.layers import layer
from optimized.bench.models import train
from optimized.bench.table import Table, table
from optimized.training import corpus
from optimized.training.settings import SIZES, Settings
from optimized.training.trainer import Trainer
from reference.inspect.trails.state_again import StateAgain
from reference.inspect.trails.sums import sums
from reference.inspect.trails.trail import KINDS, TrailWriter

NAME = "trail"
WHAT = "te.trail: a line of digests after each step"
KERNELS = (*train.KERNELS, "word_sums")
SETTINGS = replace(SIZES["124m"], precision="delayed")
REPEATS, STEPS, UNCOUNTED = 9, 10, 2  # blocks, the steps of each, and steps at its beginning that are not counted
EVERY = {"a line after each step": 1, "after each tenth": 10}
ACCUMULATE, LARGE_STEPS = 8, 4  # microbatches of a larger step, and the steps of a block
ALONE = 30  # samples of the kernel, and of the host


def _host(writer: TrailWriter, count: int) -> list[float]:
    """Milliseconds of the host for a line each, while nothing else is to be done."""
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        writer.step()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def _rows(
    trainer: Trainer, names: list[str], repeats: int, count: int
) -> tuple[list[dict[str, Any]], list[float], float]:
    """Steps without a trail and with those of these names; the host's times for a line, and the bytes of one."""

    def steps(after: Callable[[], object]) -> Callable[[int], None]:
        def block(count: int) -> None:
            for _ in range(count):
                trainer.train()
                after()

        return block

    with tempfile.TemporaryDirectory() as folder:
        writers = {name: te.trail(Path(folder) / name, trainer.model, every=EVERY[name]) for name in names}
        blocks = {"without": steps(lambda: None)} | {name: steps(one.step) for name, one in writers.items()}
        for block in blocks.values():
            block(3)
        samples = layer.timed(blocks, repeats, count, UNCOUNTED)
        first = writers[names[0]]
        host = _host(first, ALONE)
        for writer in writers.values():
            writer.close()
        size = first.path.stat().st_size / first.steps
    tokens = trainer.settings.tokens
    rows = [{"name": name, "tokens": tokens, "ms": measure.spread(values)} for name, values in samples.items()]
    return rows, host, size


def run(
    progress: Progress = silent,
    repeats: int = REPEATS,
    settings: Settings = SETTINGS,
    text: corpus.Corpus | None = None,
    device: str = "cuda",
) -> Payload:
    """Measure."""
    text = corpus.read() if text is None else text
    large = replace(settings, accumulate=ACCUMULATE)
    rows = _rows(Trainer(large, text, device), list(EVERY)[:1], repeats, LARGE_STEPS)[0]
    progress(0.4)
    trainer = Trainer(settings, text, device)
    small, host, size = _rows(trainer, list(EVERY), repeats, STEPS)
    progress(0.9)
    rows = small + rows
    (group,) = StateAgain("trail", trainer.model, KINDS).now()[1]
    alone = measure.interleave({"digests": lambda: sums(group.tensors)}, ALONE, ahead=True)["digests"]
    progress(1.0)
    return result(
        "steps of a training run with and without te.trail; host clock. The kernel: CUDA events",
        KERNELS,
        repeats=repeats,
        settings={name: getattr(settings, name) for name in ("layers", "hidden", "tokens", "precision")},
        rows=rows,
        tensors=len(group.tensors),
        bytes=sum(x.nbytes for x in group.tensors),
        kernel_ms=measure.spread(alone),
        host_ms=measure.spread(host),
        bytes_a_line=size,
    )


def tables(payload: Payload) -> list[Table]:
    """The steps, and what a line is made of."""
    sizes = payload["settings"]
    what = f"{sizes['layers']} layers, hidden {sizes['hidden']}, {sizes['precision']}"
    times = {(row.get("tokens", sizes["tokens"]), row["name"]): row["ms"]["median"] for row in payload["rows"]}
    rows = [
        (f"{tokens:,} bytes a step, {name}", f"{ms:.2f}", f"{ms / times[tokens, 'without']:.3f}×")
        for (tokens, name), ms in times.items()
    ]
    how = f"Whole training steps without and with `te.trail`, in turns ({what})."
    kernel, host = payload["kernel_ms"]["median"], payload["host_ms"]["median"]
    note = (
        f"A line has the digests of {payload['tensors']} tensors, {payload['bytes'] / 1e9:.2f} GB: {kernel:.2f} ms of "
        f"the GPU ({payload['bytes'] / kernel / 1e9:.1f} TB/s), {host:.2f} ms of the host beside it, "
        f"{payload['bytes_a_line'] / 1024:.1f} KiB in the file."
    )
    return [table(payload, "What a trail costs", ("", "ms a step", "times"), rows, how, note)]
