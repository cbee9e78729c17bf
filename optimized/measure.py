"""Times on the GPU, and records where a number comes from.

`interleave` times variants in rounds, so that they share one clock and one temperature, with CUDA events on the
current stream. The time of a call depends on what L2 (60 MB on an H200) holds: let each variant walk over inputs that
together exceed L2, or pass `flush`. `provenance` and `write_result` make a result file that says on what, with what and
when it was measured, with a hash of the kernels' code; `outdated` compares the hashes with the code of today, and takes
source of the same machine code (tests/tools/same_code.py) for the same.
"""

import datetime
import json
import math
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch

from optimized.cuda import compiler
from reference.support import files

_PACKAGE = Path(str(resources.files(__package__)))
ROOT = _PACKAGE.parent
"""The repository; in a wheel, the package `twin_engine`."""
INSTALLED = (_PACKAGE / "results").is_dir()
"""Whether this is a wheel, which has the results, but neither docs/ nor a history."""
RESULTS = _PACKAGE / "results" if INSTALLED else ROOT / "docs" / "results"
SAME_CODE = _PACKAGE / "kernels" / "same_code.json"
RESTORED = ": install the package anew, or in a clone `git checkout -- docs/results`"


def repository(what: str) -> Path:
    """The repository, in which `what` is to be written.

    Raises:
        files.NotWritten: this is a wheel.
    """
    if INSTALLED:
        raise files.NotWritten(
            f"{what}: it is written in a clone of the repository, and {ROOT} is an installed package."
        )
    return ROOT


class Flush:
    """Fills L2 by reading a large buffer. Writing would leave dirty lines for the next kernel."""

    def __init__(self, size: int = 1 << 28) -> None:
        self.buffer = torch.zeros(size // 4, dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        self.buffer.amax()


def graph(call: Callable[[int], object], calls: int) -> Callable[[], object]:
    """Capture `call(0)`, `call(1)`, ... as one CUDA graph and return its replay, which leaves out the host's time."""
    call(0)  # modules must be loaded before the capture
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for i in range(calls):
            call(i)

    def replay() -> object:
        captured.replay()
        return call  # this keeps the tensors that the graph reads alive

    return replay


def copy_of(size: int, calls: int, footprint: int = 1 << 29) -> Callable[[], object]:
    """`calls` copies over buffers that exceed L2, as one CUDA graph; together a copy reads and writes `size` bytes.

    A short op that moves as many bytes is compared with it: the copy, too, pays for its start and its end.
    """
    count = max(1, min(calls, -(-footprint // size)))
    pairs = [torch.empty(2, size // 4, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(count)]
    return graph(lambda i: pairs[i % count][1].copy_(pairs[i % count][0]), calls)


def rounds(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """`count` rounds of all names; the order is drawn anew for each round, and is the same at every call.

    In a fixed order, each variant would always find the caches and the clock as the same other one left them. A layer's
    FP8 GEMMs took 0.6 % longer (mean of twelve) right after cuBLASLt's last algorithm than after themselves; an FP8
    layer's step takes up to 5 % longer right after the same layer in 16 bits.
    """
    order, draw = list(names), random.Random(0)
    for _ in range(count):
        draw.shuffle(order)
        yield order.copy()


def interleave(
    variants: Mapping[str, Callable[[], object]],
    repeats: int = 50,
    warmup: int = 5,
    flush: Callable[[], object] | None = None,
    ahead: bool = False,
) -> dict[str, list[float]]:
    """Time each variant `repeats` times, in `rounds`.

    Args:
        variants: calls by name; each only queues work on the current stream.
        repeats: samples of each variant.
        warmup: untimed rounds before the first sample.
        flush: called before every sample, untimed. It also keeps the GPU busy while the host queues the sample, so
            that the time of a short variant is not that of its launches.
        ahead: whether the GPU sleeps until every sample is queued, so that no sample contains the host's time. With
            more than about 200 samples the queue is full before the GPU wakes.

    Returns:
        Milliseconds by name, `repeats` of each.
    """
    events = {
        name: [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for name in variants
    }
    for _ in range(warmup):
        for variant in variants.values():
            variant()
    awake = torch.cuda.Event()
    cycles = 1 << 22  # of sleep, 2 ms
    late = True
    while late:
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(cycles)
            awake.record()
        for repeat, order in enumerate(rounds(variants, repeats)):
            for name in order:
                if flush is not None:
                    flush()
                start, end = events[name][repeat]
                start.record()
                variants[name]()
                end.record()
        late = ahead and awake.query()
        if late and cycles > 1 << 27:
            raise RuntimeError(
                f"repeats={repeats}: the host is behind a GPU that sleeps for {cycles} cycles; lower it."
            )
        cycles *= 2
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median and spread (10th and 90th percentile) of samples, in their unit."""
    if len(samples) < 2:
        value = samples[0]
        return {"median": value, "p10": value, "p90": value}
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return {"median": statistics.median(samples), "p10": tenths[0], "p90": tenths[-1]}


def interval(samples: Sequence[float], confidence: float = 0.95) -> dict[str, float]:
    """Median, and the narrowest pair of order statistics that encloses the true median with at least `confidence`.

    The k-th smallest of n independent samples exceeds the true median with the probability that fewer than k of n fair
    coins fall heads, whatever the distribution. Fewer than 6 samples cannot give 0.95: then the pair spans all samples.
    """
    ordered, n = sorted(samples), len(samples)
    below, rank = 0.5**n, 0  # the chance of `rank` heads or fewer
    while 2 * below <= 1 - confidence:
        rank += 1
        below += math.comb(n, rank) * 0.5**n
    rank = max(rank - 1, 0)
    return {"median": statistics.median(ordered), "low": ordered[rank], "high": ordered[n - 1 - rank]}


def spread(samples: Sequence[float]) -> dict[str, float]:
    """`summary` and `interval` in one."""
    return {**summary(samples), **interval(samples)}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def clocks(index: int = 0) -> dict[str, str] | None:
    """Driver, clocks, power and temperature at this moment, as nvidia-smi reports them; None without nvidia-smi."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    line = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={index}")
    if not line:
        return None
    return dict(zip(fields.split(","), (value.strip() for value in line.split(",")), strict=False))


def provenance(kernels: Sequence[str]) -> dict[str, Any]:
    """On what, with what and when a result was measured; call it right after measuring, at the clocks of the run.

    `kernels` are the kernel files (without `.cu`) whose sources the result depends on.
    """
    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
    commit = status = None
    if not INSTALLED:  # git would speak of the repository around the virtual environment
        commit, status = _output("git", "rev-parse", "HEAD"), _output("git", "status", "--porcelain")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "nvidia_smi": clocks(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cupy": version("cupy-cuda13x"),
        "nvrtc": compiler.nvrtc_version(),
        "transformer_engine": version("transformer_engine"),
        "commit": commit,
        "commit_is_clean": None if commit is None else status == "",
        "kernels": {kernel: compiler.source_hash(kernel) for kernel in kernels},
    }


def outdated(result: Mapping[str, Any], links: Iterable[Mapping[str, Any]] | None = None) -> list[str]:
    """The names of the kernels that have changed since `result`, the content of a result file, was measured.

    A kernel of other source but the same machine code has not changed: `links` say so (of `same_code`, if None).
    """
    known = same_code() if links is None else list(links)
    return [kernel for kernel, recorded in result["provenance"]["kernels"].items() if _changed(kernel, recorded, known)]


def _changed(kernel: str, recorded: str, links: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no chain of links leads from a kernel's recorded hash to the hash that a kernel has today."""
    reached, waiting = set(), [(kernel, recorded)]
    while waiting:
        name, source = waiting.pop()
        try:
            if compiler.source_hash(name) == source:
                return False
        except ValueError:
            pass  # a kernel file that is gone; a link may say which has its machine code
        reached.add((name, source))
        following = ((link["now"], link["to"]) for link in links if (link["kernel"], link["from"]) == (name, source))
        waiting += [one for one in following if one not in reached]
    return True


def same_code() -> list[dict[str, Any]]:
    """What tests/tools/same_code.py has shown: source `from` of a kernel file and source `to` of the file `now` have
    the same machine code in every configuration. Empty if nothing is noted.

    Raises:
        files.Damaged: the file is not JSON.
    """
    try:
        return list(files.record(SAME_CODE, RESTORED)["links"])
    except FileNotFoundError:
        return []


def note_same_code(links: Iterable[Mapping[str, Any]], path: Path = SAME_CODE) -> None:
    """Add links to those of `same_code`.

    Raises:
        files.NotWritten: the file cannot be written.
    """
    found = [*same_code(), *links]
    files.write(path, json.dumps({"links": found}, indent=1) + "\n")


def read_result(name: str) -> dict[str, Any]:
    """The content of `docs/results/<name>.json`.

    Raises:
        files.Damaged: it is not there, or is no result.
    """
    path = RESULTS / f"{name}.json"
    try:
        payload = files.record(path, RESTORED)
    except FileNotFoundError as error:
        raise files.Damaged(f"{path} is not there: this result has not been recorded.") from error
    origin = payload.get("provenance")
    if not (
        isinstance(origin, dict) and isinstance(origin.get("kernels"), dict) and isinstance(origin.get("date"), str)
    ):
        raise files.Damaged(f"{path} is damaged: it does not say when and of what it was measured{RESTORED}.")
    return payload


def write_result(name: str, payload: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write `docs/results/<name>.json`.

    Raises:
        ValueError: the payload has no `provenance`.
        files.NotWritten: the file cannot be written.
    """
    if "provenance" not in payload:
        raise ValueError(f"payload of {name!r} has no 'provenance'; a result says on what it was measured.")
    path = folder / f"{name}.json"
    files.write(path, json.dumps(payload, indent=1, sort_keys=False) + "\n")
    return path


def write_plot(path: Path, figure: Any, metadata: Mapping[str, str] | None = None) -> None:
    """Write a figure of matplotlib's as a PNG; `metadata` are texts in it.

    Raises:
        files.NotWritten: the file cannot be written.
    """
    with files.replacing(path) as file:
        figure.savefig(file, format="png", dpi=110, metadata=metadata)
