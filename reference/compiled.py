"""What `torch.compile` must not look into, as ops that it does not.

A compiled graph works on copies of the tensors it changes and writes them back at its end; it may compute a cheap
value a second time where it is used, and it removes an op that seems to do nothing. Eager mode goes past these ops.
"""

from typing import Any

import torch

from reference import philox, scaling
from reference.ops.library import LIBRARY


def update_gradient_scales(layer: Any) -> None:
    """`scaling.update(forward=False)` after the backward of `layer`, the first module with scales of a step.

    A compiled backward can only ask for it, and autograd's engine runs it when the whole pass is over: inside the graph
    the histories are not written yet, and of the modules outside nothing is known.
    """
    thread = layer._membership.thread.number  # the forward's; autograd may run this in another
    if torch.compiler.is_compiling():
        torch.ops.twin.request_scale_update(layer.fp8_meta["scaling_bwd"].scale, thread)
    else:
        scaling.update(forward=False, thread=thread)


def before(state: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of a random state that the next op advances, for backward.

    Were it a plain `clone`, a compiler would rather keep `state` and copy it in backward, when it has advanced.
    """
    if state is None:
        return None
    return torch.ops.twin.snapshot(state) if torch.compiler.is_compiling() else state.clone()


def order(device: torch.device) -> torch.Tensor:
    """What `twin::draw_seed` claims to change, so that a compiler keeps a graph's draws in their order."""
    if device not in _orders:
        _orders[device] = torch.zeros(1, dtype=torch.int64, device=device)
    return _orders[device]


_orders: dict[torch.device, torch.Tensor] = {}


def _request(scale: torch.Tensor, thread: int) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(lambda: scaling.update(forward=False, thread=thread))


# `scale` counts as changed, though it changes later: otherwise the op would seem to do nothing. The tag keeps it out of
# the CUDA graphs of `torch.compile(mode="reduce-overhead")`, which replay kernels and no Python.
LIBRARY.define("request_scale_update(Tensor(a!) scale, int thread) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("request_scale_update", _request, "CompositeExplicitAutograd")
torch.library.register_fake("twin::request_scale_update", lambda scale, thread: None, lib=LIBRARY)

LIBRARY.define("snapshot(Tensor(a!) state) -> Tensor")
LIBRARY.impl("snapshot", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("twin::snapshot", torch.empty_like, lib=LIBRARY)


def _draw(order: torch.Tensor, state: torch.Tensor) -> None:
    philox.reseed(state)


# A seed from torch's generator: no compiled graph may draw it in another order, and no CUDA graph may leave it out.
LIBRARY.define("draw_seed(Tensor(a!) order, Tensor(b!) state) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("draw_seed", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("twin::draw_seed", lambda order, state: None, lib=LIBRARY)
