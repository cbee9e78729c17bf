"""What the ops of optimizers and of gradient clipping are called with for the snapshots of their launches."""

import itertools
from typing import Any

import torch
from launch_notes import BF16, FP16, FP32, WIDE, Notes, empty, twin


def sgds(note: Notes) -> None:
    def step(*shapes: tuple[int, ...], dtype: torch.dtype, master: bool = False, start: int = -1, **more: Any) -> None:
        """`start`: which of the three lists' last tensor begins off a multiple of 16 bytes."""
        kind = FP32 if master else dtype
        lists = [
            [empty(*shape, dtype=one, start=int(i == start and n == len(shapes) - 1)) for n, shape in enumerate(shapes)]
            for i, one in enumerate((dtype, kind, kind))
        ]
        momentum = more.get("momentum", 0.9)
        flags = (more.get("nesterov", False), more.get("first", False), more.get("last", False))
        note(twin.sgd, *lists[:2], lists[2] if momentum else [], 1e-2, momentum, 0.25, 0.1, *flags)

    for dtype, master in itertools.product(WIDE, (False, True)):
        if not (master and dtype == FP32):
            step((3, 7), (41, 100), dtype=dtype, master=master)
    step((3, 7), (0, 4), (16,), dtype=BF16, momentum=0.0)
    step((5,), dtype=FP32, first=True)
    step((5,), dtype=FP32, nesterov=True, last=True)
    for start in range(3):
        step((8,), (8,), dtype=BF16, start=start)
    for count in (32, 33, 513):
        step(*[(5, 5)] * count, dtype=BF16)


def clippings(note: Notes) -> None:
    for dtype, kind in itertools.product(WIDE, ("l2", "max")):
        note(twin.grad_norm, [empty(3, 7, dtype=dtype), empty(41, 1000, dtype=dtype)], kind)
    mixed = [empty(5), empty(32769, dtype=FP32), empty(0, 4), empty(32768), empty(9, dtype=FP16), empty(3, start=1)]
    for kind in ("l2", "max"):
        note(twin.grad_norm, mixed, kind)
        note(twin.grad_norm, [empty(0, 3)], kind)
        for count in (64, 65, 512, 513):
            note(twin.grad_norm, [empty(5, 5)] * count, kind)
    norm = empty(1, dtype=FP32).view(())
    for dtype in WIDE:
        note(twin.clip_grads, [empty(3, 7, dtype=dtype), empty(41, 100, dtype=dtype)], norm, 0.5)
    note(twin.clip_grads, mixed, norm, 1.0)
    for count in (64, 65, 513):
        note(twin.clip_grads, [empty(5, 5) for _ in range(count)], norm, 1.0)
    note(twin.clip_grads, [empty(0, 5, dtype=BF16)], norm, 1.0)
