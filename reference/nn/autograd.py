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
from torch.autograd.function import once_differentiable

from reference import recompute, scaling
from reference.autocast import take_first_module
from reference.nn.precision import Call

Forward = Callable[..., tuple[Any, tuple[torch.Tensor | None, ...]]]
Backward = Callable[..., tuple[torch.Tensor | None, ...]]


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward, call: Call, *tensors: torch.Tensor | None) -> Any:
        ctx.needs = call.needs(*ctx.needs_input_grad[3:])
        out, saved = forward(call, ctx.needs, *tensors)
        ctx.save_for_backward(*saved)
        ctx.backward_function, ctx.call = backward, call
        # The first FP8 module of an outermost autocast runs backward last, and then updates the gradients' scales.
        ctx.updates = call.fp8 and any(ctx.needs) and not recompute.replaying() and take_first_module()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        results = ctx.backward_function(ctx.call, ctx.needs, ctx.saved_tensors, *grads)
        if ctx.updates:
            scaling.update(forward=False)
        return None, None, None, *results


def differentiable(forward: Forward, backward: Backward, call: Call, *tensors: torch.Tensor | None) -> Any:
    """`forward`'s output, with `backward` as its derivative with respect to `tensors`."""
    return _Pair.apply(forward, backward, call, *tensors)
