"""`activation_recompute_forward`, around the two runs of a checkpoint that somebody else wrote, as in Megatron."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.transformer_layers import layer_of, numbers

import reference as te
from reference.memory.recompute import activation_recompute_forward, recomputing
from reference.quantization import FP8GlobalStateManager

RECIPE = te.DelayedScaling(amax_history_len=4)
Function = Callable[[torch.Tensor], torch.Tensor]


class ByHand(torch.autograd.Function):
    """A checkpoint in the way of Megatron's: a first run without a graph, a second one in backward."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: torch.Tensor) -> torch.Tensor:
        ctx.function, ctx.rng = function, torch.get_rng_state()
        ctx.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        ctx.recipe = FP8GlobalStateManager.get_fp8_recipe() if ctx.fp8 else None
        ctx.save_for_backward(x)
        with torch.no_grad(), activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        (x,) = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        rng = torch.get_rng_state()
        torch.set_rng_state(ctx.rng)
        again = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        with torch.enable_grad(), te.fp8_autocast(enabled=ctx.fp8, fp8_recipe=ctx.recipe), again:
            y = ctx.function(x)
        torch.set_rng_state(rng)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (layer_of(hidden_dropout=0.1, attention_dropout=0.1) for _ in range(2))


WAYS: dict[str, Callable[[Two, torch.Tensor], torch.Tensor]] = {
    "plain": lambda model, x: model.second(model.first(x)),
    "each": lambda model, x: ByHand.apply(model.second, ByHand.apply(model.first, x)),
    "both": lambda model, x: ByHand.apply(lambda t: model.second(model.first(t)), x),
    "the second": lambda model, x: ByHand.apply(model.second, model.first(x)),
    "the first": lambda model, x: model.second(ByHand.apply(model.first, x)),
}


def states(model: torch.nn.Module) -> list[torch.Tensor]:
    metas = [
        m.fp8_meta[k]
        for m in model.modules()
        for k in ("scaling_fwd", "scaling_bwd")
        if k in getattr(m, "fp8_meta", {})
    ]
    return [t.clone() for meta in metas for t in (meta.scale, meta.amax_history)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_it_changes_no_bit(way: str, fp8: bool, same_bits) -> None:
    found = []
    for run in (WAYS["plain"], WAYS[way]):
        model, results = Two(), []
        for step in range(2):
            torch.manual_seed(step)
            model.zero_grad()
            x = (numbers(step, 9, 2, 64) * 4**step).bfloat16().requires_grad_()
            with te.autocast(enabled=fp8, recipe=RECIPE):
                y = run(model, x)
            y.backward(numbers(9, *y.shape).bfloat16())
            results += [y, x.grad, torch.get_rng_state(), *(p.grad for p in model.parameters()), *states(model)]
        found.append(results)
    for a, b in zip(*found, strict=True):
        same_bits(a, b)
    assert not recomputing()


def test_several_microbatches_are_recomputed_in_their_order(same_bits) -> None:
    """As a pipeline does: all forwards, then all backwards from the first on."""
    found = []
    for run in (WAYS["plain"], WAYS["each"]):
        model = Two()
        xs = [(numbers(i, 9, 2, 64) * 3**i).bfloat16().requires_grad_() for i in range(3)]
        for _ in range(2):
            torch.manual_seed(0)
            ys = []
            for x in xs:
                with te.autocast(recipe=RECIPE):
                    ys.append(run(model, x))
            for y in ys:
                y.backward(torch.ones_like(y))
        found.append([*ys, *(x.grad for x in xs), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        same_bits(a, b)


def test_evaluation_leaves_nothing_behind_and_a_missing_first_run_is_an_error() -> None:
    layer = te.Linear(32, 32, params_dtype=torch.bfloat16)
    x = numbers(1, 16, 32).bfloat16()
    with te.autocast(recipe=RECIPE), activation_recompute_forward(True, False):
        layer.eval()(x)
    sentence = "activation_recompute_forward: Linear runs with recompute_phase=True more often than it ran, in training"
    with (
        pytest.raises(RuntimeError, match=sentence),
        te.autocast(recipe=RECIPE),
        activation_recompute_forward(True, True),
    ):
        layer.train()(x)
    with activation_recompute_forward(), te.autocast(recipe=RECIPE):  # does nothing
        layer(x)
    with pytest.raises(TypeError, match="activation_recompute_forward: recompute_phase=1; True and False are accepted"):
        activation_recompute_forward(True, 1)
