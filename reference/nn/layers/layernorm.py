"""`LayerNorm` and `RMSNorm` as layers, `L2Normalization`, and what the fused layers share with them.

    y = (x − mean(x)) · rstd · γ + β         RMSNorm: y = x · rstd · γ         L2Normalization: y = x / sqrt(Σx² + eps)

The norm is over the last dimension; γ is `weight`, or `weight + 1` with `zero_centered_gamma`. Order and rounding
points: `reference.ops.norms.norm`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import activation_dtype, check_input
from reference.nn.core.context import BlockContext
from reference.nn.core.module import TransformerEngineBaseModule
from reference.nn.core.parameters import DeviceDefault, parameter_dtype
from reference.ops.library import twin
from reference.ops.norms.norm import block_rows
from reference.parallel.ordered_reduce import gathering, ranks_of
from reference.recipes.quantized import Accumulation, as_dtype, rows_of
from reference.recipes.quantizer import NormPlan
from reference.state.target_device import probe_target
from reference.support.nested import Tensors

KINDS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
"""`normalization` argument → the ops' name."""
WHOLE = Accumulation()
"""All rows are here."""


class Plan(NamedTuple):
    """T, which gradients are wanted (x, γ, β), the norm, and whether ranks have some of the rows each."""

    dtype: torch.dtype
    needs: tuple[bool, ...]
    norm: NormPlan
    how: Accumulation = WHOLE


def norm_plan(layer: Any) -> NormPlan:
    """The settings of a layer's norm."""
    return NormPlan(layer.eps, layer.zero_centered_gamma, layer.kind)


class Saved(NamedTuple):
    """What the backward of a norm reads: x and γ in T, each row's mean (none of RMSNorm) and rstd."""

    x: torch.Tensor
    gamma: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


def begin_norm_backward(
    norm: NormPlan,
    grad: torch.Tensor,
    saved: Saved,
    residual_grad: torch.Tensor | None = None,
    how: Accumulation = WHOLE,
) -> tuple[torch.Tensor, Callable[[], Tensors]]:
    """dx (+ residual_grad), and what gives dγ, dβ (None for RMSNorm).

    Where ranks have rows of their own (`how`), dγ and dβ are the sums over all rows, on every rank. What they need of
    other ranks is under way until they are asked for, which is best done after something else is launched.
    """
    given = (grad, *saved, norm.zero_centered, norm.kind, residual_grad)
    group = how.shared.group if how.shared is not None and how.shared.sequence else None
    count = 0 if group is None else block_rows(ranks_of(group)[1] * len(grad))
    if group is not None and how.tokens is None and len(grad) % count == 0:  # whole blocks of the sums over all rows
        dx, sums = twin.norm_backward_part(*given, count)
        blocks = [gathering(group, one) for one in sums]

        def find() -> Sequence[torch.Tensor]:
            return [twin.norm_total(one.rows(), saved.gamma.dtype) for one in blocks]
    else:
        dx, *own = twin.norm_backward(*given)
        parts = (grad, saved.x, saved.mean, saved.rstd)
        rows: list[Callable[[], torch.Tensor]] = []  # torch.compile follows no call of `list[...]`
        if how.tokens is not None:
            tokens = how.tokens._replace(rows=group)
            rows = [functools.partial(tokens.gathered, one) for one in parts]
        elif group is not None:
            rows = [gathering(group, one).rows for one in parts]

        def find() -> Sequence[torch.Tensor]:
            if not rows:
                return own
            g, x, mean, rstd = (one() for one in rows)
            of_all = twin.norm_backward(g, x, saved.gamma, mean, rstd, norm.zero_centered, norm.kind, None)
            return of_all[1:]  # type: ignore[no-any-return]

    def of_parameters() -> Tensors:
        of_gamma, *of_beta = find()
        return of_gamma, of_beta[0] if norm.kind == "layernorm" else None

    return dx, of_parameters


def norm_backward(
    norm: NormPlan,
    grad: torch.Tensor,
    saved: Saved,
    residual_grad: torch.Tensor | None = None,
    how: Accumulation = WHOLE,
) -> Tensors:
    """dx, dγ, dβ of `begin_norm_backward`."""
    dx, of_parameters = begin_norm_backward(norm, grad, saved, residual_grad, how)
    return (dx, *of_parameters())


def register_norm(layer: Any, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Create a fused layer's `layer_norm_weight` and, for LayerNorm, `layer_norm_bias`."""
    layer.layer_norm_weight = torch.nn.Parameter(torch.empty(hidden, dtype=dtype, device=device))
    beta = torch.nn.Parameter(torch.empty(hidden, dtype=dtype, device=device)) if layer.kind == "layernorm" else None
    layer.register_parameter("layer_norm_bias", beta)


@torch.no_grad()
def reset_norm(weight: torch.Tensor, bias: torch.Tensor | None, zero_centered: bool) -> None:
    """γ = 1, β = 0."""
    weight.fill_(0.0 if zero_centered else 1.0)
    if bias is not None:
        bias.zero_()


def with_extras(
    layer: Any,
    inp: torch.Tensor,
    results: Any,
    features: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    lead: tuple[int, ...] | None = None,
) -> Any:
    """The results of a fused layer: y, with `return_bias` its last bias, with `return_layernorm_output` norm(x).

    `lead`: y's dimensions before its features, where they are not inp's.
    """
    y, *normed = results if layer.return_layernorm_output else (results,)
    out = [y.view(*(inp.shape[:-1] if lead is None else lead), features)]
    if layer.return_bias:
        out.append(None if bias is None else bias.to(dtype))
    out += [t.view(inp.shape) for t in normed]
    return out[0] if len(out) == 1 else tuple(out)


def parameters(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """γ and β in the activation dtype, as in Transformer Engine."""
    return as_dtype(weight, dtype), None if bias is None else as_dtype(bias, dtype)


def forward(
    plan: Plan, context: BlockContext, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, Saved]:
    """y `[rows, hidden]` of x `[rows, hidden]`."""
    x, (gamma, beta) = as_dtype(x, plan.dtype), parameters(weight, bias, plan.dtype)
    y, mean, rstd = twin.norm(x, gamma, beta, *plan.norm, plan.dtype)
    return y, Saved(x, gamma, mean, rstd)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """dx, dγ, dβ of dL/dy."""
    return norm_backward(plan.norm, grad.contiguous(), saved, None, plan.how)


def _last_size(layer: str, normalized_shape: Any, hidden_size: Any) -> int:
    """The size that one of two arguments gives, a number or a list of one."""
    if normalized_shape is not None and hidden_size is not None:
        raise ValueError(
            f"{layer}: normalized_shape={normalized_shape!r} and hidden_size={hidden_size!r}, its older name; one is "
            f"accepted."
        )
    name, shape = ("normalized_shape", normalized_shape) if hidden_size is None else ("hidden_size", hidden_size)
    if isinstance(shape, (tuple, list)):
        if len(shape) != 1:
            raise ValueError(f"{layer}: {name}={shape!r}; one dimension, the last, is accepted.")
        shape = shape[0]
    check_arguments(layer, {name: shape})
    return int(shape)


class _Norm(TransformerEngineBaseModule):
    """What both norms share, with Transformer Engine's arguments.

    Args:
        normalized_shape: size of the last dimension.
        eps: added to the variance.
        sequence_parallel: the attribute of that name of the parameters, as in Transformer Engine; None sets none. A
            norm of its own has no group: under sequence parallelism its gradients are sums over this rank's tokens,
            and Megatron-LM adds those of parameters that have True there.
        sm_margin: only 0 is offered.
        params_dtype, dtype: of the parameters; None is torch's default dtype.
        zero_centered_gamma: keep γ − 1 in `weight`.
        hidden_size: older name of `normalized_shape`.
        device: None is the package's own.
    """

    kind: str
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    # A norm casts nothing to FP8, so it has no state for checkpoints.
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int = 0,
    ) -> None:
        name = "LayerNorm" if self.kind == "layernorm" else "RMSNorm"
        size = _last_size(name, normalized_shape, hidden_size)
        check_arguments(name, {**locals(), "normalized_shape": size, "hidden_size": size})
        if None not in (params_dtype, dtype) and params_dtype != dtype:
            raise ValueError(f"{name}: params_dtype={params_dtype} and dtype={dtype}, its newer name; one is accepted.")
        super().__init__()
        self.hidden_size = size
        self.eps = float(eps)
        self.zero_centered_gamma = zero_centered_gamma
        dtype = parameter_dtype(name, params_dtype or dtype)
        empty = torch.empty(self.hidden_size, dtype=dtype, device=self.resolve_device(device))
        self.weight = torch.nn.Parameter(empty)
        beta = torch.nn.Parameter(torch.empty_like(empty)) if self.kind == "layernorm" else None
        self.register_parameter("bias", beta)
        if sequence_parallel is not None:
            self.sequence_parallel = sequence_parallel
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """γ = 1, β = 0; from the meta device, move to the default device first. With `defer_init=True` do nothing."""
        if defer_init:
            return
        if self._parameter_device().type == "meta":
            self.to_empty(device=self.resolve_device(None))
        reset_norm(self.weight, self.bias, self.zero_centered_gamma)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `[..., hidden]`; the result has the input's (or torch.autocast's) dtype."""
        check_input(self, input, self.hidden_size, "input")
        how = WHOLE
        if self.cp_name is not None:
            self.check_rows_of_tokens("input", input)
            how = Accumulation(tokens=self.tokens)
        tensors = (rows_of(input), self.weight, self.bias)
        plan = Plan(activation_dtype(input), wanted(*tensors), norm_plan(self), how)
        return differentiable(forward, backward, plan, BlockContext(), *tensors).view(input.shape)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """Layer normalisation over the last dimension; parameters `weight` (γ) and `bias` (β). Arguments: `_Norm`."""

    kind = "layernorm"


class RMSNorm(_Norm):
    """Root-mean-square normalisation over the last dimension; parameter `weight` (γ). Arguments: `_Norm`."""

    kind = "rmsnorm"


class HeadPlan(NamedTuple):
    """T, whether the gradient is wanted, and the norm."""

    dtype: torch.dtype
    needs: tuple[bool, ...]
    norm: NormPlan


class HeadSaved(NamedTuple):
    """As `Saved`; γ is a constant of the module."""

    x: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


def l2_forward(plan: HeadPlan, context: BlockContext, x: torch.Tensor) -> tuple[torch.Tensor, HeadSaved]:
    """y `[rows, n]` of x `[rows, n]`; the context reads 1/√n."""
    x = as_dtype(x, plan.dtype)
    y, mean, rstd = twin.norm(x, context.reads[0], None, *plan.norm, plan.dtype)
    return y, HeadSaved(x, mean, rstd)


def l2_backward(plan: HeadPlan, context: BlockContext, saved: HeadSaved, grad: torch.Tensor) -> Tensors:
    """dx of dL/dy."""
    gamma: Any = context.reads[0]
    dx, _, _ = norm_backward(plan.norm, grad.contiguous(), Saved(saved.x, gamma, saved.mean, saved.rstd))
    return (dx,)


class L2Normalization(DeviceDefault, torch.nn.Module):
    """y = x / sqrt(Σx² + eps) over the last dimension of size n, without parameters: of queries and keys by head.

    It is RMSNorm with γ = fp32(1/√n), which is no parameter, and with eps/n in the place of eps. So its order and
    rounding points are those of `twin::norm`: x · rstd rounds to fp32, its product with γ rounds to fp32, then to the
    input's dtype.

    Args:
        hidden_size: n.
        eps: added to the sum of squares.
        device: None is the package's own.

    Source: Transformer Engine's `pytorch/ops/basic/l2normalization.py`.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, float(eps)
        self._put(self.resolve_device(device))

    def _put(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            value, scale_dtype = 1 / math.sqrt(self.hidden_size), torch.float32
            self.scale = torch.full((self.hidden_size,), value, dtype=scale_dtype, device=device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Follow the module's device."""
        super()._apply(fn, recurse)
        self._put(probe_target(fn, self.scale.device).device)
        return self

    def norm(self) -> NormPlan:
        """The settings of the norm that it is."""
        return NormPlan(self.eps / self.hidden_size, False, "rmsnorm")

    def gamma(self, device: torch.device) -> torch.Tensor:
        """γ on the activations' device."""
        if self.scale.device != device:  # a loader that replaces parameters one by one leaves it on the meta device
            self._put(device)
        return self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., n]`; the result has the input's (or torch.autocast's) dtype."""
        rows, gamma = rows_of(x), self.gamma(x.device)
        plan, context = HeadPlan(activation_dtype(x), wanted(rows), self.norm()), BlockContext(reads=(gamma,))
        return differentiable(l2_forward, l2_backward, plan, context, rows).view(x.shape)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


def head_norms(
    same_side: Callable[[Any], Any],
    kind: str | None,
    channels: int,
    eps: float,
    dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """The norms of queries and of keys by head, for an attention's `qk_norm_type`; L2 is one for both.

    `same_side`: `DeviceDefault.same_side` of that attention.
    """
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        shared = L2Normalization(channels, eps, device=device)
        return shared, shared
    make = same_side(LayerNorm if kind == "LayerNorm" else RMSNorm)
    query, key = (make(channels, eps=eps, params_dtype=dtype, device=device) for _ in range(2))
    return query, key
