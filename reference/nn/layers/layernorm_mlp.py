"""`LayerNormMLP`: norm → fc1 → activation → fc2, the feed-forward half of a transformer layer.

    h = T( norm(x)·fc1ᵀ + b1 )            the pre-activation, rounded: the activation and its derivative read it
    y = T( act(h)·fc2ᵀ + b2 )             act(h) is rounded to T in 16 bits, cast from fp32 in FP8
    dact = T( g·fc2 ),  dh = dact·act'(h), cast from fp32 in FP8 and rounded to T in 16 bits
    db1 = column sums of dh               the rest is as in `LayerNormLinear`

T is the activation dtype. Source: Transformer Engine's `pytorch/module/layernorm_mlp.py`.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.memory import recompute
from reference.nn.core import init
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import activation_dtype, check_input
from reference.nn.core.context import ModuleContext, WeightRequest, quantize_weights
from reference.nn.core.module import TransformerEngineBaseModule
from reference.nn.core.parameters import InitMethod, forked, parameter_dtype
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
from reference.nn.layers.layernorm_linear import norm_output
from reference.ops.activations.activation import CLAMPED, Clamp, is_gated
from reference.recipes.quantized import Operand, Quantized, as_dtype, dgrad, fprop, rows_of, send_ahead
from reference.recipes.quantizer import ActivationPlan, NormPlan
from reference.recipes.roles import Roles, linear_map
from reference.support.nested import Tensors


class Wants(NamedTuple):
    """Which gradients are wanted."""

    x: bool
    norm_weight: bool
    norm_bias: bool
    fc1_weight: bool
    fc1_bias: bool
    fc2_weight: bool
    fc2_bias: bool

    @property
    def normed(self) -> bool:
        """Whether the gradient of norm(x) is needed for them."""
        return self.x or self.norm_weight or self.norm_bias

    @property
    def hidden(self) -> bool:
        """Whether the gradient of h is needed for them."""
        return self.normed or self.fc1_weight or self.fc1_bias


class Plan(NamedTuple):
    """T, which gradients are wanted (`Wants`), the quantizers' key, the settings."""

    dtype: torch.dtype
    needs: tuple[bool, ...]
    gemms: Hashable
    norm: NormPlan
    activation: str
    returns_norm: bool = False

    @property
    def wants(self) -> Wants:
        """`needs` by names."""
        return Wants(*self.needs)


class Saved(NamedTuple):
    """What backward reads: of the norm, the transposes of both GEMMs' operands, and h, where a gradient needs them."""

    norm: layernorm.Saved
    normed: Operand | None
    w1: Operand | None
    h: torch.Tensor | None
    a: Operand | None
    w2: Operand | None


def mlp_plan(layer: "LayerNormMLP", context: ModuleContext, dtype: torch.dtype, needs: tuple[bool, ...]) -> Plan:
    """The plan of a layer with its present settings."""
    return Plan(dtype, needs, context.key, norm_plan(layer), layer.activation_kind, layer.return_layernorm_output)


def hidden_forward(
    plan: Plan,
    context: ModuleContext,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    fc1_weight: torch.Tensor | Quantized,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor | Quantized,
) -> tuple[Quantized, Quantized, Any, Saved]:
    """All but fc2's GEMM, of x `[tokens, hidden]`: act(h), fc2's weight, norm(x) if it is returned, what is saved."""
    fc1, fc2 = context.gemms["fc1"], context.gemms["fc2"]
    wants, dtype = plan.wants, plan.dtype
    x, (gamma, beta) = as_dtype(x, dtype), parameters(norm_weight, norm_bias, dtype)
    all_normed = fc1.input.begin_norm(x, gamma, beta, plan.norm, dtype, wants.fc1_weight)
    w1, w2 = quantize_weights(
        WeightRequest(context, fc1, fc1_weight, transpose=wants.normed),
        WeightRequest(context, fc2, fc2_weight, transpose=wants.hidden),
    )
    normed, mean, rstd = all_normed()
    send_ahead(w2, len(normed.row.codes), fc2.how)
    activation = ActivationPlan(plan.activation, dtype, fc1.how)
    h, a = fc2.input.activation(normed, w1, fc1_bias, activation, transpose=wants.fc2_weight)
    of_norm = layernorm.Saved(x, gamma, mean, rstd)
    saved = Saved(of_norm, normed.column, w1.column, h if wants.hidden else None, a.column, w2.column)
    return a, w2, norm_output(normed, x, gamma, beta, plan) if plan.returns_norm else None, saved


def forward(
    plan: Plan,
    context: ModuleContext,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor | None,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], Saved]:
    """y `[tokens, hidden]` of x `[tokens, hidden]`; with `returns_norm` also norm(x)."""
    tensors = (x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight)
    a, w2, normed, saved = hidden_forward(plan, context, *tensors)
    y = fprop(a, w2, fc2_bias, plan.dtype, context.gemms["fc2"].how)
    return ((y, normed) if plan.returns_norm else y), saved


def backward(
    plan: Plan, context: ModuleContext, saved: Saved, *grads: torch.Tensor, residual_grad: torch.Tensor | None = None
) -> Tensors:
    """Gradients of x, γ, β, fc1's w and b, fc2's w and b; `grads` as in `LayerNormLinear`'s backward."""
    fc1, fc2 = context.gemms["fc1"], context.gemms["fc2"]
    wants, dtype = plan.wants, plan.dtype
    g, db2 = fc2.grad.grad(grads[0].contiguous(), transpose=wants.fc2_weight, dbias=wants.fc2_bias)
    dw2 = context.weight_grad(fc2, g, saved.a, dtype) if wants.fc2_weight else None
    dx = dgamma = dbeta = dw1 = db1 = of_norm = None
    if saved.h is not None and saved.w2 is not None:
        activation = ActivationPlan(plan.activation, dtype, fc2.how)
        dh, db1 = fc1.grad.activation_grad(
            g, saved.w2, saved.h, activation, transpose=wants.fc1_weight, dbias=wants.fc1_bias
        )
        of_weight = context.weight_grad_once(fc1, dh, saved.normed, dtype, wants.fc1_weight)
        if wants.normed:
            dnorm = dgrad(dh, saved.w1, dtype, fc1.how, of_weight)
            if len(grads) > 1:
                dnorm = dnorm + grads[1]
            dx, of_norm = begin_norm_backward(plan.norm, dnorm, saved.norm, residual_grad, fc1.how)
        dw1 = of_weight()
        if of_norm is not None:
            dgamma, dbeta = of_norm()
    return dx, dgamma, dbeta, dw1, db1, dw2, db2


def check_activation_params(layer: str, activation: str, params: dict[str, Any] | None) -> None:
    """Refuse parameters of an activation that has none; `check_arguments` has checked both by themselves."""
    if params and activation != CLAMPED:
        raise ValueError(
            f"{layer}: activation_params={params!r} with activation={activation!r}; None is accepted, or "
            f"activation={CLAMPED!r}."
        )


class LayerNormMLP(TransformerEngineBaseModule):
    """Normalisation and a two-layer perceptron, with Transformer Engine's arguments and parameter names.

    Parameters are `layer_norm_weight`, `layer_norm_bias` (not with RMSNorm), `fc1_weight`, `fc1_bias`, `fc2_weight`,
    `fc2_bias`. A gated activation doubles fc1's rows; its activated half comes first.

    Args:
        hidden_size, ffn_hidden_size: sizes; in FP8 both must be multiples of 16. Any token count works.
        eps, normalization, zero_centered_gamma: as in `LayerNormLinear`.
        activation: "gelu" (its tanh form), "geglu", "relu", "reglu", "silu", "swiglu", "srelu", "sreglu", "qgelu",
            "qgeglu", "glu" or "clamped_swiglu" (`reference.ops.activations.activation`).
        activation_params: of "clamped_swiglu", GPT-OSS's: a dict of "limit" (7.0), "alpha" (1.702) and
            "glu_linear_offset" (1.0), each of which may be left out.
        bias: fc1 and fc2 learn a bias.
        init_method, output_layer_init_method: called with fc1's, fc2's weight; None draws normal(0, 0.023).
        return_bias: leave fc2's bias out and return `(y, bias)`.
        return_layernorm_output: return `(y, norm(x))`.
        seq_length, micro_batch_size: accepted as in Transformer Engine, without effect.
        sequence_parallel, tp_group, tp_size: as in `Linear`: fc1 is column-, fc2 row-parallel; a rank has its rows of
            each half of a gated fc1. More than one rank need set_parallel_mode=True.
        checkpoint: keep only the input for backward and recompute the rest, with the same bits (`te.checkpoint`).
        ub_* and the rest: only "off" is offered.
        params_dtype, device, get_rng_state_tracker, fuse_wgrad_accumulation, delay_wgrad_compute: as in `Linear`.
    """

    fp8_sizes = ("hidden_size", "ffn_hidden_size")
    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None
    fc1_weight: torch.nn.Parameter
    fc2_weight: torch.nn.Parameter
    fc1_bias: torch.nn.Parameter | None
    fc2_bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        check_arguments("LayerNormMLP", locals())
        check_activation_params("LayerNormMLP", activation, activation_params)
        super().__init__()
        self.hidden_size = int(hidden_size)
        self.ffn_hidden_size = int(ffn_hidden_size)
        self.eps = float(eps)
        self.kind = KINDS[normalization]
        self.activation, self.activation_params = activation, activation_params
        self.activation_kind = Clamp(**activation_params).kind if activation_params else activation
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.use_bias = bias
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.name = name
        self.set_parallel_mode = set_parallel_mode
        self.take_tensor_group(tp_group, tp_size, sequence_parallel)
        self.check_parallel_mode()
        self.ffn_part = self.divided("ffn_hidden_size", self.ffn_hidden_size, "")
        self._take_roles()
        self.checkpoint = checkpoint
        self._init_methods = (init_method or init.normal_, output_layer_init_method or init.normal_)
        self._get_rng = get_rng_state_tracker
        self._create_parameters(parameter_dtype("LayerNormMLP", params_dtype), self.resolve_device(device))
        if self._parameter_device().type == "meta":
            self.keep_in_fp8()
        else:
            self.reset_parameters()
        self.delays(delay_wgrad_compute)

    def own_roles(self) -> Roles:
        fc1 = fc2 = None
        if self.tp_size > 1:
            fc1, fc2 = self.shared(False, self._fc1_parts()), self.shared(True, (self.ffn_part,))
        tokens = self.tokens
        return Roles((linear_map("fc1", "fc1_weight", 0, fc1, tokens), linear_map("fc2", "fc2_weight", 1, fc2, tokens)))

    parallel_modes = (None,)

    def divide(self, mode: str | None) -> None:
        self.set_parallel_mode = True
        self.check_parallel_mode()
        self.ffn_part = self.divided("ffn_hidden_size", self.ffn_hidden_size, "")
        self._take_roles()
        self.forget_precision()

    def _fc1_parts(self) -> tuple[int, ...]:
        """This rank's rows of fc1, of each half where there are two."""
        return (self.ffn_part,) * (2 if is_gated(self.activation) else 1)

    def partitions(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        rows = (0, self._fc1_parts())
        return {"fc1_weight": rows, "fc1_bias": rows, "fc2_weight": (1, (self.ffn_part,))}

    def _create_parameters(self, dtype: torch.dtype, device: torch.device) -> None:
        register_norm(self, self.hidden_size, dtype, device)
        fc1_rows = sum(self._fc1_parts())
        for layer, rows, columns in (
            ("fc1", fc1_rows, self.hidden_size),
            ("fc2", self.hidden_size, self.ffn_part),
        ):
            weight = torch.empty(rows, columns, dtype=dtype, device=device)
            self.register_parameter(f"{layer}_weight", torch.nn.Parameter(weight))
            bias = torch.nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if self.use_bias else None
            self.register_parameter(f"{layer}_bias", bias)
        self.mark_parameters()

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the weights anew, zero the biases, γ = 1; from the meta device, move to the default device first.

        With `defer_init=True` do nothing.
        """
        if defer_init:
            return
        if self._parameter_device().type == "meta":
            self.to_empty(device=self.resolve_device(None))
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        for init_method, name in zip(self._init_methods, self.fp8_weights, strict=True):
            with forked(self._get_rng):
                self.initialize(name, init_method)
        for bias in (self.fc1_bias, self.fc2_bias):
            if bias is not None:
                bias.zero_()

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Apply the layer.

        Args:
            inp: `[..., hidden_size]`, fp32, bf16 or fp16.
            is_first_microbatch: as in `Linear.forward`.

        Returns:
            y of inp's shape; with `return_bias` fc2's bias after it, with `return_layernorm_output` norm(x) last.
        """
        if not (is_first_microbatch is None or type(is_first_microbatch) is bool):
            check_arguments("LayerNormMLP.forward", {"is_first_microbatch": is_first_microbatch})
        check_input(self, inp, self.hidden_size)
        if self.sequence_parallel:
            self.check_rows(inp, False)
        if self.checkpoint and torch.is_grad_enabled():
            result: torch.Tensor = recompute.checkpoint(self._run, inp, is_first_microbatch)
            return result
        return self._run(inp, is_first_microbatch)

    def _run(
        self, inp: torch.Tensor, is_first_microbatch: bool | None
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """`forward` of checked arguments."""
        dtype, fc2_bias = activation_dtype(inp), self.fc2_bias
        context = self.context(dtype, is_first_microbatch)
        self.check_ranks(inp)
        tensors = (
            rows_of(inp),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            None if self.return_bias else fc2_bias,
        )
        results = differentiable(forward, backward, mlp_plan(self, context, dtype, wanted(*tensors)), context, *tensors)
        return with_extras(self, inp, results, self.hidden_size, fc2_bias, dtype)

    def extra_repr(self) -> str:
        recipe = self.fp8_meta.get("recipe")
        text = (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"activation={self.activation}, bias={self.use_bias}"
        )
        return text if recipe is None else f"{text}, recipe={recipe}"
