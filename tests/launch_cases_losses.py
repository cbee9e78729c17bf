"""What the losses and the embedding are called with for the snapshots of their launches (`launch_cases`)."""

import itertools

import torch
from launch_notes import BF16, FP32, WIDE, Notes, empty, twin

import optimized


def _ids(count: int) -> torch.Tensor:
    return empty(count, dtype=torch.int64)


def losses(note: Notes) -> None:
    """Rows that are aligned or not; logits off a multiple of 16 bytes; both forms of the gradient."""

    def both(rows: int, cols: int, dtype: torch.dtype = BF16, smoothing: float = 0.0, start: int = 0) -> None:
        x, target = empty(rows, cols, dtype=dtype, start=start), _ids(rows)
        loss, *stats = note(twin.cross_entropy, x, target, -100, smoothing)
        _, divisor = note(twin.cross_entropy_mean, loss, target, -100, "mean")
        grad = empty(rows, dtype=FP32) if smoothing else empty(1, dtype=FP32).view(())
        scale = None if smoothing else divisor
        note(twin.cross_entropy_backward, grad, scale, x, target, *stats, -100, smoothing)

    for dtype, cols in itertools.product(WIDE, (50304, 50257)):
        both(33, cols, dtype, 0.25 if cols % 8 else 0.0)
    for cols, smoothing in ((50304, 0.25), (50257, 0.0)):
        both(33, cols, smoothing=smoothing)
    for rows, cols, start in ((7, 64, 1), (7, 64, 8), (0, 64, 0), (1, 1, 0)):
        both(rows, cols, start=start)
    for kind in ("sum", "mean_or_zero"):
        note(twin.cross_entropy_mean, empty(5, dtype=FP32), _ids(5), 7, kind)
    note(twin.cross_entropy_mean, empty(0, dtype=FP32), _ids(0), 7, "mean")
    hidden, weight = (empty(rows, 64).requires_grad_() for rows in (300, 96))
    note.gpu.lines.clear()
    loss = optimized.fused_linear_cross_entropy(hidden, weight, _ids(300), chunk_size=128)
    loss.backward(empty(1, dtype=FP32).view(()))
    note.cases.append("\n  ".join(["fused_linear_cross_entropy, three chunks", *note.gpu.taken()]))


def embeddings(note: Notes) -> None:
    def both(rows: int, width: int, count: int, dtype: torch.dtype = BF16, padding: int = -1, start: int = 0) -> None:
        weight, ids = empty(rows, width, dtype=dtype, start=start), _ids(count)
        note(twin.embedding, weight, ids)
        note(twin.embedding_backward, empty(count, width, dtype=dtype, start=start), ids, rows, padding)

    for dtype, width in itertools.product(WIDE, (1024, 1100)):
        both(500, width, 130, dtype)
    for count in (0, 63, 64):
        both(9, 64, count, padding=3)
    for sizes in ((0, 64, 0), (9, 0, 5), (128256, 4096, 8192)):
        both(*sizes)
    for start in (1, 8):
        both(9, 64, 100, start=start)
