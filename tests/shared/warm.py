"""Imported by the server of `shared.processes`, which so loads what numba has compiled, once and not in each fork.

Steps of a small GPT call most of it. On one thread, since who has several must not fork; and not beside a GPU, where
autograd starts threads.
"""

import gc
from dataclasses import replace
from pathlib import Path

import torch
from shared.training_text import corpus

from optimized.training.settings import Settings
from optimized.training.trainer import Trainer

SIZES = Settings(sequence=16, hidden=32, layers=1, rows=1, steps=1, warmup=1, dropout=0.1, clip=1.0, weight_decay=0.1)


def _warm() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=()):
        for precision in ("delayed", "current", "block"):
            Trainer(replace(SIZES, precision=precision), corpus()).train()
    gc.collect()
    torch.set_num_threads(threads)


if not Path("/dev/nvidiactl").exists():
    _warm()
