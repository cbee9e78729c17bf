"""Lesson 5: the nano GPT of `twin train` that learns the multiplication table, and a sum that depends on threads."""

import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import reference as te
from optimized import measure
from optimized.training.corpus import Corpus
from optimized.training.settings import SIZES
from optimized.training.trainer import Trainer

STEPS = 14
FOLDER = Path(tempfile.mkdtemp())  # of the runs' trails
TABLE = b"".join(b"%d * %d = %d\n" % (a, b, a * b) for a in range(100) for b in range(100))


def trainer() -> Trainer:
    """A new model at its first step, in FP8 with delayed scaling, and with dropout."""
    corpus = Corpus(np.frombuffer(TABLE, np.uint8), 1)
    return Trainer(replace(SIZES["nano"], precision="delayed", dropout=0.1), corpus)


def weights(one: Trainer) -> torch.Tensor:
    """A copy of all weights, as the integers of their bits."""
    parts = [x.flatten() for name, x in one.tensors().items() if name.startswith("model/")]
    return torch.cat(parts).view(torch.int32)


def clipped_by_torch_sum(threads: int) -> AbstractContextManager[object]:
    """Inside it, gradients are clipped by a norm that `torch.sum` makes with so many threads."""

    def clip(parameters: Iterable[torch.nn.Parameter], largest: float) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch.set_num_threads(threads)
        norm = torch.cat([g.flatten() for g in gradients]).square().sum().sqrt()
        torch.set_num_threads(1)
        for g in gradients:
            g.mul_(torch.clamp(largest / norm, max=1.0))
        return norm

    return mock.patch.object(te.optimizers, "clip_grad_norm_", clip)


def train(
    name: str, disturb: Callable[[Trainer, int], object] = lambda one, step: None
) -> tuple[list[str], list[torch.Tensor]]:
    """Hashes and weights after each step of a new run; `disturb` is called before it. FOLDER gets a trail, `name`."""
    one, hashes, bits = trainer(), [], []
    (FOLDER / name).unlink(missing_ok=True)
    with te.trail(FOLDER / name, one.model) as trail:
        for step in range(1, STEPS + 1):
            disturb(one, step)
            one.train()
            trail.step()
            hashes.append(one.digest())
            bits.append(weights(one))
    return hashes, bits


def recorded() -> list[str]:
    """The hashes of tests/golden: a test computes them on an H200."""
    steps = json.loads((measure.ROOT / "tests" / "golden" / "training.json").read_text("utf-8"))["delayed"]
    return [steps[str(step)][1] for step in range(1, STEPS + 1)]
