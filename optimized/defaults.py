"""Every configuration of a kernel that layers launch at their defaults: what `twin compile` compiles.

Those are the ops' `CONFIGURATIONS`, which hold every kernel but not every combination of what a GEMM's configuration
depends on, and here the GEMMs of layers in bf16 and fp16, with 16-bit weights or in FP8 with the format HYBRID, GELU or
SwiGLU, and features that are multiples of 32. Which tile they get follows from the shape, so all tiles are in.
"""

import itertools
from collections.abc import Iterator

import torch

from optimized.ahead import Configuration
from optimized.ops import MODULES, gemm, gemm_fp8, gemm_fused
from optimized.ops.gemm_tile import FP8_TILES, K_BLOCK_BYTES, TILES

WIDE = (torch.bfloat16, torch.float16)
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_COLUMNS = 32  # what of a multiple of 32 the configurations depend on
_LAYOUTS = ((False, False), (False, True), (True, True))  # fprop, dgrad, wgrad: which operands are transposed views


def _products() -> Iterator[Configuration]:
    for dtype, tile in itertools.product(WIDE, FP8_TILES):
        # A weight's gradient over at most 128 tokens is one chain, which "fast" computes.
        for a, accumulate in ((_E4M3, "fast"), (_E5M2, "split"), (_E5M2, "fast")):
            yield gemm_fp8.config(a, _E4M3, dtype, accumulate, tile, _COLUMNS).listed
    for dtype, tile in itertools.product(WIDE, TILES):
        for layout in _LAYOUTS:
            yield gemm.config(dtype, dtype, *layout, tile).listed
        yield gemm.config(dtype, torch.float32, True, True, tile, add=True).listed  # to main_grad


def _fused_products() -> Iterator[Configuration]:
    """A short K has fewer steps; from 32 k-blocks on there are no more."""
    depths = [K_BLOCK_BYTES * blocks for blocks in range(1, 33)]
    for dtype, tile, k in itertools.product(WIDE, TILES, depths):
        for kind in ("gelu", "swiglu"):
            epilogue = gemm_fused.ACTIVATION
            shape = (gemm_fused.fused_tile(epilogue, tile), _COLUMNS, k)
            yield gemm_fused.config(epilogue, (_E4M3, _E4M3), dtype, *shape, kind, _E4M3).listed
        for drop in (False, True):
            epilogue = gemm_fused.DROPOUT
            shape = (gemm_fused.fused_tile(epilogue, tile), _COLUMNS, k)
            yield gemm_fused.config(epilogue, (_E4M3, _E4M3), dtype, *shape, drop=drop).listed


def configurations() -> list[Configuration]:
    """All of them, each once; first what most layers need."""
    listed = [one for module in MODULES for one in module.CONFIGURATIONS]
    every = (*_products(), *_fused_products(), *listed)
    return list({(kernel, tuple(sorted(macros.items()))): (kernel, macros) for kernel, macros in every}.values())
