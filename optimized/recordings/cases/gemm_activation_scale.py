"""Calls of `gemm_fp8_activation_scale`."""

from functools import partial
from itertools import product

import torch

from optimized.ops.gemms import gemm_activation_scale
from optimized.ops.gemms.gemm_activation_scale import KEEPING_TILES
from optimized.ops.gemms.gemm_tile import Tile
from optimized.recordings.calls import BF16, E4M3, E5M2, FP16, FP32, Call, Calls, Inputs
from optimized.recordings.cases.gemm_fp8 import operands
from reference.ops.activations.activation import GATED, KINDS

twin = torch.ops.twin
Shape = tuple[int, int, int]


def _call(
    c: Inputs,
    shape: Shape,
    kind: str,
    half: torch.dtype = BF16,
    q: torch.dtype = E4M3,
    tile: Tile | None = None,
    bias: float = 1.0,
    smaller: float = 1.0,
) -> Call:
    """`shape`: rows and columns of the activation, and K. `bias` is a factor of the bias, `smaller` of the product."""
    m, cols, k = shape
    n = cols * (2 if kind in GATED else 1)
    a, b, a_scale_inv, b_scale_inv = operands(c, m, n, k)
    added = (c.x(n, dtype=half) * bias).to(half)
    args = (a, b, a_scale_inv * smaller, b_scale_inv, added, half, kind, q, False, 0.0)
    chosen = None if tile is None else partial(gemm_activation_scale.gemm_fp8_activation_scale, tile=tile)
    return Call(twin.gemm_fp8_activation_scale, args, chosen)


def calls(c: Inputs) -> Calls:
    for half, kind in product((BF16, FP16), KINDS):
        yield _call(c, (70, 96, 272), kind, half)
        # All of h is small: it is read for the amax. Then also negative, or not a number where a scale is.
        yield _call(c, (70, 96, 272), kind, half, smaller=1e-5, bias=0.0)
    for bias, smaller in ((-0.0, 1e-9), (float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))):
        yield _call(c, (5, 32, 48), "gelu", BF16, E5M2, None, bias, smaller)
    for tile, cols in product(KEEPING_TILES, (272, 288)):
        yield _call(c, (330, cols, 592), "gelu", tile=tile)
    for shape in ((0, 16, 16), (8, 16, 0), (1, 16, 16)):
        yield _call(c, shape, "silu")
    yield _call(c, (8, 16, 16), "gelu", FP32)


def large(c: Inputs) -> Calls:
    for tile in KEEPING_TILES:  # several tiles a block
        yield _call(c, (4000, 2064, 4096), "gelu", tile=tile)
    yield _call(c, (8192, 16384, 4096), "gelu")


def sized(c: Inputs, rows: int, cols: int) -> Calls:
    for k, kind in product((0, 32), ("gelu", "swiglu")):
        yield _call(c, (rows, cols, k), kind)
