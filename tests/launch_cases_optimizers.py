"""What the ops of optimizers and of gradient clipping are called with for the snapshots of their launches."""

import itertools

from launch_notes import BF16, FP16, FP32, WIDE, Notes, empty, twin


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
