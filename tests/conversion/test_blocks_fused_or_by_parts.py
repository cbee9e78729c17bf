"""A block of `te.convert(model, blocks=True)` without transformers: fused or part by part, on a CPU and on an H200."""

from typing import Any

import pytest
import torch
from shared.training_pairs import numbers, train_both

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te
from reference.conversion.layers import become

BF16 = torch.bfloat16
RECIPES = {"bf16": None, "delayed": te.DelayedScaling(amax_history_len=4), "current": te.recipe.Float8CurrentScaling()}


class Decoder(torch.nn.Module):
    """Stands for a model's own class."""


class Rotary:
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)


class Config:
    _attn_implementation = "sdpa"


class Nothing:
    """A cache without keys, which keeps none."""

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v


def block() -> Any:
    torch.manual_seed(0)
    layer = te.TransformerLayer(64, 128, 4, 2, bias=False, hidden_dropout=0.0, attention_dropout=0.0,
                                normalization="RMSNorm", activation="swiglu", attn_input_format="bshd",
                                params_dtype=BF16)  # fmt: skip
    become(layer, Decoder)
    vars(layer).update(shared=(Rotary(), Config()), layer_idx=0)
    return layer


POSITIONS = torch.arange(40)[None] + 7
MASK = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril() & (torch.arange(40) > 2)
WAYS: dict[str, dict[str, Any]] = {
    "fused": {"position_ids": POSITIONS},
    "masked": {"position_ids": POSITIONS, "attention_mask": MASK},
    "by parts": {"position_ids": POSITIONS, "past_key_values": Nothing()},
    "rows differ": {"position_ids": torch.stack([POSITIONS[0], POSITIONS[0] - 3]), "attention_mask": MASK},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_or_part_by_part_every_bit_is_the_same(recipe: str, same_bits: Any) -> None:
    for first, second in (({}, {"past_key_values": Nothing()}), ({"attention_mask": MASK}, {"attention_mask": MASK})):
        layers = block(), block()
        same = {"position_ids": POSITIONS}, {"position_ids": POSITIONS.expand(2, -1)}
        for step in range(3):
            found = []
            for layer, given, positions in zip(layers, (first, second), same, strict=True):
                x = numbers(step, (2, 40, 64), BF16).requires_grad_()
                with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
                    y = layer(x, **given, **positions)
                y.backward(numbers(9 + step, (2, 40, 64), BF16, 1e-2))
                found.append([y, x.grad, *(p.grad for p in layer.parameters())])
            for a, b in zip(*found, strict=True):
                same_bits(a, b)


SIMULATED = [pytest.param(name, marks=[pytest.mark.simulated] if name == "delayed" else []) for name in RECIPES]


@pytest.mark.sample(1)
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", SIMULATED)
@pytest.mark.parametrize("way", WAYS)
def test_a_gpu_computes_the_same_bits(way: str, recipe: str, same_bits: Any) -> None:
    train_both(block(), (2, 40, 64), BF16, RECIPES[recipe], same_bits, steps=3, **WAYS[way])
