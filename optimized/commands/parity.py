"""Compare the two sides op by op: how many words were compared, and how many of them differ.

On a machine with a Hopper GPU both sides run (live). Elsewhere the CPU is compared with what an H200 recorded:
outputs of this project's kernels and of cuBLASLt, six training steps of an FP8 Linear made of cuBLASLt, and each call
of an op in six training steps of Transformer Engine's layers. Where Transformer Engine may round otherwise, nothing is
compared: `twin bench transformer_engine --recorded` counts the words that differ there.
A recording has digests of large outputs: if a digest is equal, every word is; if it differs, at least one word counts
as different. The exit code is 1 if any word differs, and the cases that differ are named.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from optimized import measure
from optimized.commands import CommandError, check_folder
from optimized.commands import outputs as overwriting
from optimized.compare import Tally
from optimized.cuda.device import hopper
from optimized.recordings import cases, linear, outputs, reader, tensor_core, transformer_engine
from optimized.recordings.case import Case
from optimized.recordings.outputs import RECORDING, Recording

SUMMARY = "op by op: words compared and words different, against a GPU or an H200's recordings"
Results = dict[str, Tally]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", help="only the ops whose name contains this text, in small or capital letters")
    parser.add_argument("--replay", action="store_true", help="replay recordings even where there is a Hopper GPU")
    parser.add_argument("--write", action="store_true", help="store the counts of a whole replay in docs/results")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help=f"write {RECORDING}.npz with the GPU's outputs (needs a Hopper GPU)",
    )


def live(case: Case, gpu: torch.device) -> Tally:
    """Run a case on both sides."""
    tally = Tally()
    here, there = case.run(torch.device("cpu")), case.run(gpu)
    for name, tensor in here.items():
        tally.add(tensor, there[name])
    return tally


def replay(case: Case, recording: Recording) -> Tally:
    """Run a case on the CPU and compare with its recording."""
    tally = Tally()
    for name, tensor in case.run(torch.device("cpu")).items():
        tally.merge(recording.compare(case.key(name), tensor))
    return tally


def _jobs(gpu: torch.device | None, listed: list[Case]) -> Iterator[tuple[str, str, Callable[[], Tally]]]:
    """Everything that this machine can compare: names of ops, names of their cases, and functions that compare."""
    if gpu is not None:
        for case in (*listed, *cases.lists()):
            yield case.op, case.name, partial(live, case, gpu)
        return
    recording = outputs.read(reader.DATA)
    for case in listed:
        if not case.live:
            yield case.op, case.name, partial(replay, case, recording)
    for recorded in tensor_core.steps():
        yield f"wgmma {recorded.formats.replace('.', ' × ')}", f"{len(recorded.a)} tiles", recorded.compare
    for product in tensor_core.products():
        yield f"cuBLASLt GEMM, {product.accumulate} accumulation", product.title, product.compare
    for name in linear.CASES:
        yield "Linear by cuBLASLt, 6 steps", name, partial(linear.compare, name)
    for name in transformer_engine.names():
        yield "Transformer Engine's ops in training steps", name, partial(transformer_engine.compare, name)


def compare(gpu: torch.device | None, wanted: str | None, console: Console) -> Results:
    """Run every comparison whose op contains `wanted`, and name the cases in which words differ."""
    jobs = [job for job in _jobs(gpu, list(cases.cases())) if wanted is None or wanted.lower() in job[0].lower()]
    if not jobs:
        raise CommandError(f"--op is {wanted!r}, and no op's name contains it; `twin parity` lists the ops.")
    results: Results = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("comparing", total=len(jobs))
        for op, name, job in jobs:
            progress.update(task, description=op)
            tally = job()
            if tally.different:
                console.print(f"different: {op}, {name}: {tally}", markup=False, highlight=False)
            results.setdefault(op, Tally()).merge(tally)
            progress.advance(task)
    return results


def record(folder: Path, gpu: torch.device | None, console: Console) -> int:
    """Write the GPU's outputs for every case that is not `live`."""
    if gpu is None:
        raise CommandError("--record needs a Hopper GPU; `twin info` says what this machine lacks.")
    check_folder("--record", folder)
    overwriting.check("--record", folder / f"{RECORDING}.npz", overwriting.RECORDING)
    found = [case for case in cases.cases() if not case.live]
    words: outputs.Outputs = {}
    failed = 0
    with Progress(console=console, transient=True) as progress:
        for case in progress.track(found, description="recording"):
            try:
                words |= {case.key(name): tensor for name, tensor in case.run(gpu).items()}
            except Exception as error:  # the other cases are recorded all the same: time on a Hopper machine is costly
                failed += 1
                console.print(f"{case.op}, {case.name}: not recorded: {error!r}", markup=False)
    path = outputs.write(folder, words, gpu)
    size = path.stat().st_size / 1e6
    console.print(f"{len(words):,} outputs of {len(found) - failed} cases written to {path} ({size:.2f} MB)")
    return 1 if failed else 0


def _mode(gpu: torch.device | None, asked: bool) -> str:
    if gpu is not None:
        return f"live: the CPU against {torch.cuda.get_device_name(gpu)} in this machine"
    machine = reader.provenance("tensor_core_h200")
    why = "" if asked else " (this machine has no Hopper GPU to run live)"
    return f"replay: the CPU against recordings of an {machine['gpu']}{why}"


def _say_what_changed(console: Console) -> None:
    """Name the kernels that have changed since the single ops were recorded."""
    origin = outputs.read(reader.DATA).provenance
    changed = measure.outdated({"provenance": origin})
    if changed:
        when = f"{RECORDING}.npz was recorded on {origin['date'][:10]}, before the last change of: "
        console.print(when + ", ".join(changed))


def _group(op: str) -> str:
    """Whose words were recorded for an op."""
    if op.startswith("Transformer Engine"):
        return "Transformer Engine: its ops in six training steps, the parts that must be equal"
    if op.startswith("wgmma"):
        return "an H200's tensor cores, single steps"
    if "cuBLASLt" in op:
        return "cuBLASLt: " + ("a Linear's six training steps" if op.startswith("Linear") else "GEMMs")
    return "our kernels: every op and layer"


def _store(results: Results) -> None:
    """Replace docs/results/parity.json."""
    groups: Results = {}
    for op, tally in results.items():
        groups.setdefault(_group(op), Tally()).merge(tally)
    rows = [{"of": of, "words": tally.compared, "different": tally.different} for of, tally in groups.items()]
    payload = {"command": "twin parity --replay", "rows": rows, "provenance": measure.provenance(())}
    measure.write_result("parity", payload)


def run(args: argparse.Namespace, console: Console) -> int:
    if args.record is not None and (args.op is not None or args.replay):
        raise CommandError("--record writes the outputs of all ops on a GPU; without --op and --replay it is accepted.")
    if args.write and (args.op is not None or not args.replay):
        raise CommandError("--write stores the counts of a whole replay; --replay without --op is accepted with it.")
    if args.write:
        measure.repository("--write")
        overwriting.check("--write", measure.RESULTS / "parity.json", overwriting.RESULT)
    gpu = None if args.replay else hopper()
    if args.record is not None:
        return record(args.record, gpu, console)
    mode = _mode(gpu, args.replay)
    console.print(mode)
    if gpu is None:
        for name in reader.NAMES:
            reader.arrays(name)  # a missing or damaged file is found before any work
        _say_what_changed(console)
    results = compare(gpu, args.op, console)
    table = Table(caption=mode, caption_justify="left")
    for column in ("op", "words compared", "words different"):
        table.add_column(column, justify="left" if column == "op" else "right")
    total = Tally()
    for op, tally in results.items():
        total.merge(tally)
        colour = "green" if tally.equal else "red"
        table.add_row(op, f"{tally.compared:,}", f"[{colour}]{tally.different:,}[/]")
    table.add_section()
    table.add_row("all", f"{total.compared:,}", f"{total.different:,}")
    console.print(table)
    if args.write:
        _store(results)
    return 0 if total.equal else 1
