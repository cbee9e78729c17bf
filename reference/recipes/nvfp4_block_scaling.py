"""NVFP4: four bits. 16 neighbours along K share an E4M3 scale, and the tensor an fp32 one. On the CPU alone.

    input           y   rows of 16, to nearest
                    dw  of its transpose: the random Hadamard transform, then rows of 16, to nearest
    weight          y   squares of 16, to nearest
                    dx  of its transpose: the same codes and scales, transposed
    grad_output     dx  rows of 16, rounded stochastically
                    dw  of its transpose: the random Hadamard transform, then rows of 16, rounded stochastically

    casts `twin::cast_nvfp4`, transform `twin::hadamard`, GEMMs `twin::gemm_nvfp4`; order and roundings are theirs

Why each part is there ("Pretraining Large Language Models with NVFP4", arXiv 2509.25149): Four bits have eight
magnitudes, and a block whose scale is a power of two would leave out up to half of them; so scales have a mantissa, and
their small range a second level. Squares let forward and backward read one weight, so that dx is the gradient of the y
that was computed. Rounding to nearest loses the same small gradients each time; by chance none is lost on average. The
transform spreads an outlier over sixteen numbers, of which the others would otherwise become zero; both operands of dw
have it, so dw keeps its value.

A few layers at a model's ends usually stay in 16 bits (`te.recipe.by_layer`).

There is no state between steps. A gradient's seed is drawn from torch's default CPU generator, as dropout's, so
`torch.manual_seed` repeats a step. The results of norms and activations are rounded to the activation dtype before they
are cast; so is what the transform gives.

Names, defaults and meaning are Transformer Engine's (`transformer_engine.common.recipe.NVFP4BlockScaling`), which also
reads its defaults from the environment, and takes the transform in bf16 alone; here it is in the activation dtype.
"""

from dataclasses import dataclass
from typing import Any

import torch

from reference.numbers import block_formats, formats, philox
from reference.ops.casts import cast_nvfp4, hadamard  # noqa: F401  (declares the ops)
from reference.ops.gemms import gemm_block_formats  # noqa: F401  (declares the ops)
from reference.ops.library import twin
from reference.recipes.base import Format, QParams, Recipe, check_recipe
from reference.recipes.quantized import NUMBERS, PRODUCTS, Operand, Products, Quantized
from reference.recipes.quantizer import Quantizer
from reference.recipes.roles import Role

NVFP4 = "NVFP4"
"""Layout: two E2M1 codes a byte, an E4M3 scale for each 16 codes of a row, and the tensor's amax."""


@dataclass(unsafe_hash=True)
class NVFP4BlockScaling(Recipe):
    """Four bits, in blocks of 16 along K with two levels of scales; on a CPU.

    Args:
        disable_rht: leave out the random Hadamard transform of what dw's GEMM reads.
        disable_stochastic_rounding: round gradients to nearest, too.
        disable_2d_quantization: weights have blocks of 1×16, cast anew for backward.
        row_scaled_activation, nvfp4_4over6, nvfp4_4over6_e4m3_use_256, nvfp4_4over6_err_mode: variants for inference
            and post-training; only the defaults are offered.
        fp4_format: `Format.E2M1`. fp8_format: `Format.E4M3`, that of the scales.
        fp8_dpa, fp8_mha: FP8 attention; only False is offered.
        backward_override: NVFP4 in forward alone; backward multiplies in the activation dtype, with "high_precision"
            what the forward has cast, with "dequantized" what its codes stand for.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        for name in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"NVFP4BlockScaling: {name}={value!r}; True and False are accepted.")
        only: dict[str, Any] = {
            "row_scaled_activation": False,
            "nvfp4_4over6": "none",
            "nvfp4_4over6_e4m3_use_256": "all",
            "nvfp4_4over6_err_mode": "MAE",
            "fp4_format": Format.E2M1,
            "fp8_format": Format.E4M3,
        }
        for name, accepted in only.items():
            value = getattr(self, name)
            if type(value) is not type(accepted) or value != accepted:
                raise NotImplementedError(
                    f"NVFP4BlockScaling: {name}={value!s} is not offered; {accepted!s} is accepted."
                )
        check_recipe(self)

    @classmethod
    def nvfp4(cls) -> bool:
        return True

    @property
    def sees_other_tokens(self) -> bool:
        return True

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """How inputs are quantized."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """How weights are quantized."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """How gradients are quantized."""
        return QParams(
            random_hadamard_transform=not self.disable_rht, stochastic_rounding=not self.disable_stochastic_rounding
        )

    def quantizer(self, role: Role, state: Any) -> "InBlocksOf16":
        how = {"weight": self.fp4_quant_fwd_weight, "grad_output": self.fp4_quant_bwd_grad}
        return InBlocksOf16(how.get(role.tensor, self.fp4_quant_fwd_inp))


class InBlocksOf16(Quantizer):
    """Casts to NVFP4; `how` says in which blocks and how it rounds, and whether what dw reads is transformed."""

    fp8 = True
    dtype = torch.uint8

    def __init__(self, how: QParams) -> None:
        self.how = how
        self.key = ("nvfp4", how)

    def _cast(self, x: torch.Tensor, rng_state: torch.Tensor | None) -> Operand:
        codes, scales, amax = twin.cast_nvfp4(x, self.how.fp4_2d_quantization, rng_state)
        return Operand(codes, scales, NVFP4, amax)

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        rng_state = philox.new_state(x.device) if self.how.stochastic_rounding else None
        row = self._cast(x, rng_state)
        if not transpose:
            return Quantized(row, None)
        x = x.t().contiguous()
        return Quantized(row, self._cast(twin.hadamard(x) if self.how.random_hadamard_transform else x, rng_state))


def _operands(a: Operand, b: Operand) -> tuple[torch.Tensor | None, ...]:
    return a.codes, b.codes, a.scales, b.scales, a.amax, b.amax


def _multiply(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str
) -> torch.Tensor:
    return twin.gemm_nvfp4(*_operands(a, b), bias, out_dtype)


def _add(a: Operand, b: Operand, out: torch.Tensor) -> None:
    twin.gemm_nvfp4_accumulate(*_operands(a, b), out)


def _numbers(a: Operand) -> torch.Tensor:
    assert a.scales is not None
    assert a.amax is not None
    wide = block_formats.decode_e2m1(a.codes).double().view(*a.scales.shape, cast_nvfp4.BLOCK)
    return (wide * formats.decode(a.scales).double()[..., None]).flatten(1) * (a.amax.double() / cast_nvfp4.LARGEST)


NUMBERS[NVFP4] = _numbers
PRODUCTS[NVFP4, NVFP4] = Products(_multiply, _add, torch.float32)
