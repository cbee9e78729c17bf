"""The loop of `twin train` around a trainer: what is written and shown, and when."""

import argparse
import contextlib
import math
import time
from typing import Any

import torch
from rich.progress import Progress

import reference as te
from optimized.bench import bits
from optimized.commands import ranks
from optimized.commands.errors import CommandError
from optimized.training.diagnosis import first_unfinite, unfinite
from optimized.training.metrics import Metrics
from optimized.training.rank_digests import RankDigests
from optimized.training.trainer import Trainer

CHECKPOINT, METRICS, PLOT, STEP = "checkpoint.safetensors", "metrics.jsonl", "loss.png", "step-{}.safetensors"


class Loop:
    """All ranks run it, so that all see the same losses, and stop at the same NaN; rank 0 writes."""

    def __init__(self, args: argparse.Namespace, trainer: Trainer, bar: Progress, me: ranks.Ranks) -> None:
        self.args, self.trainer, self.bar, self.me = args, trainer, bar, me
        self.metrics = Metrics(args.output / METRICS, trainer.step) if me.rank == 0 else None
        if self.metrics is not None and self.metrics.removed:
            bar.console.print(self.metrics.removed, markup=False, highlight=False, soft_wrap=True)
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
        self.task = bar.add_task("training", total=trainer.settings.steps, completed=trainer.step, numbers="")
        self.digests = RankDigests(trainer) if args.compare_every else None
        self.since = time.perf_counter()
        self.saved: int | None = trainer.step if (args.output / CHECKPOINT).exists() else None

    def step(self) -> None:
        """One step, and what is due after it."""
        args, trainer = self.args, self.trainer
        number = trainer.step + 1
        record: Any = contextlib.nullcontext()
        if number == args.record:
            path = args.output / STEP.format(number)
            record = te.record(trainer.model, path, trainer.optimizer)
        with record:
            losses = trainer.train(capture=number != args.record)
        self.pending.append((number, losses, trainer.norm))
        last = number == trainer.settings.steps
        if self.digests is not None:
            self.digests.add()
            # A checkpoint is written of steps that were compared.
            if last or number % args.compare_every == 0 or number % args.save == 0:
                parted = self.digests.compared(self.me.gather)
                if parted is not None:
                    raise ranks.Everywhere(f"--compare-every: {parted}: the run stops. {self.kept()}")
        due = {name: last or number % getattr(args, name) == 0 for name in ("log", "evaluate", "save")}
        verify = args.verify is not None and (last or number % args.verify == 0)
        if verify or any(due.values()):
            self._flush()
            if due["evaluate"] and (self.metrics is not None or ranks.divided(args)):
                self._add(number, held_out=trainer.evaluate())
            if verify:
                found = self._digest(number)
                self._add(number, sha256=found)
                self.bar.console.print(f"step {number} sha256 {found}", markup=False, highlight=False, soft_wrap=True)
            if due["save"]:
                broken = next(filter(None, self.me.gather(unfinite(trainer))), None)
                if broken is not None:
                    raise self._broken(number, f"{broken} has a NaN or an infinity after step {number}")
                if self.me.rank == 0 or ranks.divided(args):
                    trainer.save(args.output / CHECKPOINT if self.me.rank == 0 else None)
                self.me.wait()
                self.saved = number
            self.since = time.perf_counter()
        self.bar.update(self.task, completed=number)

    def _add(self, number: int, **numbers: Any) -> None:
        if self.metrics is not None:
            self.metrics.add(number, **numbers)

    def _digest(self, number: int) -> str:
        """The hash of all state, of which each rank has its own copy."""
        found = self.me.gather(self.trainer.digest())
        for rank, one in enumerate(found):
            if one != found[0]:
                raise ranks.Everywhere(
                    f"the state of rank {rank} after step {number} has the SHA-256 {one}, and that of rank 0 has "
                    f"{found[0]}: the run stops. {self.kept()}"
                )
        return found[0]

    def _flush(self) -> None:
        """Write the metrics of the steps since the last time; reading their losses waits for a GPU."""
        settings = self.trainer.settings
        losses = [sum(one.tolist()) / len(one) for _, one, _ in self.pending]
        seconds = (time.perf_counter() - self.since) / len(self.pending)
        speed = {"tokens_per_second": settings.tokens / seconds, "tflops": settings.flops / seconds / 1e12}
        for (number, _, norm), loss in zip(self.pending, losses, strict=True):
            more = speed if number == self.pending[-1][0] else {}
            given = None if norm is None else float(norm)
            self._add(number, loss=loss, rate=settings.rate(number - 1), norm=given, **more)
            for what, value in (("loss", loss), ("norm of the gradient", given)):
                if value is not None and not math.isfinite(value):
                    raise self._broken(number, f"the {what} of step {number} is {value}")
        self.pending.clear()
        fast = f"{speed['tokens_per_second']:,.0f} tokens/s  {speed['tflops']:.3g} TFLOP/s"
        shown = f"{bits(losses[-1]):.3f} bits/byte  {fast}"
        self.bar.update(self.task, numbers=shown)

    def _broken(self, number: int, what: str) -> CommandError:
        """The error for a NaN or an infinity in step `number`: where it was made, and what is kept."""
        if self.me.count > 1:  # whose NaN is made on one of them only
            made = "One process, with --resume alone, makes the same steps and names the op."
            return ranks.Everywhere(f"{what}: the run stops. {made} {self.kept()}")
        self.bar.update(self.task, description="looking for its first op")
        made = first_unfinite(self.trainer, number, None if self.saved is None else self.args.output / CHECKPOINT)
        return CommandError(f"{what}: the run stops. {made} {self.kept()}")

    def kept(self) -> str:
        """What is on disk."""
        path = self.args.output / CHECKPOINT
        return "No checkpoint was written." if self.saved is None else f"{path} is that of step {self.saved}."
