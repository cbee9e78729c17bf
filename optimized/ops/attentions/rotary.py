"""`twin::rotary` on the GPU: kernels/attentions/rotary.cu. Semantics: `reference.ops.attentions.rotary`."""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from reference.ops.attentions.rotary import outputs
from reference.ops.library import on_cuda

_THREADS = 256
MAX_DIMENSIONS = 4096  # of freqs: the kernel keeps their table in shared memory

STRIDES = np.dtype([("s", "i8"), ("b", "i8"), ("h", "i8")])  # struct Strides of the kernel


@functools.cache
def _kernel(x: torch.dtype, vector: bool, interleaved: bool) -> launch.Kernel:
    macros = {"WIDE": WIDE[x], "VECTOR": int(vector), "INTERLEAVED": int(interleaved)}
    return launch.function("rotary", "rotary", macros)


CONFIGURATIONS = [_kernel(*case).configuration for case in itertools.product(WIDE, (False, True), (False, True))]


def _strides(x: torch.Tensor) -> object:
    return launch.by_value(np.array(x.stride()[:3], np.int64))


def _vector(x: torch.Tensor, out: torch.Tensor, d2: int, interleaved: bool) -> bool:
    """Whether every run of 16 bytes is whole and aligned."""
    lanes = 16 // x.element_size()
    pieces = (x.shape[3], d2 if interleaved else d2 // 2)
    steps = (stride for t in (x, out) for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True) if size > 1)
    aligned = x.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    return aligned and all(value % lanes == 0 for value in (*pieces, *steps))


@on_cuda
def rotary(x: torch.Tensor, freqs: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    """`x` `[s, b, h, d]`, freqs fp32 `[positions, d2]` -> like x."""
    out = outputs(x, freqs, interleaved, backward)
    d2 = freqs.shape[1]
    if d2 > MAX_DIMENSIONS:
        raise ValueError(f"twin::rotary: freqs must have at most {MAX_DIMENSIONS} dimensions on a GPU; got {d2}.")
    if not x.numel():
        return out
    s, b, h, d = x.shape
    args = [x.data_ptr(), out.data_ptr(), freqs.data_ptr(), _strides(x), _strides(out)]
    args += [np.int32(value) for value in (h, b * h, d, d2, backward)]
    kernel = _kernel(x.dtype, _vector(x, out, d2, interleaved), interleaved)
    launch.launch(kernel, (s,), (_THREADS,), args, 8 * d2, device=x.device.index)
    return out
