"""`twin::likeliest` on the GPU: kernels/vocabulary/likeliest.cu.

Semantics: `reference.ops.vocabulary.likeliest`.
"""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from reference.ops.library import on_cuda
from reference.ops.vocabulary.likeliest import outputs

_LANES = 256  # of a row
_BLOCKS, _THREADS = 8, 512  # that share a row, and the threads of each


def _kernel(name: str, dtype: torch.dtype, vector: bool) -> launch.Kernel:
    return launch.function("likeliest", name, {"WIDE": WIDE[dtype], "VECTOR": int(vector)})


_CASES = list(itertools.product(WIDE, (False, True)))
_lanes = {case: _kernel("likeliest_lanes", *case) for case in _CASES}
_join = {case: _kernel("likeliest", *case) for case in _CASES}
CONFIGURATIONS = [one.configuration for one in _lanes.values()]


@on_cuda
def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """t, int64 `[rows]`, and loss, fp32 `[rows]`."""
    tokens, losses = outputs(logits)
    rows, cols = logits.shape
    if rows:
        case = (logits.dtype, cols * logits.element_size() % 16 == 0 and logits.data_ptr() % 16 == 0)
        tops, sums = (logits.new_empty(rows, _LANES, dtype=torch.float32) for _ in range(2))
        places = logits.new_empty(rows, _LANES, dtype=torch.int32)
        parts = [x.data_ptr() for x in (logits, tops, places, sums)]
        device = logits.device.index
        launch.launch(_lanes[case], (_BLOCKS * rows,), (_THREADS,), [*parts, np.int32(cols)], device=device)
        found = [tokens.data_ptr(), losses.data_ptr(), np.int32(cols)]
        launch.launch(_join[case], (rows,), (_LANES,), [*parts, *found], device=device)
    return tokens, losses
