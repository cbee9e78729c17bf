"""Every configuration of a kernel that layers launch at their defaults: what `twin compile` compiles.

The ops' `CONFIGURATIONS` have every kernel, but not every configuration of a GEMM. Added here are the GEMMs of layers
in bf16 and fp16, with 16-bit weights or in FP8 with the format HYBRID, with GELU or SwiGLU, and with features that are
multiples of 32. The tile depends on the shape, so all tiles are listed.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from optimized.cuda.precompile import Configuration
from optimized.ops import MODULES
from optimized.ops.gemms import gemm, gemm_fp8, gemm_fused
from optimized.ops.gemms.gemm_tile import FP8_TILES, K_BLOCK_BYTES, TILES

WIDE = (torch.bfloat16, torch.float16)
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_COLUMNS = 32  # stands for all multiples of 32, which have the same configurations
_LAYOUTS = ((False, False), (False, True), (True, True))  # which operands of fprop, dgrad, wgrad are transposed views


_EPILOGUES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((gemm_fused.ACTIVATION, {"kind": kind, "q": _E4M3}) for kind in ("gelu", "swiglu")),
    *((gemm_fused.DROPOUT, {"drop": drop}) for drop in (False, True)),
)


def _products() -> Iterator[Configuration]:
    for dtype, tile in itertools.product(WIDE, FP8_TILES):
        # The gradient of a weight over at most 128 tokens is one chain, which "fast" computes.
        for a, accumulate in ((_E4M3, "fast"), (_E5M2, "split"), (_E5M2, "fast")):
            yield gemm_fp8.config(a, _E4M3, dtype, accumulate, tile, _COLUMNS).listed
    for dtype, tile in itertools.product(WIDE, TILES):
        for layout in _LAYOUTS:
            yield gemm.config(dtype, dtype, *layout, tile).listed
        yield gemm.config(dtype, torch.float32, True, True, tile, add=True).listed  # to main_grad


def _fused_products() -> Iterator[Configuration]:
    # With a short K the epilogue has fewer steps; from 32 k-blocks on it has no more.
    depths = [K_BLOCK_BYTES * blocks for blocks in range(1, 33)]
    for dtype, tile, k in itertools.product(WIDE, TILES, depths):
        for epilogue, options in _EPILOGUES:
            fused = gemm_fused.fused_tile(epilogue, tile)
            yield gemm_fused.config(epilogue, (_E4M3, _E4M3), dtype, fused, _COLUMNS, k, **options).listed


def configurations() -> list[Configuration]:
    """All of them, each once; those that most layers need come first."""
    listed = [one for module in MODULES for one in module.CONFIGURATIONS]
    every = (*_products(), *_fused_products(), *listed)
    return list({(kernel, tuple(sorted(macros.items()))): (kernel, macros) for kernel, macros in every}.values())
