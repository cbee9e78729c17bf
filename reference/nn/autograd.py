"""A layer's pair of pure functions under autograd.

    forward(call, needs, *tensors) -> (out, saved)
    backward(call, needs, saved, *grads) -> gradients of the tensors

`call` (`reference.nn.precision`) says how to compute and knows the layer, `needs` which of the tensors want a
gradient. What a backward reads goes through `save_for_backward`, so that checkpointing and offloading see it; FP8
state stays on the layer.
"""

from collections.abc import Callable
from typing import Any

import torch

from reference import compiled, recompute
from reference.autocast import first_module_pending, take_first_module
from reference.nn.precision import Call

Saved = tuple[torch.Tensor | None, ...]
Forward = Callable[..., tuple[Any, tuple[torch.Tensor | None, ...]]]
Backward = Callable[..., tuple[torch.Tensor | None, ...]]


class Plain:
    """Runs a pair's functions; `optimized` puts in its place what launches their kernels without running them."""

    def forward(
        self, function: Forward, call: Call, needs: tuple[bool, ...], tensors: Saved, backward: Backward
    ) -> tuple[Any, Saved, Any]:
        """Out, what is saved, and a note for `backward`; the function `backward` is the pair's other, not run here."""
        return *function(call, needs, *tensors), None

    def backward(
        self, function: Backward, call: Call, needs: tuple[bool, ...], saved: Saved, grads: Saved, note: Any
    ) -> Saved:
        """The gradients."""
        return function(call, needs, saved, *grads)


_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))  # no weight that is kept in FP8
_plain = Plain()
player = _plain


def _player() -> Plain:
    return _plain if torch.compiler.is_compiling() else player  # a compiler looks into the functions


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Forward,
        backward: Backward,
        call: Call,
        needs: tuple[bool, ...],
        updates: bool,
        *tensors: torch.Tensor | None,
    ) -> Any:
        trains = any(needs)
        taken = tuple([x if type(x) in _PLAIN else call.taken(x, trains) for x in tensors])
        out, saved, ctx.note = _player().forward(forward, call, needs, taken, backward)
        ctx.save_for_backward(*saved)
        ctx.backward_function, ctx.call, ctx.needs, ctx.updates = backward, call, needs, updates
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Gradients without a graph would make a second derivative silently zero.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "backward with create_graph=True: the layers have no second derivative; create_graph=False is accepted."
            )
        results = _player().backward(ctx.backward_function, ctx.call, ctx.needs, ctx.saved_tensors, grads, ctx.note)
        if ctx.updates:
            compiled.update_gradient_scales(ctx.call.layer)
        return None, None, None, None, None, *results


def differentiable(forward: Forward, backward: Backward, call: Call, *tensors: torch.Tensor | None) -> Any:
    """`forward`'s output, with `backward` as its derivative with respect to `tensors`."""
    needs = call.needs(tensors)
    # The first FP8 module of an outermost autocast runs backward last, and then updates the gradients' scales.
    updates = call.fp8 and any(needs) and not recompute.replaying() and first_module_pending()
    out = _Pair.apply(forward, backward, call, needs, updates, *tensors)
    if updates:
        take_first_module()
    return out
