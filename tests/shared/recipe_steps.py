"""A layer and a training step, for the tests of recipes."""

from typing import Any

import pytest
import torch

import reference as te

BF16 = torch.bfloat16


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers, the same for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def layer_of(te: Any = te, **arguments: Any) -> Any:
    """A small `TransformerLayer` with dropout; always the same weights."""
    torch.manual_seed(1)
    settings = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "params_dtype": BF16, "device": "cpu"}
    return te.TransformerLayer(64, 128, 4, **(settings | arguments))


class Recomputed(torch.nn.Module):
    """`layer_of()`, which backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer_of()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return te.checkpoint(self.layer, x)


def step(layer: Any, recipe: Any, device: str = "cpu") -> list[torch.Tensor]:
    """y, dx and the parameters' gradients of a forward and backward, always on the same numbers."""
    torch.manual_seed(5)
    layer.zero_grad()
    x = numbers(1, 24, 2, 64).to(device).requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(numbers(2, *y.shape).to(device))
    return [t.detach().clone() for t in (y, x.grad, *(p.grad for p in layer.parameters()))]


def assert_refused(cls: Any, arguments: dict[str, Any], sentence: str) -> None:
    """A recipe refuses arguments when it is made, and the first of them where it is set."""
    errors, match = (TypeError, ValueError, NotImplementedError), f"^{cls.__name__}: .*{sentence}"
    with pytest.raises(errors, match=match):
        cls(**arguments)
    recipe = cls()
    (name, value), *_ = arguments.items()
    with pytest.raises(errors, match=match):
        setattr(recipe, name, value)
