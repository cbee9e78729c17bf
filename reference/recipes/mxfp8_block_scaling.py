"""MXFP8: 32 neighbours along K share a scale, which is a power of two. On the CPU alone.

    scale = the smallest 2^n that is not below amax / fp8_max, of each block        `twin::cast_mxfp8`
    y  = T( q(x) · q(w)ᵀ + b )       blocks along `in`
    dx = T( q(g) · q(wᵀ)ᵀ )          blocks along `out`
    dw = T( q(gᵀ) · q(xᵀ)ᵀ )         blocks along the tokens

So what each GEMM reads is cast from the numbers themselves, along its own K: q(xᵀ) is not q(x)ᵀ, unless blocks are
square. There is no state between steps. The results of norms and activations are rounded to the activation dtype T
before they are cast. GEMMs: `twin::gemm_mxfp8`.

Names, defaults and meaning are Transformer Engine's (`transformer_engine.common.recipe.MXFP8BlockScaling`).
"""

from dataclasses import dataclass
from typing import Any

import torch

from reference.numbers import block_formats, formats
from reference.ops.casts import cast_mxfp8
from reference.ops.gemms import gemm_block_formats  # noqa: F401  (declares the ops)
from reference.ops.library import twin
from reference.recipes.base import Format, Recipe, check_recipe
from reference.recipes.quantized import NUMBERS, PRODUCTS, Operand, Products, Quantized
from reference.recipes.quantizer import Quantizer
from reference.recipes.roles import Role

MXFP8 = "MXFP8"
"""Layout: FP8 codes, and an E8M0 scale for each 32 of a row."""


@dataclass(unsafe_hash=True)
class MXFP8BlockScaling(Recipe):
    """Scale each 32 neighbours along K by a power of two; on a CPU.

    Args:
        margin: Transformer Engine reads it nowhere; only 0 is offered.
        fp8_format: `Format.E4M3` or `Format.HYBRID`.
        fp8_dpa, fp8_mha: FP8 attention; only False is offered.
        backward_override: FP8 in forward alone; backward multiplies in the activation dtype, with "high_precision" what
            the forward has cast, with "dequantized" what its codes stand for.
        enable_2d_quantization: weights have a scale for each 32×32, so forward and backward read the same numbers.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        if type(self.margin) is not int or self.margin != 0:
            raise NotImplementedError(f"MXFP8BlockScaling: margin={self.margin!r} is not offered; 0 is accepted.")
        square = self.enable_2d_quantization
        if not isinstance(square, bool):
            raise TypeError(f"MXFP8BlockScaling: enable_2d_quantization={square!r}; True and False are accepted.")
        check_recipe(self)

    @classmethod
    def mxfp8(cls) -> bool:
        return True

    def quantizer(self, role: Role, state: Any) -> "InBlocksOf32":
        return InBlocksOf32(self.codes(role.is_forward)[0], self.enable_2d_quantization and role.tensor == "weight")


class InBlocksOf32(Quantizer):
    """Casts to MXFP8, in square blocks or in those of a row; `dtype` is the codes'."""

    fp8 = True

    def __init__(self, dtype: torch.dtype, square: bool) -> None:
        self.dtype, self.square = dtype, square
        self.key = ("mxfp8", dtype, square)

    def _cast(self, x: torch.Tensor) -> Operand:
        codes, scales = twin.cast_mxfp8(x.contiguous(), self.dtype, self.square)
        return Operand(codes, scales, MXFP8)

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        return Quantized(self._cast(x), self._cast(x.t()) if transpose else None)


def _multiply(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str
) -> torch.Tensor:
    return twin.gemm_mxfp8(a.codes, b.codes, a.scales, b.scales, bias, out_dtype)


def _add(a: Operand, b: Operand, out: torch.Tensor) -> None:
    twin.gemm_mxfp8_accumulate(a.codes, b.codes, a.scales, b.scales, out)


def _numbers(a: Operand) -> torch.Tensor:
    assert a.scales is not None
    wide = formats.decode(a.codes).double().view(*a.scales.shape, cast_mxfp8.BLOCK)
    return (wide * block_formats.decode_e8m0(a.scales).double()[..., None]).flatten(1)


NUMBERS[MXFP8] = _numbers
PRODUCTS[MXFP8, MXFP8] = Products(_multiply, _add, torch.float32)
