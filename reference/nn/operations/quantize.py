"""`Quantize`: x as FP8 holds it, y = T( fp32(q) · scale_inv ) with q = cast(x), inside `te.autocast`."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from reference.arguments import check_arguments
from reference.checkpoints import transformer_engine_state
from reference.float8.float8_quantizer import TE_DTYPES
from reference.float8.float8_tensor import Float8Tensor, dequantized
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import activation_dtype, check_tensor
from reference.nn.core.context import ModuleContext
from reference.nn.core.module import TransformerEngineBaseModule
from reference.recipes.quantized import PER_TENSOR, Quantized, as_dtype, rows_of
from reference.recipes.roles import Role, Roles
from reference.state.autocast import current
from reference.state.target_device import probe_target
from reference.support.nested import Tensors


class Plan(NamedTuple):
    """T, whether the gradient is wanted, which ways are quantized, and the key of the quantizers."""

    dtype: torch.dtype
    needs: tuple[bool, ...]
    ways: tuple[bool, bool]
    gemms: Hashable


def _tensor(x: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """x as a Float8Tensor; outside of FP8, and where a compiler or a dispatch mode looks on, as its numbers."""
    codes, scale_inv, layout, _ = x.row
    if scale_inv is None:
        return codes
    if layout != PER_TENSOR:
        raise NotImplementedError(
            f"ops.Quantize under a recipe of {layout} tensors is not offered: its result is a Float8Tensor, which has "
            f"one scale; DelayedScaling and Float8CurrentScaling are accepted."
        )
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return dequantized(codes, scale_inv, dtype)
    te_dtype = TE_DTYPES[codes.dtype]
    return Float8Tensor(codes.shape, dtype, data=codes, fp8_scale_inv=scale_inv, fp8_dtype=te_dtype)


def forward(plan: Plan, context: ModuleContext, x: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
    """y `[rows, n]` of x `[rows, n]`."""
    if not plan.ways[0]:
        return as_dtype(x, plan.dtype).clone(), ()
    return _tensor(context.quantizers["input"].quantize(x, transpose=False), plan.dtype), ()


def backward(plan: Plan, context: ModuleContext, saved: tuple[()], grad: torch.Tensor) -> Tensors:
    """dx of dL/dy."""
    if not plan.ways[1]:
        return (grad,)
    g, _ = context.quantizers["grad_output"].grad(grad.contiguous(), transpose=False, dbias=False)
    return (_tensor(g, plan.dtype),)


class Quantize(TransformerEngineBaseModule):
    """Inside `te.autocast` x, or its gradient, as FP8 holds it; outside x itself.

    The scale is this module's own, by the recipe: of an input forward (E4M3), of a gradient backward. The result is a
    `Float8Tensor` of T (in torch.compile its numbers as a plain tensor); a linear after it reads it, and casts.

    Args:
        forward: quantize x.
        backward: quantize the gradient.
    """

    keeps_scales = True
    taped = False  # what it gives are no plain tensors
    one_rank_has_all_tokens = True  # `te.parallel.share_tokens` refuses it

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        check_arguments("ops.Quantize", locals())
        super().__init__()
        self.quantized_init = None  # it has no weight
        self._ways = (forward, backward)
        self._device = torch.device("cpu")  # of its state: that of the last input

    def own_roles(self) -> Roles:
        return Roles(others=(Role("", "input", 0), Role("", "grad_output", 0)))

    def _parameter_device(self) -> torch.device:
        return self._device

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Follow the module's device."""
        self._device = probe_target(fn, self._device).device
        return super()._apply(fn, recurse)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_tensor("ops.Quantize", "input", input)
        enabled = current().enabled and not self.in_high_precision
        if input.dim() == 0 or (enabled and input.shape[-1] % 16):
            raise ValueError(
                f"ops.Quantize: input has shape {list(input.shape)}; [..., features] is accepted, features a multiple "
                f"of 16 under FP8 autocast."
            )
        if self._device != input.device:
            self._device, self._fitted = input.device, None
        dtype = activation_dtype(input)
        context = self.context(dtype, None)
        if not any(self._ways) or not (context.fp8 or self.calibrates(context)):
            return input
        x = rows_of(input)
        return differentiable(forward, backward, Plan(dtype, wanted(x), self._ways, context.key), context, x).view(
            input.shape
        )

    def calibrates(self, context: ModuleContext) -> bool:
        """Whether amaxes are recorded for a later run in FP8."""
        return bool(context.state(False)[1])

    def extra_repr(self) -> str:
        return f"forward={self._ways[0]}, backward={self._ways[1]}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if transformer_engine_state.is_writing():
            raise NotImplementedError(
                f"transformer_engine_state_dict: model has {prefix.rstrip('.') or 'the module'!r}, a te.ops.Quantize, "
                f"whose state has other names in Transformer Engine; a model without one is accepted."
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)
