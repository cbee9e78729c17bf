"""`twin::cross_entropy`, its backward and its mean on the GPU: kernels/vocabulary/cross_entropy.cu.

Semantics: `reference.ops.vocabulary.cross_entropy`.
"""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, pointer
from reference.ops.library import on_cuda
from reference.ops.vocabulary.cross_entropy import backward_outputs, mean_outputs, outputs

_THREADS = 256  # of a block, which takes a row
_MEAN_THREADS = 1024


def _kernel(name: str, dtype: torch.dtype, vector: bool, smooth: bool) -> launch.Kernel:
    macros = {"WIDE": WIDE[dtype], "VECTOR": int(vector), "SMOOTH": int(smooth)}
    return launch.function("cross_entropy", name, macros)


_CASES = list(itertools.product(WIDE, (False, True), (False, True)))
_forward = {case: _kernel("cross_entropy", *case) for case in _CASES}
_backward = {case: _kernel("cross_entropy_backward", *case, False) for case in itertools.product(WIDE, (False, True))}
_mean = _kernel("cross_entropy_mean", torch.float32, True, False)
CONFIGURATIONS = [one.configuration for one in _forward.values()]


@on_cuda
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, m and 1 / S of each row, fp32 `[rows]`; NaN where a target is neither a class nor `ignore_index`."""
    loss, maximum, inverse = outputs(logits, target, ignore_index, label_smoothing)
    rows, cols = logits.shape
    if rows:
        vector = cols * logits.element_size() % 16 == 0 and logits.data_ptr() % 16 == 0
        smoothing = np.float32(label_smoothing)
        pointers = [x.data_ptr() for x in (logits, target, loss, maximum, inverse)]
        args = [*pointers, np.int32(cols), np.int64(ignore_index), smoothing]
        kernel = _forward[logits.dtype, vector, bool(smoothing > 0)]
        launch.launch(kernel, (rows,), (_THREADS,), args, device=logits.device.index)
    return loss, maximum, inverse


@on_cuda
def cross_entropy_backward(
    grad: torch.Tensor,
    divisor: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    maximum: torch.Tensor,
    inverse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """The gradient of `logits`; NaN in a row whose target is neither a class nor `ignore_index`."""
    dx = backward_outputs(grad, divisor, logits, target, maximum, inverse, ignore_index, label_smoothing)
    rows, cols = logits.shape
    if rows:
        pointers = [pointer(x) for x in (grad, divisor, logits, target, maximum, inverse, dx)]
        rest = (np.int32(cols), np.int32(grad.dim()), np.int64(ignore_index), np.float32(label_smoothing))
        kernel = _backward[logits.dtype, (logits.data_ptr() - dx.data_ptr()) % 16 == 0]
        launch.launch(kernel, (rows,), (_THREADS,), [*pointers, *rest], device=logits.device.index)
    return dx


@on_cuda
def cross_entropy_mean(
    loss: torch.Tensor, target: torch.Tensor, ignore_index: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `loss` over a divisor, and that divisor, fp32 `[]`."""
    mean, divisor = mean_outputs(loss, target, ignore_index, kind)
    pointers = [x.data_ptr() for x in (loss, target, mean, divisor)]
    rest = (np.int64(len(loss)), np.int64(ignore_index), np.int32(kind != "sum"), np.int32(kind == "mean_or_zero"))
    launch.launch(_mean, (1,), (_MEAN_THREADS,), [*pointers, *rest], device=loss.device.index)
    return mean, divisor
