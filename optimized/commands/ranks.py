"""The processes of torchrun that share a run: who they are, what they tell each other, and how they end.

An error that all know of ends all of them with its sentence, which rank 0 says. A rank that ends by itself is missed by
the others: over gloo as soon as it is gone, over NCCL after `LIMIT` at the latest.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from optimized.commands.errors import CommandError
from reference.parallel import ending
from reference.support import files

T = TypeVar("T")
LIMIT = datetime.timedelta(minutes=10)  # of silence, and of waiting for all ranks to be there
PATIENCE = datetime.timedelta(seconds=30)  # in which a rank that ends tells the others why
OWN = ("text", "output")  # paths, which may be others on another host; what is there is compared later
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Before `--` torchrun takes --log for one of its own options.
START = "torchrun --nproc-per-node N --no-python -- twin train --data-parallel --groups N"


class Everywhere(CommandError):
    """An error that all ranks raise."""


@dataclass(frozen=True)
class Ranks:
    """This process among `count` that share a run; alone it talks to nobody."""

    rank: int = 0
    count: int = 1

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Go on when all ranks are here."""
        if self.count > 1:
            dist.barrier()

    def agreed(self, make: Callable[[], T]) -> T:
        """What `make()` returns; where it is refused on one rank, all raise that sentence.

        What one rank alone may refuse comes before anything that communicates: in another `agreed`.
        """
        made, refusal = None, None
        with self.listening():
            try:
                made = make()
            except (CommandError, files.NotWritten, files.Damaged) as error:
                refusal = str(error)
            refusals = self.gather(refusal)
        for rank, one in enumerate(refusals):
            if one is not None:
                raise Everywhere(f"rank {rank}: {one}" if rank else one)
        return made  # type: ignore[return-value]

    @contextlib.contextmanager
    def listening(self, kept: Callable[[], str] = str) -> Iterator[None]:
        """Say in a sentence that another rank is gone; `kept()` follows it."""
        block = next(ending.BLOCKS)
        try:
            yield
        except Exception as error:
            if self.count > 1 and not ending.of_collective(error) and not isinstance(error, Everywhere):
                ending.told(error, block)  # the others are in a collective, and will ask
            if self.count == 1 or not ending.of_collective(error):
                raise
            what = f"another rank has ended, or has said nothing for {LIMIT.total_seconds():g} s: this one ends, too."
            said = ending.found(self.rank, self.count, block)
            which = "".join(f" Rank {one}: {sentence}" for one, sentence in said.reasons.items())
            if said.missing:
                which += f" Without a word: rank {', '.join(map(str, said.missing))}."
            raise CommandError(f"rank {self.rank}: {what}{which} {kept()}".rstrip()) from error


def shared_by(args: argparse.Namespace) -> list[str]:
    """The options by which processes share the run."""
    given = [("--data-parallel", args.data_parallel), ("--fsdp", args.fsdp)]
    given += [("--tensor-parallel", args.tensor_parallel > 1), ("--context-parallel", args.context_parallel > 1)]
    return [option for option, asked in given if asked]


def divided(args: argparse.Namespace) -> bool:
    """Whether a process alone cannot run the model."""
    return args.fsdp or args.tensor_parallel > 1 or args.context_parallel > 1


def check_layout(args: argparse.Namespace, me: Ranks) -> None:
    """Refuse a number of processes that the options do not divide."""
    size = math.prod(inner(args).values())
    sharing = " ".join(f"{option} {n}" for option, n in inner(args).items() if n > 1)
    if me.count % size or (me.count > size > 1 and not args.data_parallel):
        accepted = f"a multiple of {size} with --data-parallel, or {size},"
        raise CommandError(f"{sharing}: {me.count} ranks are here; {accepted} is accepted.")


def inner(args: argparse.Namespace) -> dict[str, int]:
    """Option → how many processes share a microbatch by it."""
    return {"--tensor-parallel": args.tensor_parallel, "--context-parallel": args.context_parallel}


def world_size() -> int:
    """The processes that a launcher says it has started; 1 without one."""
    return _number("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1


def local_rank() -> int:
    """This process among those on the machine: the number of its GPU."""
    return _number("LOCAL_RANK")


def rank() -> int:
    """This process among all."""
    return _number("RANK")


def check(option: str | None) -> None:
    """Refuse several processes that no option asks for, and one that no launcher has started."""
    if option is None:
        if world_size() > 1:
            raise CommandError(
                f"WORLD_SIZE={world_size()}: so many processes would each train the same; --data-parallel, with "
                f"--groups, lets them share a run, and one process is accepted without it."
            )
        return
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise CommandError(f"{option}: {', '.join(missing)} is not set; `{START}` sets it.")
    if not _number("RANK") < world_size():
        raise CommandError(f"RANK={_number('RANK')} with WORLD_SIZE={world_size()}; a smaller one is accepted.")


def _number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()):
        raise CommandError(f"{name}={text!r}; a whole number is accepted, as torchrun sets it.")
    return int(text)


def meet(args: argparse.Namespace, device: Callable[[], torch.device]) -> tuple[Ranks, torch.device]:
    """Who shares the run, over NCCL on GPUs and over gloo on CPUs, and this process's device.

    Before they have a process group, in which a rank with other options would leave the others waiting, ranks compare
    their options in the store where they meet. All get the sentence of one that refuses, or has another option.

    Args:
        args: of the command.
        device: finds the device, or refuses.
    """
    option = next(iter(shared_by(args)), None)

    def mine() -> torch.device:
        check(option)
        return device()

    if world_size() == 1 or any(name not in os.environ for name in NEEDED) or _number("RANK") >= world_size():
        where = mine()  # it meets nobody, or says why it cannot
        return (Ranks(), where) if option is None else _join(where, None)
    found, refusal = None, None
    try:
        found = mine()
    except CommandError as error:
        refusal = str(error)
    patience = LIMIT if refusal is None else min(LIMIT, PATIENCE)
    with _meeting(refusal):
        store, rank, count = next(rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
        options = {name: value for name, value in vars(args).items() if name not in OWN and not callable(value)}
        options["device"] = None if found is None else found.type
        all_of_them = _said_by_all(store, rank, count, {"refusal": refusal, "options": options})
    refusals = [f"rank {one}: {said['refusal']}" if one else said["refusal"] for one, said in enumerate(all_of_them)]
    sentence = next((one for one, said in zip(refusals, all_of_them, strict=True) if said["refusal"]), None)
    sentence = sentence or _difference([said["options"] for said in all_of_them])
    if sentence is not None:
        _all_have_read(store, rank, count)
        raise Everywhere(sentence)
    assert found is not None
    store.set_timeout(LIMIT)
    return _join(found, (store, rank, count))


@contextlib.contextmanager
def _meeting(refusal: str | None = None) -> Iterator[None]:
    """Say in a sentence that a rank does not meet the others, or what it would have told them."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if refusal is not None:
            raise CommandError(refusal) from error
        said = str(error).split("\n")[0]
        raise CommandError(f"rank {_number('RANK')} did not meet the others: {said}") from error


def _said_by_all(store: Any, rank: int, count: int, what: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank says, by rank."""
    store.set(f"twin-train/options/{rank}", json.dumps(what, default=str))
    return [json.loads(store.get(f"twin-train/options/{one}")) for one in range(count)]


def _all_have_read(store: Any, rank: int, count: int) -> None:
    """Go on when all are here, or soon: the store may be rank 0's, and a launcher ends the others with the first."""
    with contextlib.suppress(RuntimeError):
        store.set(f"twin-train/read/{rank}", "")
        store.wait([f"twin-train/read/{one}" for one in range(count)], min(LIMIT, PATIENCE))


def _difference(options: list[dict[str, Any]]) -> str | None:
    """The first option that a rank has otherwise than rank 0, as a sentence."""
    for rank, one in enumerate(options):
        for name, value in one.items():
            if value != options[0].get(name):
                here, there = (_written(name, given) for given in (value, options[0].get(name)))
                return f"rank {rank} has {here}, and rank 0 has {there}; the same options on all ranks are accepted."
    return None


def _written(name: str, value: Any) -> str:
    """An option as it is written, such as `--seed 3`, `--fsdp` or `no --fsdp`."""
    option = "--rate" if name == "learning_rate" else f"--{name.replace('_', '-')}"
    return f"no {option}" if value is None or value is False else f"{option} {'' if value is True else value}".rstrip()


def _join(where: torch.device, met: Any) -> tuple[Ranks, torch.device]:
    """The process group of ranks that have met in a store, or meet now."""
    gpu = where if where.type == "cuda" else None
    given = {} if met is None else dict(zip(("store", "rank", "world_size"), met, strict=True))
    with _meeting():
        dist.init_process_group("gloo" if gpu is None else "nccl", timeout=LIMIT, device_id=gpu, **given)
    return Ranks(dist.get_rank(), dist.get_world_size()), where
