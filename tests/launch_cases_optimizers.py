"""What the ops of optimizers and of gradient clipping are called with for the snapshots of their launches."""

import itertools
from typing import Any

import torch
from launch_notes import BF16, FP16, FP32, WIDE, Notes, empty, twin

U8 = torch.uint8


def adam_states(note: Notes) -> None:
    def step(
        kinds: tuple[torch.dtype, ...], *sizes: int, copies: bool = True, start: int = -1, decoupled: bool = True
    ) -> None:
        """`kinds`: of grads, params, both moments and copies; `start`: which list's last tensor is off 16 bytes."""
        lists = [
            [empty(size, dtype=one, start=int(i == start and n == len(sizes) - 1)) for n, size in enumerate(sizes)]
            for i, one in enumerate(kinds)
        ]
        scales: list[list[torch.Tensor]] = [
            [empty(1, dtype=FP32) for _ in sizes] if one in (FP16, U8) and (copies or i) else []
            for i, one in enumerate(kinds[1:4])
        ]
        rest = (1e-2, 0.9, 0.999, 1e-8, 0.1, 0.19, 0.002, decoupled)
        note(twin.adam_states, *lists[:4], lists[4] if copies else [], *scales, *rest)

    moments = (FP32, BF16, FP16, U8)
    for wide in WIDE:
        step((wide, wide, BF16, BF16, wide), 2100, copies=False)
        step((wide, FP16, BF16, BF16, wide), 2100)
        step((wide, torch.int16, BF16, BF16, BF16), 2100)
    for pair in (*zip(moments, moments, strict=True), (FP32, U8), (FP16, FP32)):
        step((BF16, FP32, *pair, BF16), 5, 0, 2049, decoupled=False)
    for start in range(5):
        step((BF16, FP32, BF16, BF16, BF16), 8, 8, start=start)
    for count in (33, 257):
        step((BF16, FP32, BF16, U8, BF16), *[25] * count)


def adam_capturables(note: Notes) -> None:
    step, lr = empty(1, dtype=torch.int32), empty(1, dtype=FP32)
    for scale, found, correct in ((None, None, True), (lr, None, False), (None, lr, True), (lr, lr, True)):
        note(twin.adam_control, step, lr, scale, found, 0.9, 0.999, correct)
    control = empty(5, dtype=FP32)
    for wide, master, moment, unscale in itertools.product(WIDE, (False, True), (FP32, BF16), (False, True)):
        if not (master and wide == FP32):
            kinds = (wide, FP32 if master else wide, moment, moment, *([wide] if master else []))
            lists = [[empty(2100, dtype=one)] for one in kinds]
            rest = (control, 0.9, 0.999, 1e-8, 0.1, not unscale, unscale)
            note(twin.adam_capturable, *lists, *([] if master else [[]]), *rest)


def adafactors(note: Notes) -> None:
    def step(*shape: int, wide: torch.dtype = BF16, dtype: torch.dtype = BF16, maximize: bool = False) -> None:
        matrix = len(shape) > 1
        row = empty(*((*shape[:-1], 1) if matrix else shape), dtype=FP32)
        col = empty(*shape[:-2], 1, shape[-1], dtype=FP32) if matrix else None
        rest = (0.01, 0.5, 0.99, 1e-7, 1e-14, 1e-3, 1.0, maximize)
        note(twin.adafactor, empty(*shape, dtype=wide), empty(*shape, dtype=dtype), row, col, *rest)

    for wide, dtype in ((FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32)):
        step(70, 300, wide=wide, dtype=dtype)
    step(2, 3, 65, 32769, maximize=True)
    step(40000)
    step(0, 7)


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
