"""`twin::gemm_fp8_activation_scale` on the GPU: h is not read for the amax of its activation.

    kernels/gemms/gemm_fp8.cu                               h, and the largest h that each warp has stored (MAXIMA)
    kernels/activations/activation_amax.cu                  the amax: act(largest h) where that is `KNOWN_FROM` or more;
                                                            below it reads h after all
    `total` of kernels/casts/current_scale.cu               the scale
    kernels/activations/activation_cast_transpose.cu        the codes

For h of 16 bits |act(h)| does not fall as h grows from `KNOWN_FROM` on, and nothing below is larger: where h is
negative, |act| is below 0.28. NaN is passed over on both sides; gelu, silu and qgelu of -inf are NaN. An h of 8192 x
16384 that nowhere reaches 0.5 is none that a network has, so what is computed twice is computed rarely; and no launch
depends on it. Where there is no such order (gated kinds, fp32) or no product, the two ops run one after the other.

Semantics: `reference.ops.gemms.gemm_activation_scale`.
"""

import functools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.activations import activation as activations
from optimized.ops.casts.amax import WIDE
from optimized.ops.casts.current_scale import THREADS, amax_blocks, total
from optimized.ops.gemms import gemm_fp8
from optimized.ops.gemms.gemm_operands import check_devices
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES, Tile, multiprocessors, select_tile
from reference.ops.activations.activation import KINDS, is_gated
from reference.ops.casts.cast_transpose import Four
from reference.ops.casts.current_scale import Scale
from reference.ops.gemms.gemm_activation_scale import outputs
from reference.ops.library import on_cuda

KNOWN_FROM = {kind: 0.0 if kind in ("relu", "srelu") else 0.5 for kind in KINDS if not is_gated(kind)}
"""From which largest h of 16 bits on the amax of an activation is that of the largest h."""
# The largest tile has no register for the maximum beside a bias that is loaded ahead. In a cluster it has.
KEEPING_TILES = tuple(tile for tile in FP8_TILES if tile != TILES[0])


@functools.cache
def _amax_kernel(kind: str, x: torch.dtype) -> launch.Kernel:
    macros = {**activations.macros(kind), "WIDE": WIDE[x], "KNOWN_FROM": f"{KNOWN_FROM[kind]}f"}
    return launch.function("activation_amax", "activation_amax", macros)


_E4M3, _HALVES = torch.float8_e4m3fn, (torch.bfloat16, torch.float16)
CONFIGURATIONS = [
    gemm_fp8.config(_E4M3, _E4M3, half, "fast", tile, n, maxima=True).listed
    for tile in KEEPING_TILES
    for n in (16, 32)
    for half in _HALVES[: 1 if tile.cluster == 1 else 2]
]
CONFIGURATIONS += [_amax_kernel(kind, x).configuration for kind in KNOWN_FROM for x in _HALVES]


@on_cuda
def gemm_fp8_activation_scale(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    kind: str,
    dtype: torch.dtype,
    power_of_two: bool,
    epsilon: float,
    tile: Tile | None = None,
) -> Four:
    """a `[M, K]`, b `[n, K]` float8 -> (h `[M, n]` of out_dtype, q `[M, m]`, q_t `[m, ceil16(M)]`, scale_inv `[1]`)."""
    how: Scale = (dtype, power_of_two, epsilon)
    h, *out = outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, kind, *how)
    check_devices("gemm_fp8", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, bias=bias)
    if kind not in KNOWN_FROM or out_dtype == torch.float32 or not h.numel() or not a.shape[1]:
        gemm_fp8.run_gemm(h, a, b, a_scale_inv, b_scale_inv, bias, "fast")
        return h, *activations.activation_scale_cast_transpose(h, kind, *how)
    (m, k), n, index = a.shape, b.shape[0], a.device.index
    sms = multiprocessors(index)
    tile = tile or select_tile(m, n, k, False, sms, KEEPING_TILES)
    cut = tile.cut(m, n, sms)
    maxima = h.new_empty(tile.blocks(cut, sms) * 4 * tile.warpgroups, dtype=torch.float32)
    one = gemm_fp8.config(a.dtype, b.dtype, out_dtype, "fast", tile, 32 if n % 32 == 0 else 16, maxima=True)
    scales = (a_scale_inv.data_ptr(), b_scale_inv.data_ptr(), maxima.data_ptr())
    gemm_fp8.launch_tiles(one, a, b, scales, bias, h, cut)
    blocks = amax_blocks(h)
    partial, scale = maxima.new_empty(blocks), maxima.new_empty(1)
    args = (h.data_ptr(), maxima.data_ptr(), partial.data_ptr(), np.int64(h.numel()), np.int32(maxima.numel()))
    launch.launch(_amax_kernel(kind, out_dtype), (blocks,), (THREADS,), args, device=index)
    total(partial, scale, *how)
    q, q_t, scale_inv = out
    activations.run_cast((q, q_t, scale_inv), kind, None, h, None, scale, None, 0, dtype, rounds=True)
    return h, q, q_t, scale_inv
