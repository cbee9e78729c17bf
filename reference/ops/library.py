"""The namespace `twin`: every operation both sides implement, with its schema.

`reference.ops.<name>` registers the CPU implementation of `twin::<name>`, which is its definition;
`optimized.ops.<name>` registers the CUDA one under the same schema. The device of the tensors decides which runs:
through torch's dispatcher as `torch.ops.twin.<name>`, and in the layers past it as `twin.<name>` of this file, because
its two Python levels cost more than most launches (docs/layer.md). Compilers, dispatch modes and everything else that
looks at ops sees both alike.

Four rules, each the answer to a bug found by trial:

* ops run inside an `autograd.Function` only: called where gradients would be recorded, they raise,
  because a raw library op has no derivative and its result would silently be a constant;
* a mutated argument (the amax history, the scale) gets its version bumped, which
  `Library.impl` does not do by itself, so that autograd notices a stale saved tensor;
* a device that has no implementation is named in a sentence;
* on the CPU they refuse to run where subnormal numbers are flushed to zero, whenever that was turned on.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from reference.denormals import check_denormals

_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {"CPU": {}, "CUDA": {}}
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # no subclass that wants to see the call


class _Library(torch.library.Library):
    """torch's, which also notes the implementations of both sides."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Register `fn` as `twin::<op_name>` for a dispatch key."""
        super().impl(op_name, fn, dispatch_key, **options)
        if dispatch_key in _IMPLEMENTATIONS:
            _IMPLEMENTATIONS[dispatch_key][op_name] = fn


LIBRARY = _Library("twin", "DEF")
twin = SimpleNamespace()
"""The ops by name, for the layers: `torch.ops.twin` without the dispatcher, where nothing would look at the call."""

SCHEMAS = {
    "activation": "(Tensor x, str kind) -> Tensor",
    "activation_backward": "(Tensor grad, Tensor x, str kind) -> Tensor",
    "activation_backward_cast_transpose_dbias": "(Tensor grad, Tensor x, str kind, Tensor scale,"
    " Tensor(a!)? amax_history, int column, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "activation_cast_transpose": "(Tensor x, str kind, Tensor scale, Tensor(a!)? amax_history, int column,"
    " ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    "adam": "(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] rounded, float lr, float beta1, float beta2, float eps, float weight_decay, float correction1,"
    " float correction2, bool decoupled) -> ()",
    "amax": "(Tensor x, Tensor(a!) amax_history, int column) -> ()",
    "attention": "(Tensor q, Tensor k, Tensor v, float scale, str mask_type, Tensor? mask, float dropout,"
    " Tensor(a!)? rng_state) -> (Tensor, Tensor, Tensor)",
    "attention_backward": "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor m, Tensor inv, float scale,"
    " str mask_type, Tensor? mask, float dropout, Tensor? rng_state) -> (Tensor, Tensor, Tensor)",
    "bias_dropout_add": "(Tensor x, Tensor? bias, Tensor? residual, float p, Tensor(a!)? rng_state) -> Tensor",
    "cast": "(Tensor x, Tensor scale, Tensor(a!)? amax_history, int column, ScalarType dtype) -> (Tensor, Tensor)",
    "cast_transpose": "(Tensor x, Tensor scale, Tensor(a!)? amax_history, int column, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    "cast_transpose_dbias": "(Tensor x, Tensor scale, Tensor(a!)? amax_history, int column,"
    " ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "cat_cast_transpose_dbias": "(Tensor[] xs, int groups, Tensor scale, Tensor(a!)? amax_history, int column,"
    " ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "dbias": "(Tensor grad) -> Tensor",
    "dropout_backward": "(Tensor grad, float p, Tensor? rng_state) -> Tensor",
    "gemm": "(Tensor a, Tensor b, Tensor? bias, ScalarType out_dtype) -> Tensor",
    "gemm_fp8": "(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias,"
    " ScalarType out_dtype, str accumulate) -> Tensor",
    "gemm_accumulate": "(Tensor a, Tensor b, Tensor(a!) out) -> ()",
    "gemm_fp8_accumulate": "(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor(a!) out) -> ()",
    "gemm_fp8_activation": "(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias,"
    " ScalarType out_dtype, str kind, Tensor scale, Tensor(a!)? amax_history, int column, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "gemm_fp8_activation_backward": "(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor x, str kind,"
    " Tensor scale, Tensor(a!)? amax_history, int column, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "gemm_fp8_bias_dropout_add": "(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias,"
    " Tensor? residual, ScalarType out_dtype, float p, Tensor(a!)? rng_state) -> Tensor",
    "multi_cast_transpose": "(Tensor[] xs, Tensor[] scales, Tensor(a!)[] amax_histories, int[] columns,"
    " Tensor(b!)[] q, Tensor(c!)[] q_t, Tensor(d!)[] scale_inv) -> ()",
    "norm": "(Tensor x, Tensor weight, Tensor? bias, float eps, bool zero_centered, str kind, ScalarType out_dtype)"
    " -> (Tensor, Tensor, Tensor)",
    "norm_backward": "(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool zero_centered, str kind,"
    " Tensor? residual_grad) -> (Tensor, Tensor, Tensor)",
    "norm_cast_transpose": "(Tensor x, Tensor weight, Tensor? bias, float eps, bool zero_centered, str kind,"
    " Tensor scale, Tensor(a!)? amax_history, int column, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "rotary": "(Tensor x, Tensor freqs, bool interleaved, bool backward) -> Tensor",
    "scale_update": "(Tensor(a!)[] scales, Tensor(b!)[] amax_histories, float fp8_max, int margin,"
    " str algorithm) -> ()",
    "softmax": "(Tensor x, float scale, str mask_type, Tensor? mask) -> Tensor",
    "softmax_backward": "(Tensor grad, Tensor y, float scale) -> Tensor",
}


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """Every tensor among `args`, those inside lists included."""
    found: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += [t for t in arg if isinstance(t, torch.Tensor)]
    return found


def no_implementation(name: str, devices: set[torch.device]) -> str:
    """The sentence for tensors on devices on which `twin::<name>` does not run."""
    where = ", ".join(sorted(map(str, devices)))
    if {device.type for device in devices} == {"cuda"}:
        return (
            f"twin::{name} got tensors on {where}, and the CUDA kernels are not loaded: "
            f"`import optimized` first (it needs a Hopper GPU and CuPy), or move the tensors to the CPU."
        )
    return f"twin::{name} got tensors on {where}; it runs on one device, 'cpu' (reference) or 'cuda' (optimized)."


def _watched() -> bool:
    """Whether a dispatch mode wants to see ops: one that is not `transparent` for them."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return not all(getattr(mode, "transparent", False) for mode in _get_current_dispatch_mode_stack())


def define(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare `twin::<name>` with its schema and register the decorated function as its CPU implementation."""
    LIBRARY.define(name + SCHEMAS[name])
    overload = getattr(torch.ops.twin, name).default
    on_cpu, on_cuda = _IMPLEMENTATIONS.values()
    mutated = [
        position
        for position, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def new_versions(args: Sequence[Any]) -> None:
        changed = _tensors([args[position] for position in mutated])
        if changed:
            torch.autograd.graph.increment_version(changed)  # passes over inference tensors, which have none

    def autograd(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args)):
            raise RuntimeError(
                f"twin::{name} has no derivative of its own: call it inside an autograd.Function "
                f"or under torch.no_grad(), or use the layer that wraps it."
            )
        with torch._C._AutoDispatchBelowAutograd():
            out = overload(*args)
        new_versions(args)
        return out

    def missing(*args: Any) -> Any:
        raise RuntimeError(no_implementation(name, {t.device for t in _tensors(args)}))

    def direct(*args: Any) -> Any:
        # A compiler takes the first way out. Inside an autograd.Function, as in every layer, grad mode is off.
        if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or _watched():
            return overload(*args)
        first = args[0][0] if type(args[0]) is list and args[0] else args[0]
        side = None if type(first) not in _PLAIN else on_cuda if first.is_cuda else on_cpu if first.is_cpu else None
        function = None if side is None else side.get(name)
        if function is None:
            return overload(*args)
        out = function(*args)
        new_versions(args)
        return out

    LIBRARY.impl(name, autograd, "Autograd")
    LIBRARY.impl(name, missing, "CompositeExplicitAutograd")
    setattr(twin, name, direct)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def definition(*args: Any) -> Any:
            check_denormals()
            return function(*args)

        LIBRARY.impl(name, definition, "CPU")
        return definition

    return register


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the shape-and-dtype implementation of `twin::<name>`."""
    return torch.library.register_fake(f"twin::{name}", lib=LIBRARY)
