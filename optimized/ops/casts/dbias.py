"""`twin::dbias` on the GPU: kernels/casts/dbias.cu. Semantics: `reference.ops.casts.dbias`."""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from reference.ops.casts.dbias import outputs
from reference.ops.library import on_cuda

BLOCK_ROWS = 64
_THREADS = 128
_CLUSTER = 8
_TOTAL_THREADS = 256
_TOTAL_COLS = 32
_SHARED = 227 * 1024  # bytes of shared memory that the blocks of a multiprocessor can have
_RESERVED = 17 * 1024  # what a block of `total` takes of them: 16 KB that it declares, 1 KB that the system adds
_kernels = {
    (x, vector): launch.function("dbias", "dbias", {"WIDE": WIDE[x], "VECTOR": vector})
    for x, vector in itertools.product(WIDE, (0, 1))
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]
_total = {x: launch.function("dbias", "total", {"WIDE": WIDE[x], "VECTOR": 1}, _SHARED - _RESERVED) for x in WIDE}


def new_partial(x: torch.Tensor) -> torch.Tensor:
    """Room for the sums over blocks of 64 rows of `x`: fp32 `[ceil(rows / 64), cols]`."""
    rows, cols = x.shape
    return torch.empty((-(-rows // BLOCK_ROWS), cols), dtype=torch.float32, device=x.device)


def add_blocks(partial: torch.Tensor, out: torch.Tensor) -> None:
    """Add the sums over blocks in order, round, and write them to `out` `[cols]`."""
    blocks, cols = partial.shape
    args = [partial.data_ptr(), out.data_ptr(), np.int32(blocks), np.int32(cols)]
    grid = (max(1, -(-cols // _TOTAL_COLS)),)
    index = partial.device.index
    # The kernel is launched early, and its blocks would pile up on the multiprocessors that are free first. So each
    # asks for so much shared memory that a multiprocessor has room for its share of them and no more.
    share = -(-grid[0] // launch.processors(index))
    unused = max(0, _SHARED // share - _RESERVED)
    launch.launch(_total[out.dtype], grid, (_TOTAL_THREADS,), args, unused, device=index, early=True)


@on_cuda
def dbias(grad: torch.Tensor) -> torch.Tensor:
    """`grad` `[rows, cols]` -> `[cols]`, both of the same dtype: fp32, bf16 or fp16."""
    out = outputs(grad)
    rows, cols = grad.shape
    vector = int(grad.data_ptr() % 16 == 0 and cols * grad.element_size() % 16 == 0)
    strip = 8 * (16 // grad.element_size() if vector else 1)
    if cols:
        args = [grad.data_ptr(), out.data_ptr(), np.int32(rows), np.int32(cols)]
        grid = (-(-cols // strip) * _CLUSTER,)
        launch.launch(_kernels[grad.dtype, vector], grid, (_THREADS,), args, device=grad.device.index)
    return out
