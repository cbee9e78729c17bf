"""`twin::rotary_append` on the GPU: kernels/attentions/rotary_append.cu. Semantics:
`reference.ops.attentions.rotary_append`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.attentions.rotary import MAX_DIMENSIONS
from optimized.ops.casts.amax import WIDE
from reference.ops.attentions.rotary_append import OP, outputs
from reference.ops.library import on_cuda

_THREADS = 128
_POINTERS = ("q", "k", "v", "out", "keys", "values", "freqs", "positions", "rows")
_STRIDES = ("q_t", "q_g", "q_p", "k_t", "k_g", "v_t", "v_g", "out_t", "out_p", "out_g")
_SIZES = ("groups", "together", "d", "e", "d2", "angles")
ARGUMENTS = np.dtype(  # struct Arguments of the kernel
    [
        *((name, "u8") for name in _POINTERS),
        *((name, "i8") for name in (*_STRIDES, "cache_rows")),
        *((name, "i4") for name in _SIZES),
    ]
)


@functools.cache
def _kernel(x: torch.dtype, interleaved: bool) -> launch.Kernel:
    return launch.function("rotary_append", "rotary_append", {"WIDE": WIDE[x], "INTERLEAVED": int(interleaved)})


CONFIGURATIONS = [_kernel(*case).configuration for case in itertools.product(WIDE, (False, True))]


@on_cuda
def rotary_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    freqs: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """q `[t, g, p, d]`, k `[t, g, d]`, v `[t, g, e]` -> q rotated `[t, p, g, d]`; keys and values have k and v."""
    out = outputs(q, k, v, freqs, positions, rows, keys, values, interleaved)
    (t, groups, together, d), d2 = q.shape, freqs.shape[1]
    if d2 > MAX_DIMENSIONS:
        raise ValueError(f"{OP}: freqs must have at most {MAX_DIMENSIONS} dimensions on a GPU; got {d2}.")
    if not t * groups:
        return out
    a = np.zeros((), ARGUMENTS)
    pointers = (q, k, v, out, keys, values, freqs, positions, rows)
    for name, x in zip(_POINTERS, pointers, strict=True):
        a[name] = x.data_ptr()
    strides = (*q.stride()[:3], *k.stride()[:2], *v.stride()[:2], *out.stride()[:3])
    sizes = (groups, together, d, v.shape[2], d2, freqs.shape[0])
    for name, n in zip((*_STRIDES, *_SIZES), (*strides, *sizes), strict=True):
        a[name] = n
    a["cache_rows"] = keys.shape[0] * keys.shape[1]
    kernel = _kernel(q.dtype, interleaved)
    launch.launch(kernel, (t, groups), (_THREADS,), (launch.by_value(a),), 8 * d2, device=q.device.index)
    return out
