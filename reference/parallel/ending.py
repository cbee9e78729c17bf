"""Ranks that end together, and say which of them had an error, ended, or says nothing.

    with te.parallel.ending_together():
        train(model)

An error of one rank leaves the others in a collective. They leave it when that rank's process ends (gloo), when the
launcher ends them (torchrun), or when the process group's timeout is over (NCCL; a rank that hangs). What is missing
then is the reason. So nothing is sent while all is well, and no collective is added. Where an error leaves the block,

    a rank's own error      the rank writes its sentence to the store where the ranks have met, and raises the error
    a collective's error    the rank says in the store that it is here, waits until the others have said so too or
                            `PATIENCE` is over, and raises an error with the sentences and the ranks that are missing

Of blocks inside of each other the innermost that an error leaves tells it, and those around it say nothing more.

The store is the default group's: torchrun's agent keeps it, or rank 0 where there is none; if that is gone, rank 0 is.
What is said stays in it. So each process counts its blocks, which every rank enters as often, and a rank's sentence has
the number of its block: of an earlier block nothing is heard.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

__all__ = ["RanksEnded", "ending_together"]

PATIENCE = 3.0  # seconds in which ranks that are here say so
KEY = "twin-engine/ended"
BLOCKS = itertools.count(1)
"""Numbers of this process's blocks; whoever begins one takes the next."""
_TOLD = "_twin_told"  # of an error: the number of the block that has told it
_LENGTH = 2000  # characters of a sentence


class RanksEnded(RuntimeError):
    """A collective failed because of other ranks.

    Attributes:
        reasons: rank → what it has said.
        missing: the ranks that have said nothing.
    """

    def __init__(self, rank: int, reasons: dict[int, str], missing: list[int]) -> None:
        self.reasons, self.missing = reasons, missing
        said = [f"rank {one} had an error: {what.rstrip('.')}" for one, what in reasons.items()]
        if missing:
            ranks = ", ".join(map(str, missing))
            said.append(f"rank{'s' * (len(missing) > 1)} {ranks} ended, or hung, without a word")
        super().__init__(f"rank {rank} ends, because {'; '.join(said) or 'a collective failed on every rank'}.")


def of_collective(error: BaseException) -> bool:
    """Whether an error is a collective's: another rank is gone, or the timeout is over."""
    # Of gloo no other type tells.
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


def told(error: BaseException, block: int) -> None:
    """Write an error of this rank in a block to the store, for the others; not again in a block around that one."""
    if getattr(error, _TOLD, 0) >= block:  # blocks inside have greater numbers, and a later one may meet it again
        return
    setattr(error, _TOLD, block)
    with contextlib.suppress(Exception):  # the store may be gone, and the error is what matters
        what = f"{type(error).__name__}: {error}".split("\n")[0][:_LENGTH]
        _store().set(f"{KEY}/{dist.get_rank()}", f"{block} {what}")


def found(rank: int, count: int, block: int, patience: float = PATIENCE) -> RanksEnded:
    """After a collective's error: what the other ranks have said, when all have said something or after `patience`.

    A rank may have left the block, and may have said it in a later one.
    """
    reasons: dict[int, str] = {}
    try:
        store = _store()
        store.set(f"{KEY}/{rank}", f"{block} ")
        end, missing = time.monotonic() + patience, [one for one in range(count) if one != rank]
        while missing:
            for one in [one for one in missing if store.check([f"{KEY}/{one}"])]:
                number, _, what = store.get(f"{KEY}/{one}").decode().partition(" ")
                if int(number) < block:
                    continue
                missing.remove(one)
                if what:
                    reasons[one] = what
            if time.monotonic() > end:
                break
            time.sleep(0.05)
    except Exception:
        missing = [] if rank == 0 else [0]
    return RanksEnded(rank, reasons, missing)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@contextlib.contextmanager
def ending_together(patience: float = PATIENCE) -> Iterator[None]:
    """Tell the other ranks of the default process group why this one ends, and hear from them; without it, nothing.

    Every rank enters such blocks as often as the others.

    Args:
        patience: seconds in which a rank whose collective failed waits for the others' words.

    Raises:
        RanksEnded: a collective failed; an error of this rank's own stays what it is.
    """
    block = next(BLOCKS)
    try:
        yield
    except Exception as error:
        if not (dist.is_available() and dist.is_initialized()) or isinstance(error, RanksEnded):
            raise
        if not of_collective(error):
            told(error, block)
            raise
        raise found(dist.get_rank(), dist.get_world_size(), block, patience) from error
