"""Models and a training step, for the tests of `te.record`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import reference as te
from reference.inspect.recorded_step import file
from reference.inspect.recorded_step.replay import Result, replay

RECIPES: dict[str, Any] = {
    "delayed": te.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "16 bits": None,
}
BF16 = torch.bfloat16


class Between(torch.nn.Module):
    """Layers of ours with torch's own ops between them: an embedding, a product, a softmax, a sum."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 32, dtype=BF16, device=device)
        self.layers = torch.nn.ModuleList(te.Linear(32, 32, params_dtype=BF16, device=device) for _ in range(2))
        self.mlp = te.LayerNormMLP(32, 64, params_dtype=BF16, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Numbers become indices, so that every model here takes the same input.
        x = self.embedding((x[..., 0].float().abs() * 20).long() % 64)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.mlp(x.softmax(-1) * x) + x.mean(0, keepdim=True)


def layer(device: str, **options: Any) -> torch.nn.Module:
    return te.TransformerLayer(32, 64, 2, params_dtype=BF16, device=device, **options)


class Rotary(torch.nn.Module):
    """A layer with rotary angles and grouped queries."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = te.TransformerLayer(64, 64, 4, num_gqa_groups=2, params_dtype=BF16, device=device)
        self.first = te.Linear(32, 64, params_dtype=BF16, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.shape[0], dtype=torch.float32, device=x.device)[:, None] * torch.tensor(
            [1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003], device=x.device
        )
        angles = torch.cat([steps, steps], -1)[:, None, None]
        return self.layer(self.first(x), rotary_pos_emb=angles)


MODELS: dict[str, Callable[[str], torch.nn.Module]] = {
    "Linear": lambda device: te.Linear(32, 48, params_dtype=BF16, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(32, 64, activation="swiglu", params_dtype=BF16, device=device),
    "TransformerLayer": lambda device: layer(device),  # dropout of 0.1
    "grouped queries, rotary": Rotary,
    "list": Between,
}


def made(name: str, device: str = "cpu") -> torch.nn.Module:
    """A model, the same each time."""
    torch.manual_seed(7)
    return MODELS[name]("cpu").to(device)


def given(device: str = "cpu", scale: float = 1.0) -> torch.Tensor:
    """A batch."""
    x = torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(3)) * scale
    return x.to(device, BF16).requires_grad_()


def step(model: torch.nn.Module, x: torch.Tensor, recipe: Any, optimizer: Any = None) -> torch.Tensor:
    """Forward, backward, and the optimizer's step."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.float().square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    return y


def recorded(
    path: Path, model: torch.nn.Module, recipe: Any, optimizer: Any = None, device: str = "cpu", **options: Any
) -> torch.Tensor:
    """Two steps, of which the second is recorded."""
    step(model, given(device), recipe, optimizer)
    model.zero_grad()
    x = given(device)
    with te.record(model, path, optimizer, **options):
        return step(model, x, recipe, optimizer)


def replayed(path: Path) -> tuple[file.Recording, Result]:
    """A file, run again."""
    recording = file.read(path)
    return recording, replay(recording)
