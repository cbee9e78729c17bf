"""`LayerNormLinear`: y = norm(x)·wᵀ + b; the norm produces the GEMM's operand.

In 16 bits norm(x) is rounded to the activation dtype; in FP8 it is cast from fp32, without passing through 16 bits.
Every other rounding point is that of `LayerNorm` followed by `Linear`: dL/dnorm is rounded to the activation dtype
before the norm's backward reads it.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import activation_dtype, check_input
from reference.nn.core.context import ModuleContext
from reference.nn.core.parameters import InitMethod, Split
from reference.nn.layers import layernorm
from reference.nn.layers.layernorm import (
    KINDS,
    begin_norm_backward,
    norm_plan,
    parameters,
    register_norm,
    reset_norm,
    with_extras,
)
from reference.nn.layers.linear import LinearBase
from reference.ops.library import twin
from reference.recipes.quantized import PLAIN, Operand, Quantized, Stacked, Weight, as_dtype, dgrad, fprop, rows_of
from reference.recipes.quantizer import NormPlan
from reference.support.nested import Tensors

__all__ = ["LayerNormLinear"]


class Wants(NamedTuple):
    """Which gradients are wanted."""

    x: bool
    norm_weight: bool
    norm_bias: bool
    weight: bool
    bias: bool

    @property
    def normed(self) -> bool:
        """Whether the gradient of norm(x) is needed for them."""
        return self.x or self.norm_weight or self.norm_bias


class Plan(NamedTuple):
    """T, which gradients are wanted (`Wants`), the key of the quantizers, the norm, whether it is returned."""

    dtype: torch.dtype
    needs: tuple[bool, ...]
    gemms: Hashable
    norm: NormPlan
    returns_norm: bool = False

    @property
    def wants(self) -> Wants:
        """`needs` by names."""
        return Wants(*self.needs)


class Saved(NamedTuple):
    """What backward reads: of the norm, and the transposes of its output and of w, where a gradient needs them."""

    norm: layernorm.Saved
    normed: Operand | None
    w: Operand | Stacked | None


def forward(
    plan: Plan,
    context: ModuleContext,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor | Weight,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], Saved]:
    """y `[tokens, out]` of x `[tokens, in]`; with `returns_norm` also norm(x) in the activation dtype."""
    gemm, dtype, wants = context.gemm, plan.dtype, plan.wants
    x, (gamma, beta) = as_dtype(x, dtype), parameters(norm_weight, norm_bias, dtype)
    of_norm = gemm.input.begin_norm(x, gamma, beta, plan.norm, dtype, wants.weight)
    w = context.weight(gemm, weight, transpose=wants.normed)
    normed, mean, rstd = of_norm()
    y = fprop(normed, w, bias, dtype, gemm.how)
    saved = Saved(layernorm.Saved(x, gamma, mean, rstd), normed.column, w.column)
    if not plan.returns_norm:
        return y, saved
    return (y, norm_output(normed, x, gamma, beta, plan)), saved


def norm_output(
    normed: Quantized, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, plan: Any
) -> torch.Tensor:
    """norm(x) in the activation dtype, as a result of the layer."""
    own = normed.row.layout == PLAIN and len(normed.row.codes) == len(x)  # not the rows of all ranks
    return normed.row.codes if own else twin.norm(x, gamma, beta, *plan.norm, plan.dtype)[0]


def backward(plan: Plan, context: ModuleContext, saved: Saved, *grads: torch.Tensor) -> Tensors:
    """Gradients of x, γ, β, w, b; `grads` are dL/dy and, with `returns_norm`, dL/dnorm."""
    wants = plan.wants
    g, db = context.gemm.grad.grad(grads[0].contiguous(), transpose=wants.weight, dbias=wants.bias)
    return (*quantized_backward(plan, context, saved, g, *grads[1:]), db)


def quantized_backward(
    plan: Plan,
    context: ModuleContext,
    saved: Saved,
    g: Quantized,
    *norm_grad: torch.Tensor,
    residual_grad: torch.Tensor | None = None,
) -> Tensors:
    """Gradients of x, γ, β, w from a quantized dL/dy; `residual_grad` is the gradient that reaches x past the norm."""
    wants, gemm = plan.wants, context.gemm
    dx = dgamma = dbeta = of_norm = None
    of_weight = context.weight_grad_once(gemm, g, saved.normed, plan.dtype, wants.weight)
    if wants.normed:
        dnorm = dgrad(g, saved.w, plan.dtype, gemm.how, of_weight)
        if norm_grad:
            dnorm = dnorm + norm_grad[0]
        dx, of_norm = begin_norm_backward(plan.norm, dnorm, saved.norm, residual_grad, gemm.how)
    dw = of_weight()
    if of_norm is not None:
        dgamma, dbeta = of_norm()
    return dx, dgamma, dbeta, dw


class LayerNormLinear(LinearBase):
    """Normalisation and a linear layer, with Transformer Engine's arguments and parameter names.

    Parameters are `layer_norm_weight`, `layer_norm_bias` (not with RMSNorm), `weight`, `bias`.

    Args:
        eps: added to the variance.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: keep γ − 1 in `layer_norm_weight`.
        return_layernorm_output: return `(y, norm(x))`.

    All other arguments are those of `Linear`. Under sequence parallelism the gradients of the norm's parameters are
    whole on every rank, so that nobody need add them.

    Source: Transformer Engine's `pytorch/module/layernorm_linear.py`.
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None

    parallel_modes = ("column",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Split = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        check_arguments("LayerNormLinear", locals())
        super().__init__()
        self.eps = float(eps)
        self.kind = KINDS[normalization]
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.use_bias = bias
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.name, self.ub_name, self.parallel_mode = name, ub_name, parallel_mode
        self.take_tensor_group(tp_group, tp_size, sequence_parallel)
        if self.tp_size > 1 and parallel_mode == "row":
            raise ValueError(
                f"LayerNormLinear: parallel_mode='row' with tp_size={self.tp_size}, where no rank has a token's "
                f"features to normalise; 'column' is accepted."
            )
        self._set_up(
            in_features, out_features, parameters_split, params_dtype, device, init_method, get_rng_state_tracker
        )
        self.delays(delay_wgrad_compute)

    def _create_parameters(self, parts: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
        register_norm(self, self.in_features, dtype, device)
        super()._create_parameters(parts, dtype, device)

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """As `Linear.reset_parameters`; γ = 1 and β = 0, too."""
        if defer_init:
            return
        super().reset_parameters()
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Apply the layer; arguments as in `Linear.forward`.

        Returns:
            y `[..., out_features]`; with `return_bias` the bias after it, with `return_layernorm_output` norm(x) last.
        """
        if not (fp8_output is fp8_grad is False and (is_first_microbatch is None or type(is_first_microbatch) is bool)):
            given = {"is_first_microbatch": is_first_microbatch, "fp8_output": fp8_output, "fp8_grad": fp8_grad}
            check_arguments("LayerNormLinear.forward", given)
        check_input(self, inp, self.in_features)
        if self.sequence_parallel:
            self.check_rows(inp, False)
        dtype = activation_dtype(inp)
        context = self.context(dtype, is_first_microbatch)
        self.check_ranks(inp)
        bias = self.joined_bias()
        parameters = (self.layer_norm_weight, self.layer_norm_bias, self.joined_weight())
        tensors = (rows_of(inp), *parameters, None if self.return_bias else bias)
        plan = Plan(dtype, wanted(*tensors), context.key, norm_plan(self), self.return_layernorm_output)
        results = differentiable(forward, backward, plan, context, *tensors)
        lead = self.lead(inp, gathers=self.parallel_mode == "column", scatters=False)
        return with_extras(self, inp, results, self.out_features, bias, dtype, lead)
