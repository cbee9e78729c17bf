"""Random state of layers with dropout, bias + dropout + residual under autograd, and stochastic depth.

    y = T( residual + T( dropout( T( x + bias ) ) ) )
    y = T( residual + T( m · T( dropout( T( x + bias ) ) ) ) )      with `DropPath`: m is 0 or fp32(1 / (1 − p))

T: one rounding to x's dtype; order in `reference.ops.random.dropout`.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from reference.memory import recompute
from reference.memory.rng_tracker import CudaRNGStatesTracker
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.compiled import before, order
from reference.nn.core.context import BlockContext
from reference.nn.core.parameters import forked
from reference.numbers import philox
from reference.ops.library import twin
from reference.ops.random.dropout import state_or_none
from reference.parallel.ordered_reduce import gathered_rows
from reference.parallel.tokens import Tokens
from reference.state import graph_seeds
from reference.state.target_device import probe_target
from reference.state.threads import here
from reference.support.nested import Tensors
from reference.support.transforms import Unscripted


class Generator(torch.nn.Module):
    """A layer's random state: int64 `[seed, offset]` on its device; each op with dropout advances the offset.

    In each forward of its layer `draw` takes a new seed from torch's default CPU generator, so torch's own seeds and
    states decide about the masks, the same on every device. A CUDA graph does so at each replay
    (`reference.state.graph_seeds`).

    Args:
        device: of the state.
        get_rng_state_tracker: seeds are drawn inside `tracker().fork()`.
    """

    _place: tuple[int, ...] = ()  # of the class, for those that were pickled without one

    def __init__(self, device: torch.device, get_rng_state_tracker: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._get_rng = get_rng_state_tracker
        self._put(philox.new_state(device))

    def _put(self, state: torch.Tensor) -> None:
        self.state = state
        with torch.inference_mode(False):
            self._one = torch.tensor([1, 0], dtype=torch.int64, device=state.device)
        order(state.device)  # made before a compiler needs it

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Follow the module's device; a state that leaves the meta device draws a seed."""
        super()._apply(fn, recurse)
        device = probe_target(fn, self.state.device).device
        if device != self.state.device:
            with torch.inference_mode(False):
                state = philox.new_state(device) if self.state.is_meta else self.state.to(device)
            self._put(state)
        return self

    def at(self, *place: int) -> None:
        """Say where the tensors of the next ops lie in larger ones: the numbers after seed and offset that ops read."""
        if self._place == place and self.state.numel() == 2 + len(place):
            return  # to write it again would wait for a GPU
        self._place, words = place, torch.tensor(place, dtype=torch.int64, device="cpu")
        if self.state.numel() == 2 + len(place):
            self.state[2:].copy_(words)
        else:
            self.state = torch.cat([self.state[:2], words.to(self.state.device)])

    @property
    def seed_and_offset(self) -> torch.Tensor:
        """What a draw and `te.random` write: the state without its place."""
        return self.state if self.state.numel() == 2 else self.state[:2]

    def draw(self, device: torch.device) -> None:
        """Draw a new seed for this forward, or let a CUDA graph that is captured draw it; not in a recomputation.

        `device` is the input's: a loader that replaces parameters one by one leaves the state on the meta device.
        """
        thread, again = here(), recompute.frame_recomputed()
        if again is not None:
            tracker = None if self._get_rng is None else self._get_rng()
            # As the first run did, so that torch's own dropout after it repeats, too; but no tracker is left advanced.
            restored = tracker is None or tracker is again.tracker or isinstance(tracker, CudaRNGStatesTracker)
            if again.draws and restored and not self._captured():
                with forked(self._get_rng):
                    philox.draw_seed()
            return
        if self.state.is_meta and device.type != "meta":
            self._put(philox.new_state(device))
        elif thread.undrawn:
            return
        elif torch.compiler.is_compiling():
            if self._get_rng is not None:
                raise NotImplementedError(
                    "get_rng_state_tracker with dropout under torch.compile is not offered: a compiled graph cannot "
                    "fork random states; eager mode is accepted."
                )
            torch.ops.twin.draw_seed(order(self.state.device), self.state)
        elif self._captured():
            self._draw_at_replays()
        else:
            with forked(self._get_rng):
                # One launch with the seed as an argument makes (seed, 0); a copy would wait for the GPU.
                torch.mul(self._one, philox.draw_seed(), out=self.seed_and_offset)

    def _captured(self) -> bool:
        return graph_seeds.capturing(self.state.device)

    def _draw_at_replays(self) -> None:
        draws = graph_seeds.present()
        if draws is None:  # a graph that is not PyTorch's goes on from the present state
            return
        with contextlib.nullcontext() if self._get_rng is None else draws.forked(partial(forked, self._get_rng)):
            torch.mul(self._one, draws.slot(self.state.device), out=self.seed_and_offset)

    def take(self) -> torch.Tensor:
        """The state for an op that advances it; in a recomputation a copy of the first run's."""
        recorded = recompute.recalled(self, self.state)
        return recorded.clone() if recompute.recomputing() else self.state


class Plan(NamedTuple):
    """Which gradients are wanted (x, bias, residual), and the probability of dropping an element.

    `group`: the name of that whose ranks have rows of their own, over all of which the bias's gradient is summed;
    `tokens`: the same of ranks that have chunks of tokens. With both, the rows are those of the chunks.
    """

    needs: tuple[bool, ...]
    p: float
    group: str | None = None
    tokens: Tokens | None = None


class Saved(NamedTuple):
    """What backward reads: the random state from before the forward; None where nothing is dropped."""

    state: torch.Tensor | None


def drop_forward(
    plan: Plan, context: BlockContext, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> tuple[torch.Tensor, Saved]:
    """y `[tokens, hidden]`."""
    (state,), (kept,) = context.random, context.reads
    state_before = before(state)
    if plan.tokens is not None and state is not None:
        return plan.tokens.dropped(x, bias, residual, plan.p, state), Saved(state_before)
    return twin.bias_dropout_add(x, bias, residual, plan.p, state_or_none(state, x), kept), Saved(state_before)


def drop_backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """dx, db, dresidual."""
    (wants_x, wants_bias, wants_residual), grad, (kept,) = plan.needs, grad.contiguous(), context.reads
    dx = db = None
    if wants_x or wants_bias:
        if plan.tokens is not None and saved.state is not None:
            dx = plan.tokens.dropped_backward(grad, plan.p, saved.state)
        else:
            dx = before_dropped(grad, plan.p, saved.state, kept)
    if wants_bias:
        assert dx is not None
        if plan.tokens is not None:
            dx_of_all = plan.tokens.gathered(dx)
        else:
            dx_of_all = dx if plan.group is None else gathered_rows(plan.group, dx)
        db = twin.dbias(dx_of_all)
    return dx if wants_x else None, db, grad if wants_residual else None


def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    generator: Generator | None,
    kept: torch.Tensor | None = None,
    group: str | None = None,
    tokens: Tokens | None = None,
) -> torch.Tensor:
    """`residual + m · dropout(x + bias)` of `[..., hidden]`; without a generator, or with p = 0, no element is dropped.

    `kept`: m of each of x's entries, as `DropPath.kept` gives it; None without stochastic depth. `group`, `tokens`: as
    in `Plan`.
    """
    state = generator.take() if generator is not None and p > 0 else None
    flat = None if residual is None else residual.reshape(-1, x.shape[-1]).contiguous()
    tensors = (x.reshape(-1, x.shape[-1]).contiguous(), bias, flat)
    of_chunks = tokens if tokens is None else tokens._replace(rows=group)
    plan = Plan(wanted(*tensors), p if state is not None else 0.0, group, of_chunks)
    context = BlockContext(random=(state,), reads=(kept,))
    return differentiable(drop_forward, drop_backward, plan, context, *tensors).view(x.shape)


def before_dropped(grad: torch.Tensor, p: float, state: torch.Tensor | None, kept: torch.Tensor | None) -> torch.Tensor:
    """The gradient `[tokens, hidden]` of x from that of a dropout that drew from `state`, and of stochastic depth."""
    return twin.dropout_backward(grad, p, state, kept) if p > 0 or kept is not None else grad


class DropPath(Unscripted, torch.nn.Module):
    """Stochastic depth: x's entries along its first dimension are dropped as a whole with probability p.

    y = T( m · x ), which `twin::bias_dropout_add` computes; m is that op's result of fp32 ones `[1, n]`, one for each
    of x's n entries, so p is a multiple of 2^-16, and the words are those of Philox (`reference.ops.random.dropout`).
    Where m is 0, y is 0 · x: an infinity becomes NaN. The gradient is T( m · dy ).

    Args:
        p: the probability.
        device: of the random state.

    Source: Transformer Engine's `pytorch/transformer.py`; stochastic depth, arXiv 1603.09382.
    """

    def __init__(self, p: float, device: torch.device) -> None:
        super().__init__()
        self.p = float(p)
        self.generator = Generator(device)

    def draw(self, device: torch.device) -> None:
        """Draw a new seed for this forward of the layer, as `Generator.draw`."""
        self.generator.draw(device)

    def kept(self, entries: int, device: torch.device) -> torch.Tensor:
        """m of the next tensor with so many entries, fp32 `[entries]`."""
        ones = torch.ones(1, entries, device=device, dtype=torch.float32)
        with torch.no_grad():
            found: torch.Tensor = twin.bias_dropout_add(ones, None, None, self.p, self.generator.take())
        return found.view(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[n, ...]` with some of its n entries dropped; the others are divided by 1 − p."""
        rows = x if x.dim() > 1 else x.view(-1, 1)
        return bias_dropout_add(rows, None, None, 0.0, None, self.kept(x.shape[0], x.device)).view(x.shape)

    def extra_repr(self) -> str:
        return f"p={self.p}"
