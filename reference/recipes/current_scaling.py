"""Current scaling: each tensor is scaled by its own amax.

    scale            `twin::current_scale`: fp8_max / max(amax, epsilon), of the tensor in the activation dtype
    q, scale_inv     as in `twin::cast`

There is no state between steps. The results of norms and activations are rounded to the activation dtype before they
are cast, because the scale depends on all of them; delayed scaling casts them from fp32. An activation's amax is that
of the fp32 numbers all the same (`twin::activation_scale`): Transformer Engine takes it in the activation's kernel. A
norm's and a gradient's amax is that of the rounded numbers, there as here. GEMMs are those of delayed scaling.

No tensor is read for its amax alone where the kernel that makes it can give it:

    a norm                         made twice and not written            `twin::norm_scale_cast_transpose`
    an activation, not gated       made twice; the amax is that of the   `twin::gemm_fp8_activation_scale`
                                   largest pre-activation
    a gated one, and gradients     the amax in passing                   `twin::activation_scale` and its backward
    attention's output, and the    the amax in passing                   `twin::attention_amax` and its backward, which
    gradients of q, k and v                                              a quantizer is told (`Quantizer.knowing`)

What others made is read twice: weights, and gradients that reach a layer.

Names, defaults and meaning are Transformer Engine's (`transformer_engine.common.recipe.Float8CurrentScaling`), whose y,
dx and dw of a `Linear`, recorded on an H200, agree in every bit.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reference.ops.library import twin
from reference.recipes.base import Format, MMParams, QParams, Recipe, check_recipe
from reference.recipes.quantized import (
    PER_TENSOR,
    Operand,
    Quantized,
    cast_together,
    dgrad,
    fprop,
    gemm_bias,
    per_tensor,
)
from reference.recipes.quantizer import ActivationPlan, NormPlan, Produced, Quantizer
from reference.recipes.roles import Role
from reference.support import groups

_FAST, _SPLIT = MMParams(use_split_accumulator=False), MMParams()
_PLAIN = QParams()


@dataclass(unsafe_hash=True)
class Float8CurrentScaling(Recipe):
    """Scale each tensor by its own amax.

    Args:
        use_power_2_scales: scales of every tensor are powers of two: their mantissa is cleared. (Transformer Engine
            2.20 reads `power_2_scale` of the three `QParams` instead, and those from the environment.)
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: `MMParams`, of fprop with use_split_accumulator=False, of the
            other two with True.
        fp8_dpa, fp8_mha: FP8 attention; only False is offered (`DelayedScaling` has fp8_dpa).
        backward_override: FP8 in forward alone; backward multiplies in the activation dtype, with "high_precision" what
            the forward has cast, with "dequantized" what its codes stand for.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: `QParams` of inputs, weights and gradients:
            power_2_scale, scales that are powers of two, and amax_epsilon, the least amax.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = _FAST
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp8_quant_fwd_inp: QParams = field(default=_PLAIN, kw_only=True)
    fp8_quant_fwd_weight: QParams = field(default=_PLAIN, kw_only=True)
    fp8_quant_bwd_grad: QParams = field(default=_PLAIN, kw_only=True)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        name = "Float8CurrentScaling"
        if not isinstance(self.use_power_2_scales, bool):
            raise TypeError(f"{name}: use_power_2_scales={self.use_power_2_scales!r}; True and False are accepted.")
        for gemm, only in (("fp8_gemm_fprop", _FAST), ("fp8_gemm_dgrad", _SPLIT), ("fp8_gemm_wgrad", _SPLIT)):
            value = getattr(self, gemm)
            if not isinstance(value, MMParams) or value.use_split_accumulator is not only.use_split_accumulator:
                raise ValueError(f"{name}: {gemm}={value!r}; {only!r} is accepted.")
        for quant in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            _check_quantization(f"{name}: {quant}", getattr(self, quant))
        check_recipe(self)

    @property
    def sees_other_tokens(self) -> bool:
        return True

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return True

    float8_per_tensor_scaling = float8_current_scaling

    def quantizer(self, role: Role, state: Any) -> "Current":
        of_tensor = {"input": self.fp8_quant_fwd_inp, "weight": self.fp8_quant_fwd_weight}
        how = of_tensor.get(role.tensor, self.fp8_quant_bwd_grad)
        dtype, _ = self.codes(role.is_forward)
        return Current(dtype, self.use_power_2_scales or how.power_2_scale, float(how.amax_epsilon))


def _check_quantization(what: str, value: Any) -> None:
    """Refuse `QParams` that say more than power_2_scale and amax_epsilon; `what` names them in the error."""
    if not isinstance(value, QParams) or not isinstance(value.power_2_scale, bool) or any(value[2:]):
        raise ValueError(f"{what}={value!r}; QParams(power_2_scale, amax_epsilon), a bool and a number, is accepted.")
    epsilon = value.amax_epsilon
    number = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool) and math.isfinite(epsilon)
    if not number or not 0 <= epsilon <= torch.finfo(torch.float32).max:
        raise ValueError(f"{what}: amax_epsilon={epsilon!r}; a finite number of fp32, from 0 on, is accepted.")


def scale_of_amaxes(amax: torch.Tensor, shared_by: Sequence[str], *how: Any) -> torch.Tensor:
    """The scale, fp32 `[1]`, of the largest of the amaxes of groups, each fp32 `[1, 1]` and replaced by it.

    `shared_by`: the groups' names; `how` as in `twin::current_scale`.
    """
    for group in shared_by:
        groups.largest_in(amax, group)
    return twin.current_scale(amax, *how)  # type: ignore[no-any-return]


def scale_of_ranks(x: torch.Tensor, shared_by: Sequence[str], *how: Any) -> torch.Tensor:
    """`twin::current_scale` of a tensor of which each rank of these groups has a part, x."""
    amax = torch.zeros(1, 1, dtype=torch.float32, device=x.device)
    twin.amax(x.contiguous(), amax, 0)
    return scale_of_amaxes(amax, shared_by, *how)


class Current(Quantizer):
    """Casts a tensor with the scale of its own amax; dtype, power_of_two and epsilon are `twin::current_scale`'s."""

    fp8 = True
    layout = PER_TENSOR
    reads_amax = True
    amax: torch.Tensor | None = None
    """Of the tensor that is cast next, if it is known."""

    def __init__(self, dtype: torch.dtype, power_of_two: bool, epsilon: float) -> None:
        self.dtype = dtype
        self.how = (dtype, power_of_two, epsilon)
        self.key = ("current", *self.how)

    def knowing(self, amax: torch.Tensor | None) -> "Current":
        if amax is None:
            return self
        found = copy.copy(self)
        found.amax = amax
        return found

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = twin.current_scale(x if self.amax is None else self.amax, *self.how)
        return found

    def scales(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return twin.multi_current_scale(xs, False, *self.how)  # type: ignore[no-any-return]

    def scale_of_activation(self, h: torch.Tensor, kind: str, y: torch.Tensor) -> torch.Tensor:
        return twin.activation_scale(h, kind, *self.how)[1]  # type: ignore[no-any-return]

    def _cast(self, x: torch.Tensor, scale: torch.Tensor, transpose: bool) -> Quantized:
        if transpose:
            return per_tensor(*twin.cast_transpose(x, scale, None, 0, self.dtype))
        q, scale_inv = twin.cast(x, scale, None, 0, self.dtype)
        return per_tensor(q, None, scale_inv)

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        return self._cast(x, self.scale(x), transpose)

    def quantize_together(self, others: Sequence[Quantizer], xs: list[torch.Tensor]) -> list[Quantized]:
        if not all(type(one) is Current and one.key == self.key for one in others):
            return super().quantize_together(others, xs)
        return cast_together(xs, [self.scales(xs)] * len(xs), [], list(range(len(xs))), self.dtype)

    def norm(
        self,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        plan: NormPlan,
        dtype: torch.dtype,
        transpose: bool,
    ) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
        if transpose and x.dtype == dtype != torch.float32:
            *cast, mean, rstd = twin.norm_scale_cast_transpose(x, gamma, beta, *plan, *self.how)
            return per_tensor(*cast), mean, rstd
        y, mean, rstd, scale = twin.norm_scale(x, gamma, beta, *plan, dtype, *self.how)
        return self._cast(y, scale, transpose), mean, rstd

    def activation(
        self, x: Quantized, w: Quantized, bias: torch.Tensor | None, plan: ActivationPlan, transpose: bool
    ) -> tuple[torch.Tensor, Quantized]:
        if not transpose:
            return super().activation(x, w, bias, plan, transpose)
        if not x.row.layout == w.row.layout == PER_TENSOR:
            h = fprop(x, w, bias, plan.dtype, plan.how)
            return h, per_tensor(*twin.activation_scale_cast_transpose(h, plan.kind, *self.how))
        operands = (x.row.codes, w.row.codes, x.row.scales, w.row.scales, gemm_bias(x.row, w.row, bias, plan.dtype))
        h, *cast = twin.gemm_fp8_activation_scale(*operands, plan.dtype, plan.kind, *self.how)
        return h, per_tensor(*cast)

    def activated(self, h: torch.Tensor, kind: str, transpose: bool) -> tuple[torch.Tensor, Quantized]:
        y, scale = twin.activation_scale(h, kind, *self.how)
        return y, self._cast(y, scale, transpose)

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        return self._cast_grad(g, self.scale(g), transpose, dbias)

    def _cast_grad(self, g: torch.Tensor, scale: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        if not dbias:
            return self._cast(g, scale, transpose), None
        *cast, db = twin.cast_transpose_dbias(g, scale, None, 0, self.dtype)
        return per_tensor(*cast), db

    def activation_grad(
        self, g: Quantized, w: Operand, h: torch.Tensor, plan: ActivationPlan, transpose: bool, dbias: bool
    ) -> Produced:
        dy = dgrad(g, w, plan.dtype, plan.how)
        dh, scale = twin.activation_backward_scale(dy, h, plan.kind, *self.how)
        return self._cast_grad(dh, scale, transpose, dbias)

    def joined_grad(self, parts: list[torch.Tensor], groups: int, transpose: bool, dbias: bool) -> Produced:
        if not (transpose or dbias):
            return super().joined_grad(parts, groups, transpose, dbias)
        # Without a bias, too: sums that nobody reads cost less than a copy of the parts.
        parts = [part.contiguous() for part in parts]
        if self.amax is None:
            scale = twin.multi_current_scale(parts, True, *self.how)
        else:
            scale = twin.current_scale(self.amax, *self.how)
        q, q_t, scale_inv, db = twin.cat_cast_transpose_dbias(parts, groups, scale, None, 0, self.dtype)
        return per_tensor(q, q_t if transpose else None, scale_inv), db if dbias else None
