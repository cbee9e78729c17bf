"""Operands of the scaled FP8 GEMMs that cuBLASLt computed for tests/golden/scaled_products.npz."""

from pathlib import Path

import torch

from reference.numbers import philox
from reference.ops.casts.cast_blocks import scale_shape

PATH = Path(__file__).parents[1] / "golden" / "scaled_products.npz"
SHAPE = (64, 128, 1040)  # M, N, K
FORMS = {"rows by rows": (False, False), "rows by squares": (False, True), "squares by rows": (True, False)}
Operand = tuple[torch.Tensor, torch.Tensor]


def operands(squares: tuple[bool, bool]) -> tuple[Operand, Operand]:
    """Codes `[M, K]` and `[N, K]`, E4M3, each with the scales of its blocks, which are no powers of two."""
    m, n, k = SHAPE

    def made(rows: int, square: bool, seed: int) -> Operand:
        scales = torch.exp2(philox.normal(scale_shape(rows, k, square), seed=seed + 1))
        return philox.normal((rows, k), seed=seed).to(torch.float8_e4m3fn), scales

    return made(m, squares[0], 1), made(n, squares[1], 3)
