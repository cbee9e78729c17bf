"""`twin::rotary` on the GPU: kernels/rotary.cu. Semantics: `reference.ops.rotary`."""

import numpy as np
import torch

from optimized import launch
from optimized.ops.amax import WIDE
from reference.ops.library import LIBRARY
from reference.ops.rotary import check_rotary

CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [("rotary", {"WIDE": wide}) for wide in WIDE.values()]

_RUN = 16  # heads for which a thread uses its sines and cosines
_kernels = {dtype: launch.function("rotary", "rotary", {"WIDE": wide}) for dtype, wide in WIDE.items()}


def _strides(x: torch.Tensor) -> object:
    return launch.by_value(np.array(x.stride()[:3], np.int64))


def rotary(x: torch.Tensor, freqs: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    """`x` `[s, b, h, d]`, freqs fp32 `[positions, d2]` -> like x."""
    check_rotary("twin::rotary", x, freqs)
    out = torch.empty_like(x)
    if not x.numel():
        return out
    s, b, h, d = x.shape
    d2 = freqs.shape[1]
    args = [x.data_ptr(), out.data_ptr(), freqs.data_ptr(), _strides(x), _strides(out)]
    args += [np.int32(value) for value in (h, b * h, d, d2, interleaved, backward, _RUN)]
    threads = min(128, -(-(d2 // 2 + d - d2) // 32) * 32)
    launch.launch(_kernels[x.dtype], (s, -(-b * h // _RUN)), (threads,), args, device=x.device.index)
    return out


LIBRARY.impl("rotary", rotary, "CUDA")
