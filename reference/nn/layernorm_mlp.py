"""`LayerNormMLP`: norm → fc1 → activation → fc2, the transformer's feed-forward half.

    h = T( norm(x)·fc1ᵀ + b1 )            the pre-activation, rounded: what the activation and its derivative read
    y = T( act(h)·fc2ᵀ + b2 )             act(h) is rounded to T in 16 bits, cast from fp32 in FP8
    dact = T( g·fc2 ),  dh = dact·act'(h), cast from fp32 in FP8 and rounded to T in 16 bits
    db1 = column sums of dh               then as `LayerNormLinear`

T is the activation dtype. Source: Transformer Engine's `pytorch/module/layernorm_mlp.py`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from reference.arguments import check_arguments
from reference.nn import init
from reference.nn.autograd import differentiable
from reference.nn.checks import check_input
from reference.nn.layernorm import KINDS, arguments, norm_backward, register_norm, reset_norm, with_extras
from reference.nn.module import TransformerEngineBaseModule
from reference.nn.parameters import InitMethod, forked, parameter_dtype
from reference.nn.precision import Call, Kept, Operand, Weight, as_dtype, dgrad, fprop, keep, rows_of, wgrad
from reference.ops.activation import GATED

FC1_INPUT, FC1_WEIGHT, FC2_INPUT, FC2_WEIGHT = 0, 1, 3, 4  # columns of scaling_fwd
FC1_GRAD, FC2_GRAD = 0, 2  # columns of scaling_bwd
Saved = tuple[torch.Tensor | None, ...]


def hidden_forward(
    call: Call,
    needs: tuple[bool, ...],
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    fc1_weight: torch.Tensor | Operand,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor | Operand,
) -> tuple[Operand, Operand, Operand, Saved]:
    """All but fc2's product, of x `[tokens, hidden]`: act(h), fc2's weight and norm(x) as operands, what is saved."""
    layer = call.layer
    needs_dh = any(needs[:5])
    x, norm = as_dtype(x, call.dtype), arguments(call, norm_weight, norm_bias)
    normed, mean, rstd = call.norm(x, norm, FC1_INPUT, transpose=needs[3])
    w1, w2 = call.weights(
        Weight("fc1_weight", fc1_weight, FC1_WEIGHT, transpose=any(needs[:3])),
        Weight("fc2_weight", fc2_weight, FC2_WEIGHT, transpose=needs_dh),
    )
    h, a = call.activated(normed, w1, call.bias(fc1_bias), layer.activation, FC2_INPUT, transpose=needs[5])
    saved = (*keep(normed), *keep(w1), *keep(a), *keep(w2), h if needs_dh else None, x, norm.weight, mean, rstd)
    return a, w2, normed, saved


def forward(
    call: Call,
    needs: tuple[bool, ...],
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor | None,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], Saved]:
    """y `[tokens, hidden]` of x `[tokens, hidden]`; with `return_layernorm_output`, and norm(x)."""
    tensors = (x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight)
    a, w2, normed, saved = hidden_forward(call, needs, *tensors)
    y = fprop(a, w2, call.bias(fc2_bias), call.dtype)
    if not call.layer.return_layernorm_output:
        return y, saved
    x, norm = as_dtype(x, call.dtype), arguments(call, norm_weight, norm_bias)
    out = torch.ops.twin.norm(x, *norm, call.dtype)[0] if call.fp8 else normed.rows
    return (y, out), saved


def backward(
    call: Call,
    needs: tuple[bool, ...],
    saved: Saved,
    *grads: torch.Tensor,
    residual_grad: torch.Tensor | None = None,
) -> Saved:
    """Gradients of x, γ, β, fc1's w and b, fc2's w and b; the grads as in `LayerNormLinear`'s."""
    layer = call.layer
    normed, w1, a, w2 = (Kept(*saved[i : i + 2]) for i in (0, 2, 4, 6))
    h = saved[8]
    g, db2 = call.grad(grads[0].contiguous(), FC2_GRAD, transpose=needs[5], dbias=needs[6])
    dw2 = wgrad(g, a, call.dtype, layer.main_grad("fc2_weight")) if needs[5] else None
    dx = dgamma = dbeta = dw1 = db1 = None
    if h is not None:
        dh, db1 = call.activated_grad(g, w2, h, layer.activation, FC1_GRAD, transpose=needs[3], dbias=needs[4])
        dw1 = wgrad(dh, normed, call.dtype, layer.main_grad("fc1_weight")) if needs[3] else None
        if any(needs[:3]):
            dnorm = dgrad(dh, w1, call.dtype)
            if len(grads) > 1:
                dnorm = dnorm + grads[1]
            dx, dgamma, dbeta = norm_backward(call, dnorm, saved[9:], residual_grad)
    return dx, dgamma, dbeta, dw1, db1, dw2, db2


class LayerNormMLP(TransformerEngineBaseModule):
    """Normalisation and a two-layer perceptron in one, with Transformer Engine's arguments and parameter names.

    Parameters are `layer_norm_weight`, `layer_norm_bias` (not with RMSNorm), `fc1_weight`, `fc1_bias`, `fc2_weight`,
    `fc2_bias`; a gated activation doubles fc1's rows, the activated half first.

    Args:
        hidden_size, ffn_hidden_size: sizes; in FP8 both must be multiples of 16. Any token count works.
        eps: added to the variance.
        normalization: "LayerNorm" or "RMSNorm".
        activation: "gelu" (its tanh form), "geglu", "relu", "silu" or "swiglu".
        bias: fc1 and fc2 learn a bias.
        init_method, output_layer_init_method: called with fc1's, fc2's weight; None draws normal(0, 0.023).
        return_bias: leave fc2's bias out and return `(y, bias)`.
        return_layernorm_output: return `(y, norm(x))`.
        zero_centered_gamma: keep γ − 1 in `layer_norm_weight`.
        seq_length, micro_batch_size: Transformer Engine's hints for a warm-up; not needed here.
        checkpoint, activation_params, and parallelism's arguments: only "off" is offered.
        params_dtype, device, get_rng_state_tracker, fuse_wgrad_accumulation: as in `Linear`.
    """

    num_gemms = 2
    fp8_sizes = ("hidden_size", "ffn_hidden_size")
    fp8_weights: ClassVar = {"fc1_weight": FC1_WEIGHT, "fc2_weight": FC2_WEIGHT}
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
        super().__init__()
        self.hidden_size = int(hidden_size)
        self.ffn_hidden_size = int(ffn_hidden_size)
        self.eps = float(eps)
        self.kind = KINDS[normalization]
        self.activation = activation
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.use_bias = bias
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.name = name
        self._init_methods = (init_method or init.normal_, output_layer_init_method or init.normal_)
        self._get_rng = get_rng_state_tracker
        self._create_parameters(parameter_dtype("LayerNormMLP", params_dtype), self.resolve_device(device))
        if self._parameter_device().type == "meta":
            self.keep_in_fp8()
        else:
            self.reset_parameters()

    def _create_parameters(self, dtype: torch.dtype, device: torch.device) -> None:
        register_norm(self, self.hidden_size, dtype, device)
        fc1_rows = self.ffn_hidden_size * (2 if self.activation in GATED else 1)
        for layer, rows, columns in (
            ("fc1", fc1_rows, self.hidden_size),
            ("fc2", self.hidden_size, self.ffn_hidden_size),
        ):
            weight = torch.empty(rows, columns, dtype=dtype, device=device)
            self.register_parameter(f"{layer}_weight", torch.nn.Parameter(weight))
            bias = torch.nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if self.use_bias else None
            self.register_parameter(f"{layer}_bias", bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew, zero the biases, γ = 1; from the meta device, move to the default one first."""
        if self._parameter_device().type == "meta":
            self.to_empty(device=self.resolve_device(None))
        reset_norm(self)
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
            check_arguments("LayerNormMLP.forward", locals())
        check_input(self, inp, self.hidden_size)
        call = self.call(inp, is_first_microbatch)
        fc2_bias = self.fc2_bias
        results = differentiable(
            forward,
            backward,
            call,
            rows_of(inp),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            None if self.return_bias else fc2_bias,
        )
        return with_extras(self, inp, results, self.hidden_size, fc2_bias, call.dtype)

    def extra_repr(self) -> str:
        """Sizes, activation, bias and the recipe last run under."""
        recipe = self.fp8_meta.get("recipe")
        text = (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"activation={self.activation}, bias={self.use_bias}"
        )
        return text if recipe is None else f"{text}, recipe={recipe}"
