"""Ops for what `torch.compile` must not trace; docs/torch_compile.md says why. Eager mode does not call them."""

from typing import Any

import torch

from reference.numbers import philox
from reference.ops.library import LIBRARY
from reference.state import scaling


def update_gradient_scales(layer: Any) -> None:
    """`scaling.update(forward=False)` after the backward of `layer`, the first module with scales of a step.

    A compiled backward requests it, and autograd's engine runs it after the whole pass: inside the graph the histories
    are not written yet, and modules outside are unknown.
    """
    thread = layer._membership.thread.number  # the forward's; autograd may run this in another
    if torch.compiler.is_compiling():
        torch.ops.twin.request_scale_update(layer.fp8_meta["scaling_bwd"].scale, thread)
    else:
        scaling.update(forward=False, thread=thread)


def before(state: torch.Tensor | None) -> torch.Tensor | None:
    """A copy, for backward, of a random state that the next op advances.

    A compiler would keep `state` instead of a plain `clone` and copy it in backward, when it has advanced.
    """
    if state is None:
        return None
    return torch.ops.twin.snapshot(state) if torch.compiler.is_compiling() else state.clone()


def order(device: torch.device) -> torch.Tensor:
    """The tensor that `twin::draw_seed` claims to change, so that a compiler keeps a graph's draws in order."""
    if device not in _orders:
        _orders[device] = torch.zeros(1, dtype=torch.int64, device=device)
    return _orders[device]


_orders: dict[torch.device, torch.Tensor] = {}


def _request(scale: torch.Tensor, thread: int) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(lambda: scaling.update(forward=False, thread=thread))


# `scale` counts as changed, although it changes later: a compiler removes an op without effect. The tag keeps it out of
# the CUDA graphs of `torch.compile(mode="reduce-overhead")`, which replay kernels and no Python.
LIBRARY.define("request_scale_update(Tensor(a!) scale, int thread) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("request_scale_update", _request, "CompositeExplicitAutograd")
torch.library.register_fake("twin::request_scale_update", lambda scale, thread: None, lib=LIBRARY)

LIBRARY.define("snapshot(Tensor(a!) state) -> Tensor")
LIBRARY.impl("snapshot", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("twin::snapshot", torch.empty_like, lib=LIBRARY)


def _draw(order: torch.Tensor, state: torch.Tensor) -> None:
    philox.reseed(state)


# Draws a seed from torch's generator: no compiled graph may reorder it, and no CUDA graph may omit it.
LIBRARY.define("draw_seed(Tensor(a!) order, Tensor(b!) state) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("draw_seed", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("twin::draw_seed", lambda order, state: None, lib=LIBRARY)
