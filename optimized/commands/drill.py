"""Flip bits in a recorded training step, and see whether a replay of the recording finds each.

    twin drill                          a few flips of each kind, in a minute
    twin drill --flips 1000 --write     the numbers of docs/results/tested.md, and the picture

A bit flips in a weight, the optimizer's state, an activation, a gradient, an FP8 code, a scale, an op's result, or
inside the tensor core's model: in a product, the aligned sum or an accumulator. The exit code is 0 if each flip was
named, or changed nothing, or is of an op that the verdict says it does not judge, and 1 if one was missed.
"""

import argparse
import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from optimized import measure
from optimized.bench import drill_plot
from optimized.commands import check_folder, outputs, positive, tested
from reference.inspect.drills.drill import KINDS, OUTCOMES, Drill, Outcome

SUMMARY = "flip bits in a recorded step, and count how many a replay finds"
_ROUND = 10  # flips of each kind
_drill: Drill | None = None  # a process's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flips", type=positive, default=20, metavar="N", help="flips of each kind (20)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of all that is drawn (1)")
    parser.add_argument("--minutes", type=positive, metavar="N", help="begin no new flip after N minutes")
    parser.add_argument(
        "--processes", type=positive, default=1, metavar="N", help="processes; the counts do not depend on it (1)"
    )
    parser.add_argument("--write", action="store_true", help="replace docs/results/drill.json and docs/drill.png")


def _some(seed: int, turn: int, kind: str, count: int) -> tuple[str, list[Outcome]]:
    """Flips of a kind, the same in each process."""
    global _drill
    if _drill is None:
        torch.set_num_threads(1)
        _drill = Drill()
    generator = torch.Generator().manual_seed((seed * 1_000_003 + turn) * len(KINDS) + KINDS.index(kind))
    return kind, [_drill.fault(kind, generator) for _ in range(count)]


def _outcomes(args: argparse.Namespace) -> Iterator[list[tuple[str, list[Outcome]]]]:
    """What became of flips, turn by turn; a turn has as many of each kind."""
    end = time.monotonic() + 60 * args.minutes if args.minutes is not None else float("inf")
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for turn in range(-(-args.flips // _ROUND)):
            if time.monotonic() > end:
                return
            count = min(_ROUND, args.flips - turn * _ROUND)
            run = map if args.processes == 1 else pool.map
            same = (itertools.repeat(x) for x in (args.seed, turn))
            yield list(run(_some, *same, KINDS, itertools.repeat(count)))


def run(args: argparse.Namespace, console: Console) -> int:
    if args.write:
        measure.repository("--write")
        check_folder("--write", measure.RESULTS)
        outputs.check("--write", measure.RESULTS / "drill.json", outputs.RESULT)
    found: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("flipping", total=args.flips * len(KINDS))
        for turn in _outcomes(args):
            for kind, outcomes in turn:
                found[kind] += outcomes
                progress.advance(task, len(outcomes))
    payload = _payload(args, found)
    for table in tested.drill(payload):
        console.print(table.markdown(), markup=False, highlight=False, soft_wrap=True)
    if args.write:
        console.print(
            f"written: {measure.write_result('drill', payload)}", markup=False, highlight=False, soft_wrap=True
        )
        drill_plot.plot(payload)
    missed = sum(one["outcomes"]["missed"] for one in payload["kinds"].values())
    return 1 if missed else 0


def _payload(args: argparse.Namespace, found: dict[str, list[Outcome]]) -> dict[str, Any]:
    kinds = {}
    for kind, outcomes in found.items():
        counts = Counter(one.what for one in outcomes)
        kinds[kind] = {
            "flips": len(outcomes),
            "changed": sum(one.changed for one in outcomes),
            "outcomes": {what: counts[what] for what in OUTCOMES},
            "at": dict(Counter(one.at for one in outcomes if one.at).most_common()),
        }
    command = f"twin drill --flips {len(found[KINDS[0]])} --seed {args.seed} --write"
    return {"provenance": measure.provenance(()), "command": command, "kinds": kinds}
