"""Transforms of PyTorch's that look into a layer, and are refused: `torch.func`, forward mode, tracing, scripting.

A layer's arithmetic is that of its own ops, whose derivative is the layer's backward. What these transforms need (a
derivative of the derivative, a batched op, a graph of PyTorch's ops) does not exist, and a trace would hold this call's
numbers as constants. `torch.compile` and, for inference, `torch.export` are offered.
"""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

OFFERED = "torch.compile is accepted, and torch.export of a model in eval mode"


def active() -> bool:
    """Whether one that sees the tensors is open."""
    if torch.compiler.is_compiling():  # which brings its own
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch._C._is_tracing()


def refuse(layer: str, *values: Any) -> None:
    """Raise NotImplementedError if one is open, or if `torch.fx` traces one of the values."""
    if any(map(_is_proxy, values)):
        raise NotImplementedError(
            f"{layer}: torch.fx.symbolic_trace through it is not offered; a Tracer whose is_leaf_module takes "
            f"the layer as one call is accepted, or torch.compile."
        )
    if not active():
        return
    if torch._C._is_tracing():
        raise NotImplementedError(
            f"{layer}: torch.jit.trace (and the ONNX exporter that uses it) is not offered: the trace would hold this "
            f"call's numbers as constants; {OFFERED}."
        )
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{layer}: a transform of torch.func (vmap, grad, vjp, jvp, ...) is not offered: its kernels take "
            f"plain tensors; a loop, and torch.autograd.grad, are accepted."
        )
    raise NotImplementedError(
        f"{layer}: forward-mode automatic differentiation (torch.autograd.forward_ad) is not offered; backward is "
        f"accepted."
    )


def sees_gradients(grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether a backward, which no compiler traces, gets several gradients at once (`is_grads_batched=True`)."""
    for g in grads:  # in each backward: without a generator's calls
        if g is not None and torch._C._functorch.is_legacy_batchedtensor(g):
            return True
    return torch._C._are_functorch_transforms_active()


def refuse_gradients(layer: str) -> NoReturn:
    """Raise NotImplementedError for them."""
    raise NotImplementedError(
        f"{layer}: batched gradients (is_grads_batched=True, vectorize=True, torch.func) are not offered: its kernels "
        f"take plain tensors; one backward after the other is accepted."
    )


def _is_proxy(x: Any) -> bool:
    """Whether it stands for a value that `torch.fx` traces."""
    fx = sys.modules.get("torch.fx")
    return fx is not None and isinstance(x, fx.Proxy)


class Unscripted:
    """What a module has that `torch.jit.script` cannot compile."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Refused; torch.jit.script calls it."""
        raise NotImplementedError(f"{type(self).__name__}: torch.jit.script is not offered; {OFFERED}.")
