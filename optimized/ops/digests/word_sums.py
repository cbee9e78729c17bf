"""`twin::word_sums` on the GPU: kernels/digests/word_sums.cu, 1,024 tensors a launch.
Semantics: `reference.ops.digests.word_sums`."""

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.multi_tensor import THREADS, entries
from reference.ops.digests.word_sums import BLOCK, outputs
from reference.ops.library import on_cuda

# Tensors of one launch, a model's and its gradients: 24 bytes for each in the kernel's argument, of 32764.
CAPACITIES = (64, 256, 1024)
BYTES = 8 * 4 * BLOCK  # of a block of threads
_ROW = entries(("x",))  # count is of bytes
_kernels = {c: launch.function("word_sums", "word_sums", {"WIDE": 0, "CAPACITY": c}) for c in CAPACITIES}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def word_sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Digests of dense tensors: int64 `[tensors, 3]`."""
    found = outputs(tensors).zero_()
    read = [x if x.is_contiguous() else x.contiguous() for x in tensors]  # kept until the launch
    for start in range(0, len(read), CAPACITIES[-1]):
        part = read[start : start + CAPACITIES[-1]]
        count, capacity = len(part), next(c for c in CAPACITIES if len(part) <= c)
        table = np.zeros(capacity, _ROW)
        table["x"][:count] = [x.data_ptr() for x in part]
        table["count"][:count] = [x.nbytes for x in part]
        table["aligned"] = table["x"] % 16 == 0
        ends = np.cumsum(-(-table["count"] // BYTES))
        table["first_block"][1:count] = ends[: count - 1]  # an empty tensor's is the next one's, which the search finds
        blocks = int(ends[-1])
        if blocks:
            args = [launch.by_value(table), np.int32(count), found[start:].data_ptr()]
            launch.launch(_kernels[capacity], (blocks,), (THREADS,), args, device=found.device.index)
    return found
