"""What a recording tells people: the model's structure and recipes, the optimizers, where and when it was made."""

import dataclasses
import platform
import time
from enum import Enum
from typing import Any

import torch


def about(model: torch.nn.Module, ops: str, optimizers: list[str]) -> dict[str, Any]:
    """Plain values for JSON. `ops`: what is kept of ops; `optimizers`: the classes of those that made a step."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None
    return {
        "optimizers": optimizers,
        "modules": {name: _settings(module) for name, module in model.named_modules()},
        "provenance": {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "gpu": gpu,
            "ops": ops,
        },
    }


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    """A module's class, its recipe and its plain attributes."""
    found: dict[str, Any] = {"class": f"{type(module).__module__}.{type(module).__qualname__}"}
    found |= {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and (value is None or type(value) in (bool, int, float, str))
    }
    recipe = getattr(module, "fp8_meta", {}).get("recipe") if getattr(module, "fp8", False) else None
    if recipe is not None:
        fields = {one.name: getattr(recipe, one.name) for one in dataclasses.fields(recipe)}
        plain = {name: value.name if isinstance(value, Enum) else value for name, value in fields.items()}
        found["recipe"] = {"class": type(recipe).__name__, **plain}
    return found
