"""Runs of a hundred steps that have one hash in any layout: their models, and what one process on a CPU found.

    PYTHONPATH=.:tests python tests/shared/hundred_steps.py

records tests/golden/hundred_steps.json anew, in some minutes: by model and precision the SHA-256 of all state after the
last step, and the losses of that.
"""

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.training_text import corpus

from optimized.training.settings import SIZES, Settings
from optimized.training.trainer import Trainer
from reference.support import files

RECORDED = Path(__file__).parents[1] / "golden" / "hundred_steps.json"
PRECISIONS = ("delayed", "current", "block")
NANO = replace(SIZES["nano"], sequence=32, rows=1, dropout=0.1, accumulate=8, steps=100)
# The same for layouts that share a microbatch: as wide, or as long, as these need.
SHARED_WEIGHTS = replace(NANO, hidden=512, heads=4, layers=1, sequence=16, accumulate=2)
SHARED_TOKENS = replace(NANO, sequence=512, hidden=32, layers=1, accumulate=2)
MODELS = {"data": NANO, "weights": SHARED_WEIGHTS, "tokens": SHARED_TOKENS}
"""By what ranks share."""


def steps_of(trainer: Trainer, steps: int) -> str:
    """The hash of all state after so many steps, and the losses of the last one."""
    for _ in range(steps):
        losses = trainer.train()
    return f"{trainer.digest()} {losses.tolist()}"


def hashes(
    size: Settings,
    steps: int,
    precisions: tuple[str, ...] = PRECISIONS,
    kind: Callable[..., Trainer] = Trainer,
    **where: Any,
) -> list[str]:
    """`steps_of` this process, by precision; each microbatch is a group. `where`: the device, and the layout."""
    found = []
    for precision in precisions:
        one = replace(size, precision=precision, groups=size.accumulate)
        found.append(steps_of(kind(one, corpus(), **where), steps))
        gc.collect()  # layers that live on on one rank would have their scales reduced there alone
    return found


def recorded(model: str) -> list[str]:
    """`hashes` of one process on a CPU."""
    found = json.loads(RECORDED.read_text())[model]
    return [found[precision] for precision in PRECISIONS]


if __name__ == "__main__":
    found = {}
    for name, size in MODELS.items():
        found[name] = dict(zip(PRECISIONS, hashes(size, size.steps), strict=True))
        print(name, found[name], flush=True)
    files.write(RECORDED, json.dumps(found, indent=1) + "\n")
