"""`twin::embedding` and `twin::embedding_backward` on the GPU: kernels/vocabulary/embedding.cu, after torch's stable
sort.

Semantics: `reference.ops.vocabulary.embedding`. Nothing waits for the GPU, and all of it may be captured into a CUDA
graph.
"""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from reference.ops.library import on_cuda
from reference.ops.vocabulary.embedding import CHUNK, backward_outputs, outputs

_WARPS = 8  # of a block, each with a row
_SPAN = 1024  # columns of a warp; in `embedding_chunks` of a block
_CHUNK_THREADS = 128


def _kernel(name: str, dtype: torch.dtype, vector: bool) -> launch.Kernel:
    return launch.function("embedding", name, {"WIDE": WIDE[dtype], "VECTOR": int(vector)})


_NAMES = ("embedding", "embedding_chunks", "embedding_backward")
_kernels = {(name, *case): _kernel(name, *case) for name in _NAMES for case in itertools.product(WIDE, (False, True))}
CONFIGURATIONS = [one.configuration for (name, *_), one in _kernels.items() if name == "embedding"]


def _vector(*tensors: torch.Tensor) -> bool:
    return tensors[0].shape[1] % 8 == 0 and all(x.data_ptr() % 16 == 0 for x in tensors)


@on_cuda
def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows `ids` of `weight`; NaN where there is no such row."""
    out = outputs(weight, ids)
    (rows, width), count = weight.shape, len(ids)
    if out.numel():
        kernel = _kernels["embedding", weight.dtype, _vector(weight, out)]
        args = [weight.data_ptr(), ids.data_ptr(), out.data_ptr(), np.int64(count), np.int64(rows), np.int32(width)]
        grid = (-(-count // _WARPS), -(-width // _SPAN))
        launch.launch(kernel, grid, (32 * _WARPS,), args, device=weight.device.index)
    return out


@on_cuda
def embedding_backward(grad: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int) -> torch.Tensor:
    """The gradient `[rows, width]` of the table; a number that is no row is left out."""
    out = backward_outputs(grad, ids, rows, padding_idx)
    if not out.numel():
        return out
    device, (count, width) = grad.device, grad.shape
    if not count:
        return out.zero_()
    # 32 bits are sorted in half the time of 64. What is no row stays none.
    found, order = torch.sort(ids.clamp(-1, rows).to(torch.int32), stable=True)
    starts = torch.searchsorted(found, torch.arange(rows + 1, dtype=torch.int32, device=device), out_int32=True)
    # Sums of whole chunks, where a row has any.
    sums = grad.new_empty((count // CHUNK, width), dtype=torch.float32)
    vector, across = _vector(grad, out), -(-width // _SPAN)
    pointers = [x.data_ptr() for x in (grad, order)]
    if count >= CHUNK:
        args = [*pointers, found.data_ptr(), starts.data_ptr(), sums.data_ptr(), np.int32(rows), np.int32(width)]
        kernel = _kernels["embedding_chunks", grad.dtype, vector]
        launch.launch(kernel, (count // CHUNK, across), (_CHUNK_THREADS,), args, device=device.index)
    args = [*pointers, starts.data_ptr(), sums.data_ptr(), out.data_ptr(), np.int32(rows), np.int32(width)]
    kernel, grid = _kernels["embedding_backward", grad.dtype, vector], (-(-rows // _WARPS), across)
    launch.launch(kernel, grid, (32 * _WARPS,), [*args, np.int32(padding_idx)], device=device.index)
    return out
