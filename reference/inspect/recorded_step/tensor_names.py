"""The tensors of a model and of its optimizer, by the names that a recording gives them."""

from collections.abc import Iterator
from typing import Any

import torch

from reference.float8.kept_tensor import KeptTensor
from reference.inspect.recorded_step.ops import has_numbers
from reference.nn.core.dropout import Generator
from reference.state.scaling import KEYS


def named_tensors(
    model: torch.nn.Module, optimizer: Any, gradients: bool = False
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every tensor with a name: the name, its module's path, the tensor; those that appear twice once."""
    seen: set[tuple[int, int]] = set()
    for name, owner, x in _every_named(model, optimizer):
        if not has_numbers(x):
            continue
        where = (x.untyped_storage()._cdata, int(x.storage_offset()))
        if x.numel() and where not in seen:
            seen.add(where)
            yield name, owner, x
    if gradients:
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            if grad is not None and type(grad) is torch.Tensor and has_numbers(grad):
                yield f"{name}.grad", name.rpartition(".")[0], grad


def _every_named(model: torch.nn.Module, optimizer: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    parameters = list(model.named_parameters())
    for name, x in (*parameters, *model.named_buffers()):
        owner = name.rpartition(".")[0]
        if isinstance(x, KeptTensor):
            yield name, owner, x.codes
            yield f"{name}_scale_inv", owner, x._scale_inv
        elif type(x) in (torch.Tensor, torch.nn.Parameter):
            yield name, owner, x.detach()
        main_grad = getattr(x, "main_grad", None)
        if isinstance(main_grad, torch.Tensor):
            yield f"{name}.main_grad", owner, main_grad
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key in KEYS:
            meta = getattr(module, "fp8_meta", {}).get(key)
            if meta is not None:
                yield f"{prefix}{key}.scale", path, meta.scale
                yield f"{prefix}{key}.amax_history", path, meta.amax_history
        if isinstance(module, Generator):
            yield f"{prefix}state", path.rpartition(".")[0], module.state
    of = {id(x): name for name, x in parameters}
    for p, state in optimizer.state.items() if optimizer is not None else ():
        for name, x in state.items():
            if type(x) is torch.Tensor:
                yield f"{of.get(id(p), 'parameter')}.{name}", of.get(id(p), "").rpartition(".")[0], x
