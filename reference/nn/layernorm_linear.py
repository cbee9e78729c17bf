"""`LayerNormLinear`: y = norm(x)·wᵀ + b, the norm emitting what the GEMM reads.

In 16 bits norm(x) is rounded to the activation dtype; in FP8 it is cast from fp32, without passing through 16 bits.
Otherwise each rounding point is that of `LayerNorm` followed by `Linear`: dL/dnorm is rounded to the activation dtype
before the norm's backward reads it.
"""

from collections.abc import Callable
from typing import Any

import torch

from reference.arguments import check_arguments
from reference.nn.autograd import differentiable
from reference.nn.checks import check_input
from reference.nn.layernorm import KINDS, arguments, norm_backward, register_norm, reset_norm, with_extras
from reference.nn.linear import GRAD_OUTPUT, INPUT, WEIGHT, LinearBase, Saved
from reference.nn.parameters import InitMethod, Split
from reference.nn.precision import Call, Kept, Operand, as_dtype, dgrad, fprop, keep, rows_of, wgrad

__all__ = ["LayerNormLinear"]


def forward(
    call: Call,
    needs: tuple[bool, ...],
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor | Operand,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], Saved]:
    """y `[tokens, out]` of x `[tokens, in]`; with `return_layernorm_output`, and norm(x) in the activation dtype."""
    needs_dx = any(needs[:3])
    x, norm = as_dtype(x, call.dtype), arguments(call, norm_weight, norm_bias)
    normed, mean, rstd = call.norm(x, norm, INPUT, transpose=needs[3])
    w = call.weight("weight", weight, WEIGHT, transpose=needs_dx)
    y = fprop(normed, w, call.bias(bias), call.dtype)
    saved = (*keep(normed), *keep(w), x, norm.weight, mean, rstd)
    if not call.layer.return_layernorm_output:
        return y, saved
    out = torch.ops.twin.norm(x, *norm, call.dtype)[0] if call.fp8 else normed.rows
    return (y, out), saved


def backward(call: Call, needs: tuple[bool, ...], saved: Saved, *grads: torch.Tensor) -> Saved:
    """Gradients of x, γ, β, w, b; `grads` are dL/dy and, with `return_layernorm_output`, dL/dnorm."""
    g, db = call.grad(grads[0].contiguous(), GRAD_OUTPUT, transpose=needs[3], dbias=needs[4])
    return (*operand_backward(call, needs, saved, g, *grads[1:]), db)


def operand_backward(
    call: Call,
    needs: tuple[bool, ...],
    saved: Saved,
    g: Operand,
    *norm_grad: torch.Tensor,
    residual_grad: torch.Tensor | None = None,
) -> Saved:
    """Gradients of x, γ, β, w of dL/dy as an operand; `residual_grad` reaches x past the norm."""
    normed, w = Kept(*saved[:2]), Kept(*saved[2:4])
    dx = dgamma = dbeta = None
    if any(needs[:3]):
        dnorm = dgrad(g, w, call.dtype)
        if norm_grad:
            dnorm = dnorm + norm_grad[0]
        dx, dgamma, dbeta = norm_backward(call, dnorm, saved[4:], residual_grad)
    dw = wgrad(g, normed, call.dtype, call.layer.main_grad("weight")) if needs[3] else None
    return dx, dgamma, dbeta, dw


class LayerNormLinear(LinearBase):
    """Normalisation and a linear layer in one, with Transformer Engine's arguments and parameter names.

    Parameters are `layer_norm_weight`, `layer_norm_bias` (not with RMSNorm), `weight`, `bias`.

    Args:
        in_features, out_features: sizes; in FP8 both must be multiples of 16. Any token count works.
        eps: added to the variance.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: keep γ − 1 in `layer_norm_weight`.
        return_layernorm_output: return `(y, norm(x))`.
        bias, return_bias, init_method, get_rng_state_tracker, parameters_split, params_dtype, device,
            fuse_wgrad_accumulation, and parallelism's arguments: as in `Linear`.

    Source: Transformer Engine's `pytorch/module/layernorm_linear.py`.
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None

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
        self.name = name
        self._set_up(
            (in_features, out_features),
            parameters_split,
            (params_dtype, device),
            init_method,
            (get_rng_state_tracker, None),
        )

    def _create_parameters(self, parts: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
        register_norm(self, self.in_features, dtype, device)
        super()._create_parameters(parts, dtype, device)

    def reset_parameters(self) -> None:
        """As `Linear`'s, and γ = 1, β = 0."""
        super().reset_parameters()
        reset_norm(self)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Apply the layer.

        Args:
            inp: `[..., in_features]`, fp32, bf16 or fp16.
            is_first_microbatch: as in `Linear.forward`.
            fp8_output, fp8_grad: FP8 results; only False is offered.

        Returns:
            y `[..., out_features]`; with `return_bias` the bias after it, with `return_layernorm_output` norm(x) last.
        """
        if not (fp8_output is fp8_grad is False and (is_first_microbatch is None or type(is_first_microbatch) is bool)):
            check_arguments("LayerNormLinear.forward", locals())
        check_input(self, inp, self.in_features)
        call = self.call(inp, is_first_microbatch)
        bias = self.joined_bias()
        tensors = (self.layer_norm_weight, self.layer_norm_bias, self.joined_weight())
        results = differentiable(forward, backward, call, rows_of(inp), *tensors, None if self.return_bias else bias)
        return with_extras(self, inp, results, self.out_features, bias, call.dtype)
