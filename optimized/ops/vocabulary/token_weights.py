"""`twin::token_weights` on the GPU: kernels/vocabulary/token_weights.cu.

Semantics: `reference.ops.vocabulary.token_weights`.
"""

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from reference.ops.library import on_cuda
from reference.ops.vocabulary.token_weights import outputs

_THREADS = 1024  # of a block, which takes a row
_kernels = {dtype: launch.function("token_weights", "token_weights", {"WIDE": wide}) for dtype, wide in WIDE.items()}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def token_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """w, int32 `[rows, V]`."""
    weights = outputs(logits, temperature)
    rows, cols = logits.shape
    if rows:
        args = [logits.data_ptr(), temperature.data_ptr(), weights.data_ptr(), np.int32(cols)]
        launch.launch(_kernels[logits.dtype], (rows,), (_THREADS,), args, device=logits.device.index)
    return weights
