"""Where the first NaN or infinity of a run was made: its steps once more, to the same bits.

A run is the same each time. So a step that went wrong can be made again, from the last good checkpoint, and this time
`te.detect_anomaly` looks at every op of it. A step that does not go wrong again was spoiled by the device.
"""

from pathlib import Path

import torch

import reference as te
from optimized.training.trainer import Trainer
from reference.support.dtensor import shard


def unfinite(trainer: Trainer) -> str | None:
    """The first parameter or moment with a NaN or an infinity; None if there is none. Waits for the device once."""
    named = {name: x for name, x in trainer.tensors().items() if name.startswith(("model/", "optimizer/"))}
    good = torch.stack([shard(x).isfinite().all() for x in named.values()]).tolist()
    return next((name for name, finite in zip(named, good, strict=True) if not finite), None)


def first_unfinite(trainer: Trainer, step: int, start: Path | None) -> str:
    """In words, the op that made the first NaN or infinity, which the loss, gradient or state of `step` had.

    What broke the weights in one step is seen in the loss of the next, so both are looked at.

    Args:
        trainer: is used up: it goes back to `start`.
        start: the last good checkpoint; None is the run's start.
    """
    if start is None:
        trainer = Trainer(trainer.settings, trainer.text, trainer.model.device)
    else:
        trainer.load(start)
    begin, finite = trainer.step, True
    for number in range(begin + 1, step + 1):
        try:
            if number < step - 1:
                trainer.train()
                continue
            with te.detect_anomaly(trainer.model):
                losses = trainer.train(capture=False)
        except FloatingPointError as error:
            found = str(error).removeprefix("detect_anomaly: ").removesuffix(".")
            return f"Made again from step {begin}: {found}, in step {number}."
        finite = bool(losses.isfinite().all()) and (trainer.norm is None or bool(trainer.norm.isfinite()))
    if finite and unfinite(trainer) is None:
        return f"Made again from step {begin}, it is finite: the device spoiled it, and --resume goes on."
    return f"Made again from step {begin}, it is there again, and no op that can be seen made it."
