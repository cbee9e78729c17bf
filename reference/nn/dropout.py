"""Random state of layers that drop, and bias + dropout + residual under autograd.

y = T( residual + T( dropout( T( x + bias ) ) ) )       T: one rounding to x's dtype; order in `reference.ops.dropout`
"""

from collections.abc import Callable
from typing import Any

import torch

from reference import philox, recompute
from reference.compiled import before
from reference.nn.autograd import differentiable
from reference.nn.precision import Call
from reference.ops.library import twin

Saved = tuple[torch.Tensor | None, ...]


class Generator(torch.nn.Module):
    """A layer's own random state: int64 `[seed, offset]` on its device, advanced by each op that drops.

    Seeded at construction from torch's CPU generator, so `torch.manual_seed` fixes it on every device, a CUDA graph
    draws a new mask at each replay, and a copy of the layer draws the same masks.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.state = philox.new_state(device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Follow the module's device; integers keep their dtype."""
        super()._apply(fn, recurse)
        self.state = fn(self.state)
        return self

    def take(self) -> torch.Tensor:
        """The state for an op that advances it; in a recomputation a copy of what the first run took."""
        return recompute.state_for(self, self.state)


def drop_forward(
    call: "DropCall", needs: tuple[bool, ...], x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> tuple[torch.Tensor, Saved]:
    """y `[tokens, hidden]`."""
    state_before = before(call.state)
    return twin.bias_dropout_add(x, bias, residual, call.p, call.state), (state_before,)


def drop_backward(call: "DropCall", needs: tuple[bool, ...], saved: Saved, grad: torch.Tensor) -> Saved:
    """dx, db, dresidual."""
    grad = grad.contiguous()
    dx = grad if call.p == 0 else twin.dropout_backward(grad, call.p, saved[0]) if any(needs[:2]) else None
    return dx if needs[0] else None, twin.dbias(dx) if needs[1] else None, grad if needs[2] else None


class DropCall(Call):
    """One dropout: its probability, and the state it draws from."""

    def __init__(self, dtype: torch.dtype, p: float, state: torch.Tensor | None) -> None:
        super().__init__(None, dtype)  # type: ignore[arg-type]
        self.p = p
        self.state = state


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, p: float, generator: Generator | None
) -> torch.Tensor:
    """`residual + dropout(x + bias)` of `[..., hidden]`; without a generator, or with p = 0, nothing is dropped."""
    state = generator.take() if generator is not None and p > 0 else None
    call = DropCall(x.dtype, p if state is not None else 0.0, state)
    flat = None if residual is None else residual.reshape(-1, x.shape[-1]).contiguous()
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return differentiable(drop_forward, drop_backward, call, rows, bias, flat).view(x.shape)
