"""Train a GPT on text, byte by byte, on a CPU or on a Hopper GPU: both compute the same bits.

    twin train                                     the smallest model on Python's standard library, with delayed scaling
    twin train notes/ --size micro --precision bf16
    twin train --resume                            continue a run that was killed; the bits are the same
    torchrun --nproc-per-node 4 --no-python -- twin train --data-parallel --groups 8 --accumulate 8
                                                   4 processes share each step; the bits are those of one process
    torchrun --nproc-per-node 4 --no-python -- twin train --tensor-parallel 2 --data-parallel ...
                                                   two share each layer's weights, and two such pairs each step

The folder of a run has checkpoint.safetensors, metrics.jsonl, loss.png and what was recorded. `--verify N` prints a
SHA-256 of weights, moments, scales, histories and random states every N steps. Losses are shown in bits per byte.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from optimized.commands import CommandError, outputs, positive, ranks
from optimized.commands.train_loop import CHECKPOINT, METRICS, PLOT, STEP, Loop
from optimized.cuda import device
from optimized.training import checkpoint, corpus
from optimized.training.layout import Layout
from optimized.training.settings import RECIPES, SIZES, Settings
from optimized.training.trainer import Trainer, check_run
from reference.support import files

SUMMARY = "train a GPT in FP8 or bf16, with the same bits on a CPU and on a GPU"
PROMPT = "def "
LOCK = ".twin-train.lock"
# What belongs to a run and is in its checkpoint: the option, what it sets, its type, its help.
OPTIONS: tuple[tuple[str, str, Any, str], ...] = (
    ("--steps", "steps", positive, "optimizer steps"),
    ("--rows", "rows", positive, "sequences of a microbatch"),
    ("--sequence", "sequence", positive, "bytes of a sequence"),
    ("--accumulate", "accumulate", positive, "microbatches of a step; FP8 weights are cast in the first"),
    (
        "--groups",
        "groups",
        positive,
        "groups of a step's microbatches; --data-parallel spreads the groups over processes",
    ),
    ("--rate", "learning_rate", float, "the highest learning rate"),
    ("--warmup", "warmup", positive, "steps until it is reached; a cosine follows, down to 0"),
    ("--weight-decay", "weight_decay", float, "of matrices"),
    ("--clip", "clip", float, "the largest norm of the gradient; 0: it is not clipped"),
    ("--dropout", "dropout", float, "of attention's weights and of what each half of a layer adds"),
    ("--seed", "seed", int, "of weights, masks and places in the text"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", type=Path, help="files and folders (default: Python's standard library)")
    parser.add_argument("--size", choices=SIZES, help="the model (default: nano)")
    parser.add_argument("--precision", choices=RECIPES, help="precision of the linear layers (default: delayed)")
    for option, name, parse, what in OPTIONS:
        parser.add_argument(option, dest=name, type=parse, help=f"{what} (nano: {getattr(SIZES['nano'], name)})")
    parser.add_argument("--recompute", action="store_const", const=True, help="activation checkpointing")
    parser.add_argument(
        "--data-parallel", action="store_true", help="share the run with the other processes of torchrun"
    )
    parser.add_argument("--fsdp", action="store_true", help="--data-parallel, with weights and moments divided, too")
    for option, what in (("--tensor-parallel", "the weights of each layer"), ("--context-parallel", "each sequence")):
        parser.add_argument(
            option,
            type=positive,
            default=1,
            metavar="N",
            help=f"N processes share {what}; more processes need --data-parallel or --fsdp, too",
        )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if there is a Hopper GPU")
    parser.add_argument("--output", type=Path, default=Path("twin_train"), help="the run's folder (./twin_train)")
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder, if there is one")
    for option, default, what in (
        ("--save", 100, "write the checkpoint every N steps, and at the end"),
        ("--evaluate", 100, "the loss on held-out text every N steps"),
        ("--log", 10, "write metrics every N steps"),
    ):
        parser.add_argument(option, type=positive, default=default, metavar="N", help=f"{what} ({default})")
    parser.add_argument("--verify", type=positive, metavar="N", help="print a SHA-256 of all state every N steps")
    parser.add_argument(
        "--compare-every", type=positive, metavar="N", help="compare all steps between ranks every N, and name the rank"
    )
    parser.add_argument("--record", type=positive, metavar="STEP", help="record this step for `twin replay`")
    parser.add_argument("--sample", type=positive, metavar="N", help="at the end, let the model write N bytes")
    parser.add_argument("--prompt", help=f"the text that the model continues (default: {PROMPT!r})")


def _settings(args: argparse.Namespace, stored: Settings | None) -> Settings:
    """What is asked for. Where a run goes on, its own settings, which no option may contradict."""
    names = ["precision", "recompute", *(name for _, name, _, _ in OPTIONS)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    try:
        if stored is None:
            return replace(SIZES[args.size or "nano"], **{"precision": "delayed", **given})
        wanted = replace(stored, **given)
        if args.size is not None:
            sizes = ("layers", "hidden", "heads", "vocabulary")
            wanted = replace(wanted, **{name: getattr(SIZES[args.size], name) for name in sizes})
    except ValueError as error:
        raise CommandError(f"twin train: {error}") from error
    differs = wanted.differences(stored)
    if differs:
        asked, has = (", ".join(f"{name}={getattr(one, name)}" for name in differs) for one in (wanted, stored))
        raise CommandError(
            f"--resume: the run in {args.output} has {has}, and {asked} is asked for. A run "
            "keeps its settings: leave that option out."
        )
    return stored


def _check(args: argparse.Namespace, trainer: Trainer) -> None:
    """Refuse options that would be without effect."""
    if args.record is not None and not trainer.step < args.record <= trainer.settings.steps:
        raise CommandError(
            f"--record {args.record}: the steps to come are {trainer.step + 1} to {trainer.settings.steps}; one of "
            f"them is accepted."
        )
    if args.compare_every is not None and set(ranks.shared_by(args)) - {"--data-parallel", "--fsdp"}:
        raise CommandError(
            "--compare-every: ranks that share weights or sequences have other digests; --data-parallel or --fsdp "
            "alone is accepted with it."
        )
    if args.compare_every is not None and not args.data_parallel:
        raise CommandError(
            "--compare-every: one process has no other to compare with; --data-parallel or --fsdp is accepted with it."
        )
    if args.sample is not None and ranks.divided(args):
        raise CommandError(
            f"--sample with {ranks.shared_by(args)[-1]}: a process that has all weights writes; --resume --sample in "
            f"one process is accepted."
        )
    if args.record is not None and ranks.shared_by(args):
        raise CommandError(
            f"--record with {ranks.shared_by(args)[0]}: a step of one process is recorded; leave one of them out."
        )
    if args.prompt is not None and (args.sample is None or not args.prompt):
        raise CommandError(f"--prompt {args.prompt!r}: a text of at least one byte, with --sample, is accepted.")


def _device(args: argparse.Namespace) -> torch.device:
    name = args.device
    # Where the GPUs are of no use, the ranks are on CPUs, of which there may be more.
    if ranks.shared_by(args) and name != "cpu" and torch.cuda.is_available() and not device.problems():
        count = torch.cuda.device_count()
        if not ranks.local_rank() < count:
            raise CommandError(
                f"LOCAL_RANK={ranks.local_rank()}: {count} GPUs are here; at most one process for each is accepted; "
                f"with more, --device cpu is accepted."
            )
        torch.cuda.set_device(ranks.local_rank())
    gpu = device.hopper() if name != "cpu" else None
    if name == "cuda" and gpu is None:
        raise CommandError(f"--device cuda: {device.problems()[0]}")
    return gpu or torch.device("cpu")


def _stored(path: Path) -> Settings | None:
    """The settings of the run whose checkpoint is at `path`; None where there is none."""
    if not files.is_there(path, ": put its file back, or name another folder"):
        return None
    settings = checkpoint.about(path).get("settings")
    known = {one.name for one in fields(Settings)}
    if not isinstance(settings, dict) or set(settings) - known:
        unknown = sorted(set(settings) - known)[0] if isinstance(settings, dict) else settings
        raise CommandError(
            f"{path} has the setting {unknown!r}, which this version does not know: a later Twin Engine wrote it, and "
            f"goes on with it."
        )
    try:
        return Settings(**settings)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{path} has settings of another version: {error}") from error


def _check_memory(settings: Settings, where: torch.device) -> None:
    """Refuse, before anything is allocated, a step that cannot fit by far."""
    if where.type == "cuda":
        room = torch.cuda.get_device_properties(where).total_memory
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.least_bytes > room:
        raise CommandError(
            f"twin train: {settings.rows} rows of {settings.sequence} bytes need more than "
            f"{settings.least_bytes / 2**30:,.0f} GiB, and this machine has {room / 2**30:,.0f}: fewer --rows with "
            f"--accumulate, a shorter --sequence or a smaller --size need less."
        )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What is refused inside, in the command's own error."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, files.Damaged):
            raise
        raise CommandError(f"twin train: {error}") from error


class Wanted(NamedTuple):
    """A run to make, which this process could begin; `resumed`: it is in the folder."""

    settings: Settings
    text: corpus.Corpus
    resumed: bool


def _wanted(args: argparse.Namespace, where: torch.device, me: ranks.Ranks) -> Wanted:
    """Refuse what this process cannot do. Nothing communicates here: a rank may be the only one that refuses."""
    path = args.output / CHECKPOINT
    if os.path.lexists(path) and not args.resume:
        raise CommandError(f"--output {args.output}: there is a run; --resume goes on with it, or name another folder.")
    stored = _stored(path)
    settings = _settings(args, stored)
    ranks.check_layout(args, me)
    sharing = me.count // (args.tensor_parallel * args.context_parallel)
    if settings.groups < sharing:
        raise CommandError(
            f"--data-parallel: {sharing} ranks share steps of {settings.groups} groups; as many --groups, or fewer "
            f"ranks, are accepted."
        )
    if me.rank == 0:
        outputs.check("--output", args.output / METRICS, outputs.METRICS)
        outputs.check("--output", args.output / PLOT, outputs.PLOT if stored is None else outputs.PICTURE)
    if me.rank == 0 and args.record is not None:  # of several ranks none records, as `_check` says
        outputs.check("--record", args.output / STEP.format(args.record), outputs.STEP)
    with _refusals():
        text = corpus.read_files(args.text, args.output) if args.text else corpus.read()
        if settings.sequence < len(text.data):  # a longer one is refused by its name
            _check_memory(settings, where)
        check_run(settings, text, Layout(args.fsdp, args.tensor_parallel, args.context_parallel))
    return Wanted(settings, text, stored is not None)


def _trainer(
    args: argparse.Namespace, console: Console, where: torch.device, me: ranks.Ranks, wanted: Wanted
) -> Trainer:
    """A new run, or the one in the folder. Ranks communicate here."""
    settings, text, resumed = wanted
    with _refusals():
        made = Trainer(settings, text, where, args.fsdp, args.tensor_parallel, args.context_parallel)
        if resumed:
            made.load(args.output / CHECKPOINT)
    _check(args, made)
    millions = sum(p.numel() for p in made.model.parameters()) / 1e6
    say = "goes on after" if resumed else "there is no checkpoint in the folder, so it starts at"
    console.print(
        f"{millions:.1f} million parameters, {settings.precision}, on {where}; {settings.tokens:,} of "
        f"{len(text.data):,} bytes a step"
        + f", shared by {me.count} ranks" * (me.count > 1)
        + f"; {say} step {made.step}" * args.resume,
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return made


def run(args: argparse.Namespace, console: Console) -> int:
    args.data_parallel = args.data_parallel or args.fsdp
    try:
        me, where = ranks.meet(args, lambda: _device(args))
    except ranks.Everywhere:
        if ranks.rank():
            return 2
        raise
    with contextlib.ExitStack() as held:
        try:
            return _run(args, Console(quiet=True) if me.rank else console, where, me, held)
        except ranks.Everywhere:
            me.wait()  # a launcher ends the other ranks when one has ended
            if me.rank:
                return 2
            raise


def _ready(args: argparse.Namespace, where: torch.device, me: ranks.Ranks, held: contextlib.ExitStack) -> Wanted:
    """The run to make, in a folder in which no other process trains."""
    if me.rank == 0:
        try:
            held.enter_context(files.locked(args.output, LOCK))
        except files.Locked as error:
            raise CommandError(f"--output {args.output}: {error} Wait for its end, or name another folder.") from error
    return _wanted(args, where, me)


def _run(
    args: argparse.Namespace, console: Console, where: torch.device, me: ranks.Ranks, held: contextlib.ExitStack
) -> int:
    """The whole run; `held` has the folder's lock."""
    resumed = me.gather(args.resume and os.path.lexists(args.output / CHECKPOINT))
    if len(set(resumed)) > 1:
        here, there = (resumed.index(one) for one in (True, False))
        raise ranks.Everywhere(
            f"--resume: rank {here} has a checkpoint in its --output, and rank {there} has none; a folder that all "
            f"ranks read is accepted."
        )
    wanted = me.agreed(lambda: _ready(args, where, me, held))
    trainer = me.agreed(lambda: _trainer(args, console, where, me, wanted))
    all_of_them = me.gather(trainer.about())
    for rank, about in enumerate(all_of_them):
        for name, value in all_of_them[0].items():
            if about[name] != value:
                raise ranks.Everywhere(
                    f"{ranks.shared_by(args)[0]}: rank {rank} has {name}={about[name]}, and rank 0 has {value}; the "
                    f"same options, text and folder are accepted."
                )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        loop = Loop(args, trainer, bar, me)
        try:
            with me.listening(loop.kept):
                while trainer.step < trainer.settings.steps:
                    loop.step()
        except KeyboardInterrupt:
            console.print(f"Interrupted in step {trainer.step + 1}. {loop.kept()}", markup=False, soft_wrap=True)
            return 130
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(error):
                raise
            gpu = trainer.model.device.type == "cuda" or isinstance(error, torch.OutOfMemoryError)
            raise CommandError(
                f"the {'GPU' if gpu else 'machine'} has no room for {trainer.settings.rows} rows of "
                f"{trainer.settings.sequence} bytes: fewer --rows with --accumulate, or --recompute, need less. "
                f"{loop.kept()}"
            ) from error
        except files.NotWritten as error:
            raise CommandError(f"{error} {loop.kept()}") from error
    if ranks.shared_by(args):
        dist.destroy_process_group()
    if loop.metrics is None:
        return 0
    loop.metrics.plot(args.output / PLOT)
    if args.sample is not None:
        written = trainer.sample((args.prompt or PROMPT).encode(), args.sample)
        console.print(written.decode(errors="replace"), markup=False, highlight=False)
    console.print(f"Run: {args.output.resolve()}", markup=False, highlight=False, soft_wrap=True)
    return 0
