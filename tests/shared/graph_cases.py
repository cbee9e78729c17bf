"""CUDA graphs on a CPU: a pretended capture."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import reference as te
from reference.graphs import graph
from reference.nn.core.dropout import Generator
from reference.state import graph_seeds, scaling

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=3)
RECIPES: dict[str, te.recipe.Recipe | None] = {
    "bf16": None,
    "delayed": RECIPE,
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
}
HIDDEN = 32


def state(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of scales, histories and random states."""
    found = [m.state for m in module.modules() if isinstance(m, Generator)]
    for m in module.modules():
        for key in scaling.KEYS:
            if key in getattr(m, "fp8_meta", {}):
                found += [m.fp8_meta[key].scale, m.fp8_meta[key].amax_history]
    return [t.clone() for t in found]


class Replay(torch.autograd.Function):
    """A captured module's node: its backward is a pass of its own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], count: int, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = [t.detach().requires_grad_(t.requires_grad) if i < count else t for i, t in enumerate(tensors)]
        with torch.enable_grad():
            ctx.out = run(*inputs[:count])
        ctx.inputs = inputs
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = iter(torch.autograd.grad(ctx.out, [t for t in ctx.inputs if t.requires_grad], grad))
        return None, None, *(next(grads) if t.requires_grad else None for t in ctx.inputs)


class Captured:
    """A graph in which nothing happens."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...

    def reset(self) -> None: ...


graph_seeds.follow(Captured)


@contextlib.contextmanager
def captured() -> Iterator[None]:
    one = Captured()
    one.capture_begin()
    yield
    one.capture_end()


def pretend(modules: Any, samples: Any, num_warmup_iters: int, allow_unused_input: bool, pool: Any = None) -> None:
    """`torch.cuda.make_graphed_callables` with functions in the place of graphs."""
    assert num_warmup_iters == 0
    outs = []
    for module, args in zip(modules, samples, strict=True):
        with captured():
            outs.append(module(*args))
    for out in (out for out in reversed(outs) if out.requires_grad):
        with captured():
            out.sum().backward()
    for module, args in zip(modules, samples, strict=True):
        run = module.forward
        module.zero_grad()

        def replay(*args: torch.Tensor, run: Any = run, module: Any = module) -> torch.Tensor:
            with mock.patch.object(graph_seeds, "present", graph_seeds.Draws):  # what runs is what a replay repeats
                return Replay.apply(run, len(args), *args, *module.parameters())

        module.forward = replay


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", pretend)
    monkeypatch.setattr(graph, "_nothing_to_capture", lambda args: False)
