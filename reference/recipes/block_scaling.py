"""Block scaling: 128 numbers along K have a scale of their own, that of their amax.

    inputs, gradients   blocks of 1 × 128 along K; backward reads their transposes, cast anew in blocks along the tokens
    weights             blocks of 128 × 128; the transpose has the same blocks
    codes, scales       `reference.ops.casts.cast_blocks`; E4M3 in all three, scales that are powers of two
    GEMMs               `reference.ops.gemms.gemm_fp8_blocks`: chains of K = 128, each multiplied by its two scales

There is no state between steps. The results of norms and activations are rounded to the activation dtype before they
are cast, as under current scaling. Where the gradient of a weight is wanted, these are in no memory: a norm's result
(`reference.ops.norms.norm_cast_blocks`), an activation and its gradient
(`reference.ops.activations.activation_cast_blocks`), the gradients of q, k and v side by side. A token's scales are of
that token alone, so its words do not depend on the batch.

Names, defaults and meaning are Transformer Engine's (`transformer_engine.common.recipe.Float8BlockScaling`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from reference.ops.casts.cast_blocks import BLOCK, blocks_of, ceil4, scale_shape
from reference.ops.library import twin
from reference.recipes.base import Format, MMParams, QParams, Recipe, check_recipe
from reference.recipes.quantized import (
    DEQUANTIZE,
    KEEPING,
    PIECES,
    PRODUCTS,
    SCALES_OF_ROWS,
    Keeping,
    Operand,
    Products,
    Quantized,
    dgrad,
    end_plain,
    fprop,
)
from reference.recipes.quantizer import ActivationPlan, NormPlan, Produced, Quantizer
from reference.recipes.roles import Role

ROWS = "blocks of 1 × 128"
SQUARES = "blocks of 128 × 128"


_SPLIT = MMParams()


@dataclass(unsafe_hash=True)
class Float8BlockScaling(Recipe):
    """Scale blocks of 128 numbers by their own amaxes.

    Args:
        use_f32_scales: scales in fp32 instead of powers of two. (Transformer Engine's default is the environment's
            NVTE_FP8_BLOCK_SCALING_FP32_SCALES, which is not read here.)
        fp8_format: `Format.E4M3` or `Format.HYBRID`.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1, blocks of 1 × 128, or 2, blocks of
            128 × 128, of inputs, weights and gradients; at most one of them is 2.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: `MMParams(use_split_accumulator=True)`.
        fp8_dpa, fp8_mha: FP8 attention; only False is offered.
        backward_override: FP8 in forward alone; backward multiplies in the activation dtype, with "high_precision" what
            the forward has cast, with "dequantized" what its codes stand for.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = _SPLIT
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    rows_of_parts: ClassVar[int] = BLOCK

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        name = type(self).__name__
        if not isinstance(self.use_f32_scales, bool):
            raise TypeError(f"{name}: use_f32_scales={self.use_f32_scales!r}; True and False are accepted.")
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for field in dims:
            value = getattr(self, field)
            if type(value) is not int or value not in (1, 2):
                raise ValueError(f"{name}: {field}={value!r}; 1 and 2 are accepted.")
        if sum(getattr(self, field) == 2 for field in dims) > 1:
            found = ", ".join(f"{field}={getattr(self, field)}" for field in dims)
            raise ValueError(f"{name}: {found}; 2 is accepted for one of them, since no GEMM has square blocks twice.")
        for field in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            value = getattr(self, field)
            if not isinstance(value, MMParams) or value.use_split_accumulator is not True:
                raise ValueError(f"{name}: {field}={value!r}; MMParams(use_split_accumulator=True) is accepted.")
        check_recipe(self)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return True

    @property
    def sees_other_tokens(self) -> bool:
        return self.x_block_scaling_dim == 2

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        """How inputs are scaled; weights and gradients, too."""
        return QParams(power_2_scale=not self.use_f32_scales)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def quantizer(self, role: Role, state: Any) -> "InBlocks":
        dims = {"input": self.x_block_scaling_dim, "weight": self.w_block_scaling_dim}
        square = dims.get(role.tensor, self.grad_block_scaling_dim) == 2
        return InBlocks(self.codes(role.is_forward)[0], square, "fp32" if self.use_f32_scales else "power_of_two")


class InBlocks(Quantizer):
    """Casts in blocks of 1 × 128, or where `square` of 128 × 128; `dialect` is that of `twin::cast_blocks`."""

    fp8 = True

    def __init__(self, dtype: torch.dtype, square: bool, dialect: str) -> None:
        self.dtype, self.square, self.dialect = dtype, square, dialect
        self.key = ("in blocks", dtype, square, dialect)

    @property
    def layout(self) -> str:  # type: ignore[override]
        return SQUARES if self.square else ROWS

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        how, layout = (self.dtype, self.square, self.dialect, 0.0), self.layout
        if not transpose:
            q, scale_inv = twin.cast_blocks(x, *how)
            return Quantized(Operand(q, scale_inv, layout), None)
        return _both(twin.cast_blocks_transpose(x, *how), layout)

    def norm(
        self,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        plan: NormPlan,
        dtype: torch.dtype,
        transpose: bool,
    ) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
        if self.square or not transpose or x.dtype != dtype:
            return super().norm(x, gamma, beta, plan, dtype, transpose)
        *cast, mean, rstd = twin.norm_cast_blocks_transpose(x, gamma, beta, *plan, self.dtype, self.dialect, 0.0)
        return _both(cast), mean, rstd

    def activation(
        self, x: Quantized, w: Quantized, bias: torch.Tensor | None, plan: ActivationPlan, transpose: bool
    ) -> tuple[torch.Tensor, Quantized]:
        if self.square or not transpose:
            return super().activation(x, w, bias, plan, transpose)
        h = fprop(x, w, bias, plan.dtype, plan.how)
        return h, _both(twin.activation_cast_blocks_transpose(h, plan.kind, self.dtype, self.dialect, 0.0))

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        if self.square or not (transpose and dbias):
            return super().grad(g, transpose, dbias)
        return self.joined_grad([g], 1, transpose, dbias)

    def joined_grad(self, parts: list[torch.Tensor], groups: int, transpose: bool, dbias: bool) -> Produced:
        if self.square or not transpose:
            return super().joined_grad(parts, groups, transpose, dbias)
        # Without a bias, too: sums that nobody reads cost less than a copy of the parts.
        parts = [part.contiguous() for part in parts]
        *cast, db = twin.cat_cast_blocks_transpose_dbias(parts, groups, self.dtype, self.dialect, 0.0)
        return _both(cast), db if dbias else None

    def activation_grad(
        self, g: Quantized, w: Operand, h: torch.Tensor, plan: ActivationPlan, transpose: bool, dbias: bool
    ) -> Produced:
        if self.square or not transpose:
            return super().activation_grad(g, w, h, plan, transpose, dbias)
        dy = dgrad(g, w, plan.dtype, plan.how)
        how = (plan.kind, self.dtype, self.dialect, 0.0)
        *cast, db = twin.activation_backward_cast_blocks_transpose_dbias(dy, h, *how)
        return _both(cast), db if dbias else None


def _both(cast: Sequence[torch.Tensor], layout: str = ROWS) -> Quantized:
    """What the casts with a transposed copy give."""
    q, q_t, scale_inv, scale_inv_t = cast
    return Quantized(Operand(q, scale_inv, layout), Operand(q_t, scale_inv_t, layout))


def _operands(a: Operand, b: Operand) -> tuple[Any, ...]:
    return a.codes, b.codes, a.scales, b.scales, a.layout == SQUARES, b.layout == SQUARES


def _multiply(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str
) -> torch.Tensor:
    return twin.gemm_fp8_blocks(*_operands(a, b), bias, out_dtype)


def _add(a: Operand, b: Operand, out: torch.Tensor) -> None:
    twin.gemm_fp8_blocks_accumulate(*_operands(a, b), out)


def _residual(a: Operand, b: Operand, *rest: Any) -> torch.Tensor:
    return twin.gemm_fp8_blocks_bias_dropout_add(*_operands(a, b), *rest)


def _part(a: Operand, b: Operand, accumulator: torch.Tensor | None, accumulate: str) -> torch.Tensor:
    return twin.gemm_fp8_blocks_part(*_operands(a, b), accumulator)  # type: ignore[no-any-return]


def _turned(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scales of the transpose of codes of that shape in square blocks; they begin at the same corner."""
    rows, cols = shape
    found = torch.zeros(scale_shape(cols, rows, True), dtype=torch.float32, device=scales.device)
    found[:, : blocks_of(rows)] = scales[:, : blocks_of(cols)].t()
    return found


def _pieces(a: Operand, sizes: list[int]) -> list[Operand]:
    """Columns in pieces, each but the last a multiple of a block: the blocks stay what they are."""
    assert a.scales is not None
    split = zip(a.codes.split(sizes, 1), a.scales.split([blocks_of(size) for size in sizes]), strict=True)
    return [a._replace(codes=codes.contiguous(), scales=scales) for codes, scales in split]


def _square_pieces(a: Operand, sizes: list[int]) -> list[Operand]:
    """The same of square blocks, whose scales are padded to fours along the columns."""
    assert a.scales is not None
    found, first = [], 0
    for codes in a.codes.split(sizes, 1):
        scales = torch.zeros(
            scale_shape(codes.shape[0], codes.shape[1], True), dtype=torch.float32, device=codes.device
        )
        count = blocks_of(codes.shape[1])
        scales[:, :count] = a.scales[:, first : first + count]
        found.append(a._replace(codes=codes.contiguous(), scales=scales))
        first += count
    return found


PIECES[ROWS] = _pieces
PIECES[SQUARES] = _square_pieces
SCALES_OF_ROWS[ROWS] = lambda a, first, end: a.scales[:, first : ceil4(end)].contiguous()  # type: ignore[index]
SCALES_OF_ROWS[SQUARES] = lambda a, first, end: a.scales[first // BLOCK : blocks_of(end)]  # type: ignore[index]
KEEPING[SQUARES] = Keeping(
    lambda shape: scale_shape(shape[0], shape[1], True),
    _turned,
    lambda scales, shape: scales[:, : blocks_of(shape[1])],
)
DEQUANTIZE[ROWS] = lambda a, dtype: twin.dequantize(a.codes, a.scales, False, dtype)
DEQUANTIZE[SQUARES] = lambda a, dtype: twin.dequantize(a.codes, a.scales, True, dtype)
for _layouts in ((ROWS, ROWS), (ROWS, SQUARES), (SQUARES, ROWS)):
    PRODUCTS[_layouts] = Products(_multiply, _add, torch.bfloat16, _residual, _part, end_plain)
