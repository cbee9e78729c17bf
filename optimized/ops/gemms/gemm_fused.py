"""FP8 GEMMs with the next operation fused in, on the GPU: kernels/gemms/gemm_fp8_fused.cu. Every tile gives the same
bits.

Each op has the bits of the two ops that it is named after (`reference.ops.gemms.gemm_fused`). So two kernels run where
the fused one has no form (fp32 activations, an empty matrix) and, unless the caller names a tile, where it takes longer
(docs/log/gemm.md).
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from optimized.cuda import launch
from optimized.cuda.tensor_map import tensor_map_2d
from optimized.ops.activations import activation as activations
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.casts.cast import FP8, scaling_pointers
from optimized.ops.gemms import gemm_fp8
from optimized.ops.gemms.gemm_config import GemmConfig, fp8_config
from optimized.ops.gemms.gemm_operands import bias_arguments, check_devices, loadable, operand_maps, run
from optimized.ops.gemms.gemm_tile import K_BLOCK_BYTES, TILES, Tile, multiprocessors, select_tile, stage_bytes
from optimized.ops.random import dropout
from reference.ops.activations.activation import RECORDED, is_gated
from reference.ops.casts.cast_transpose import Four
from reference.ops.gemms.gemm_fused import activation_backward_outputs, activation_outputs, bias_dropout_add_outputs
from reference.ops.library import on_cuda
from reference.ops.random.dropout import keep_scale, threshold
from reference.support import unwritten

ACTIVATION, DROPOUT = "BiasActivation", "BiasDropoutAdd"  # the macro EPILOGUE: structs of the kernel
# The structs Arguments of the epilogues. They are filled as 64-bit words, so what is shorter has a word of its own.
ARGUMENTS = {
    ACTIVATION: np.dtype(
        [(name, "u8") for name in ("h", "bias", "scale_slot", "amax_slot", "q", "q_t", "scale_inv")]
        + [("unused", "i8"), ("bias_type", "i8")]
    ),
    DROPOUT: np.dtype(
        [("residual_map", "u8", 16)]
        + [(name, "u8") for name in ("out", "bias", "residual", "rng_state")]
        + [("threshold", "i8"), ("keep_scale", "f4"), ("unused", "i4", 5)]  # ends at a multiple of the map's 64 bytes
    ),
}
SHARED_BYTES = 232448  # that a block can have
# Of DROPOUT where nothing is dropped and nobody writes b, as in a decoder's step: more multiprocessors get a tile.
FEW_COLUMNS = Tile(1, 32, 18)


def epilogue_bytes(epilogue: str, tile: Tile) -> int:
    """Shared memory of an epilogue's struct Shared: for each part its values and two barriers."""
    if epilogue == ACTIVATION:
        return 4 * tile.block_n + 16  # the bias in fp32
    bias, mask = 2 * tile.block_n + 16, tile.block_m * max(64, tile.block_n) // 8 + 16
    return bias + mask + 127 + tile.warpgroups * 4 * 2 * (16 * 32 * 2 + 8)  # with two boxes of the residual for a warp


def fused_tile(epilogue: str, tile: Tile) -> Tile:
    """`tile` with as many stages as the epilogue's shared memory leaves room for."""
    if epilogue == ACTIVATION:
        return tile
    stages = (SHARED_BYTES - epilogue_bytes(epilogue, tile)) // stage_bytes(tile.block_m, tile.block_n)
    return replace(tile, stages=min(tile.stages, stages))


def halves(epilogue: str, kind: str | None) -> int:
    """How many halves a tile's columns have: a gated activation takes two."""
    return 2 if epilogue == ACTIVATION and kind is not None and is_gated(kind) else 1


def select_steps(epilogue: str, tile: Tile, k: int, kind: str | None = None) -> int:
    """How many steps the epilogue takes for a tile; each runs beside a k-block of the next tile."""
    units = tile.block_n // (16 if epilogue == DROPOUT else 8) // halves(epilogue, kind)
    return next(steps for steps in (units, units // 2, units // 4, 1) if (steps - 1) * K_BLOCK_BYTES < k)


@functools.lru_cache(maxsize=1024)
def config(
    epilogue: str,
    formats: tuple[torch.dtype, torch.dtype],
    dtype: torch.dtype,
    tile: Tile,
    columns: int,
    k: int,
    kind: str | None = None,
    q: torch.dtype | None = None,
    drop: bool = False,
) -> GemmConfig:
    """One configuration of kernels/gemms/gemm_fp8_fused.cu.

    Args:
        epilogue: ACTIVATION, which has a `kind` and casts to `q`, or DROPOUT.
        formats: of a and b.
        dtype: T, bfloat16 or float16.
        tile: from `fused_tile`.
        columns: of the output; of each of its halves, if there are two.
        k: columns of a and b.
        drop: whether DROPOUT drops anything.
    """
    others: dict[str, int | str] = {
        "RUN": run(columns, dtype, tile.block_n),
        "EPILOGUE": epilogue,
        "B_HALVES": halves(epilogue, kind),
        "STEPS": select_steps(epilogue, tile, k, kind),
        "DROP": int(drop),
    }
    if kind is not None and q is not None:
        others |= {"WIDE": WIDE[dtype], **activations.macros(kind), "FP8": FP8[q]}
    of_tile = "WARPGROUPS BLOCK_N STAGES CLUSTER"
    return fp8_config("gemm_fp8_fused", (*formats, dtype), tile, of_tile, others, epilogue_bytes(epilogue, tile))


_E4M3, _E5M2, _BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
_LONG = K_BLOCK_BYTES * 32  # a K that is long enough for every step
_CHOICES = [
    *itertools.product(TILES, [32], [_LONG], [ACTIVATION], ("gelu", "swiglu"), [_BF16], [_E4M3], [False]),
    *itertools.product(TILES, [16], [_LONG], [ACTIVATION], ("geglu",), [_BF16], [_E5M2], [False]),
    *itertools.product(TILES[1:2], [32], [_LONG], [ACTIVATION], RECORDED, (_BF16, torch.float16), [_E5M2], [False]),
    *itertools.product(TILES, (16, 32), [_LONG], [DROPOUT], [None], [_BF16], [None], (False, True)),
    *itertools.product([FEW_COLUMNS], (16, 32), [_LONG], [DROPOUT], [None], [_BF16], [None], [False]),
    *itertools.product(TILES[1:2], [32], [_LONG], [DROPOUT], [None], [torch.float16], [None], (False, True)),
    *itertools.product(TILES[:2], [32], [128, 1024, 2048], [ACTIVATION], ("gelu",), [_BF16], [_E4M3], [False]),
    *itertools.product(TILES[2:], [32], [272], [ACTIVATION], ("gelu",), [_BF16], [_E4M3], [False]),
]
# What the CPU suite compiles: every tile with each epilogue, every kind and type with one tile, and fewer steps.
CONFIGURATIONS = [
    config(epilogue, (_E4M3, _E4M3), dtype, fused_tile(epilogue, tile), columns, k, kind, q, drop).listed
    for tile, columns, k, epilogue, kind, dtype, q, drop in _CHOICES
]
# What a decoder's step takes.
_STEP = ((ACTIVATION, "swiglu", _E4M3, TILES), (DROPOUT, None, None, (*TILES, FEW_COLUMNS)))
CONFIGURATIONS += [
    config(epilogue, (_E4M3, _E4M3), _BF16, fused_tile(epilogue, tile), 32, _LONG, kind, q).ahead.listed
    for epilogue, kind, q, tiles in _STEP
    for tile in tiles
    if tile.cluster == 1
]


def _launch(
    epilogue: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    dtype: torch.dtype,
    arguments: list[int],
    tile: Tile | None,
    kind: str | None = None,
    q: torch.dtype | None = None,
    drop: bool = False,
    maps: Sequence[tuple[int, int]] = (),
) -> None:
    """Launch the kernel; `arguments` are the 64-bit words of the epilogue's struct Arguments, `maps` those in it."""
    (m, k), n, index = a.shape, b.shape[0], a.device.index
    held = unwritten.holds(b)
    tiles = (*TILES, FEW_COLUMNS) if held and epilogue == DROPOUT and not drop else TILES
    tile = fused_tile(epilogue, tile or select_tile(m, n, k, False, multiprocessors(index), tiles))
    parts = halves(epilogue, kind)
    columns = n // parts
    operands = operand_maps(a, b, tile, run(columns, dtype), parts)
    words = launch.by_value(np.array(arguments, np.int64), maps)
    scales = (a_scale_inv.data_ptr(), b_scale_inv.data_ptr())
    args = (operands, words, *scales, np.int32(m), np.int32(n), np.int32(k))
    # Shapes that agree in these two have one configuration.
    width, depth = 32 if columns % 32 == 0 else 16, min(k, _LONG)
    chosen = config(epilogue, (a.dtype, b.dtype), dtype, tile, width, depth, kind, q, drop)
    early = tile.cluster == 1 and held
    (chosen.ahead if early else chosen).launch(index, tile.count(m, n), args, early)


def _fusible(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel has a form for this GEMM. It has none for fp32."""
    return dtype != torch.float32 and a.shape[0] > 0 and b.shape[0] > 0 and a.shape[1] > 0


def _short(a: torch.Tensor, tile: Tile | None) -> bool:
    """Whether K is so short that the next tile leaves the epilogue too little time (docs/log/gemm.md)."""
    return tile is None and a.shape[0] >= 2048 and a.shape[1] < 2048


@on_cuda
def gemm_fp8_activation(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    kind: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Four:
    """a `[M, K]`, b `[n, K]` float8 -> (h `[M, n]` of out_dtype, q `[M, m]`, q_t `[m, ceil16(M)]`, scale_inv `[1]`)."""
    scaling = (scale, amax_history, column, dtype)
    h, q, q_t, scale_inv = activation_outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, kind, *scaling)
    check_devices("gemm_fp8", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, bias=bias, scale=scale)
    measured = kind in RECORDED  # the others run as two kernels, unless the caller names a tile
    if _short(a, tile) or not _fusible(a, b, out_dtype) or not (measured or tile):
        gemm_fp8.run_gemm(h, a, b, a_scale_inv, b_scale_inv, bias, "fast")
        activations.run_cast((q, q_t, scale_inv), kind, None, h, None, *scaling)
        return h, q, q_t, scale_inv
    bias = loadable(bias)
    bias_pointer, bias_type = bias_arguments(bias)
    arguments = [h.data_ptr(), bias_pointer, *scaling_pointers(scale, amax_history, column)]
    arguments += [q.data_ptr(), q_t.data_ptr(), scale_inv.data_ptr(), 0, int(bias_type)]
    _launch(ACTIVATION, a, b, a_scale_inv, b_scale_inv, out_dtype, arguments, tile, kind, dtype)
    return h, q, q_t, scale_inv


@on_cuda
def gemm_fp8_activation_backward(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> Four:
    """a `[M, K]`, b `[m, K]` float8, x `[M, n]` -> (q `[M, n]`, q_t `[n, ceil16(M)]`, scale_inv `[1]`, dbias `[n]`)."""
    scaling = (scale, amax_history, column, dtype)
    out = activation_backward_outputs(a, b, a_scale_inv, b_scale_inv, x, kind, *scaling)
    check_devices("gemm_fp8", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, x=x, scale=scale)
    # Two kernels: fused into one they took as long or longer at every size (docs/log/gemm.md).
    dact = x.new_empty((a.shape[0], b.shape[0]))
    gemm_fp8.run_gemm(dact, a, b, a_scale_inv, b_scale_inv, None, "split")
    activations.run_backward_cast(out, kind, dact, x, *scaling)
    return out


@on_cuda
def gemm_fp8_bias_dropout_add(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    p: float,
    rng_state: torch.Tensor | None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]` float8, bias `[N]`, residual `[M, N]` of out_dtype -> `[M, N]`; advances `rng_state`."""
    out = bias_dropout_add_outputs(a, b, a_scale_inv, b_scale_inv, bias, residual, out_dtype, p, rng_state)
    check_devices("gemm_fp8", a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv)
    # With few k-blocks the mask is not drawn in time; and the kernel counts groups of eight elements in 32 bits.
    apart = threshold(p) > 0 and (_short(a, tile) or out.numel() >= 2**35)
    if apart or not _fusible(a, b, out_dtype):
        x = gemm_fp8.run_gemm(torch.empty_like(out), a, b, a_scale_inv, b_scale_inv, None, "fast")
        dropout.run(out, x, bias, residual, p, rng_state)
    else:
        bias, residual = aligned(bias), aligned(residual)
        tensor_map, maps = [0] * 16, []
        if residual is not None:
            rows, columns = residual.shape
            boxes = {"box_rows": 16, "box_cols": 32, "swizzle": 0}  # of kernels/gemms/gemm_residual.cuh
            encoded = tensor_map_2d(residual.data_ptr(), residual.dtype, rows, columns, 2 * columns, **boxes)
            tensor_map, maps = encoded.words.view(np.int64).tolist(), [(0, residual.data_ptr())]
        scalars = [threshold(p), int(np.float32(keep_scale(p)).view(np.uint32))]
        pointers = [out.data_ptr(), pointer(bias), pointer(residual), pointer(rng_state)]
        arguments = [*tensor_map, *pointers, *scalars, 0, 0]  # the struct ends at a multiple of the map's 64 bytes
        _launch(DROPOUT, a, b, a_scale_inv, b_scale_inv, out_dtype, arguments, tile, drop=threshold(p) > 0, maps=maps)
    if threshold(p):
        assert rng_state is not None
        dropout.advance(rng_state)
    return out
