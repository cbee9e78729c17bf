"""What benchmarks of several GPUs of one host share: their ranks, a step's time, and a result kept row by row."""

import datetime
import gc
import importlib.util
import itertools
import json
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import optimized as te
from optimized import measure
from optimized.bench import Payload
from optimized.bench.layers.layer_models import engine, their_recipe
from reference.support import files

STEPS, WARM_UP = 8, 16
HEAT = 15
"""Seconds of work before the first contestant: a GPU at its power limit has a lower clock when it is warm."""
OURS, THEIRS, TORCH = "Twin Engine, FP8", "Transformer Engine, FP8", "PyTorch, compiled, bf16"
"""Whose layers a contestant has."""
Row = dict[str, Any]
Step = Callable[[], None]


class Benchmark(NamedTuple):
    """What is measured.

    Attributes:
        what: in a few words.
        kernels: the files that the result depends on.
        found: what the result says besides its rows.
        measured: (contestant, device) → a row's numbers, "ms" among them; all ranks call it alike.
    """

    what: str
    kernels: tuple[str, ...]
    found: Payload
    measured: Callable[[Any, torch.device], Row]


class Turn(NamedTuple):
    """A contestant, and what its row says of it: strings and numbers."""

    about: Row
    contestant: Any


def library(who: str) -> Any:
    """The package whose layers, autocast and optimizers a contestant has; of `TORCH` ours, which it turns off."""
    theirs = engine()  # of every contestant: it must be imported before the first one runs
    return theirs if who == THEIRS else te


def delayed(who: str, reduce_amax: bool) -> Any:
    """Delayed scaling as that package has it."""
    recipe = te.DelayedScaling(amax_history_len=16, amax_compute_algo="max", reduce_amax=reduce_amax)
    return their_recipe(recipe) if who == THEIRS else recipe


def runs(who: str) -> bool:
    """Whether such a contestant can run here."""
    return who != THEIRS or importlib.util.find_spec("transformer_engine") is not None


def timed(step: Step, device: torch.device) -> list[float]:
    """Milliseconds of each of some steps: from event to event on this rank's GPU, while the host runs ahead."""
    steps, warm_up = (STEPS, WARM_UP) if device.type == "cuda" else (2, 1)
    for _ in range(warm_up):
        step()
    dist.barrier()
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for _ in range(steps):
            step()
            moments.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(moments)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def heat(device: torch.device, seconds: float = HEAT) -> None:
    """Multiply matrices until a GPU is as warm as in training, so that who is measured first has no colder one."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    end = time.time() + seconds
    while time.time() < end:
        for _ in range(50):
            torch.mm(a, a)
        torch.cuda.synchronize()


def row_of(turn: Turn, benchmark: Benchmark, device: torch.device) -> Row:
    """A row of the result; an error is one, too."""
    row = dict(turn.about)
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = benchmark.measured(turn.contestant, device)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        row |= max(every, key=lambda one: one["ms"]["median"])  # of the slowest GPU
        if device.type == "cuda":
            row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    gc.collect()  # a model that is alive has scales to update
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _shown(turn: Turn, row: Row) -> str:
    about = "  ".join(map(str, turn.about.values()))
    return f"{about:60} " + (row["error"] if "error" in row else f"{row['ms']['median']:8.2f} ms")


def _work(
    rank: int, world: int, port: int, kind: str, benchmark: Benchmark, turns: Sequence[Turn], end: float, output: Path
) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        heat(device)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=datetime.timedelta(seconds=90))
    for number, turn in enumerate(turns):
        # A group of its own: models that are gone keep their places in the amaxes of the ranks of one.
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            store=dist.PrefixStore(str(number), store),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=90),
        )
        over = torch.tensor([int(time.time() > end)], device=device)
        dist.broadcast(over, 0)
        row = {} if int(over) else row_of(turn, benchmark, device)
        if rank == 0 and row:
            payload = json.loads(output.read_text())
            payload["rows"].append(row)
            payload |= {"provenance": measure.provenance(benchmark.kernels)} if kind == "cuda" else {}
            files.write(output, json.dumps(payload, indent=1) + "\n")
            print(_shown(turn, row), flush=True)
        if "error" in row:  # others may wait in a collective: the rest is not to be trusted
            break
        dist.barrier()
        dist.destroy_process_group()
        if not row:
            break


def start(output: str, benchmark: Benchmark, world: int) -> None:
    """A result without rows."""
    payload = {"what": benchmark.what, "ranks": world, **benchmark.found, "rows": []}
    files.write(Path(output), json.dumps(payload, indent=1) + "\n")


def run(
    output: str,
    benchmark: Benchmark,
    turns: Sequence[Turn],
    world: int,
    kind: str,
    end: float,
) -> None:
    """Take turns on `world` ranks, none that begins after `end` (of `time.time`), and add their rows to the result.

    What was measured stays if the rest does not end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (world, port, kind, benchmark, turns, end, Path(output))
    torch.multiprocessing.spawn(_work, arguments, nprocs=world)  # type: ignore[no-untyped-call]
