"""The tensors of a model and of its optimizer, by name and kind; and `te.digest`, their SHA-256.

    gradients/     of parameters: `grad`, and `main_grad` where there is one
    parameters/    weights; of a weight in FP8 its codes and scale
    buffers/       such as a batch norm's statistics
    fp8/           scales, amax histories, and the states of the layers' random numbers
    optimizer/     what it keeps of each parameter: moments, master weights, steps

Names are those in the model, so they are the same in each run, and on each rank of a data-parallel run. A tensor that
has several names (tied weights) stands under the first.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from reference.inspect.recorded_step.tensor_names import every_named, why_unreadable

KINDS = ("gradients", "parameters", "buffers", "fp8", "optimizer")


def check(what: str, model: Any, optimizer: Any) -> None:
    """Refuse what is no module and no optimizer."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{what}: model={model!r}; a torch.nn.Module is accepted.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{what}: optimizer={optimizer!r}; a torch.optim.Optimizer or None is accepted.")


def where(x: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's memory, and how it lies in it."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def state_of(what: str, model: torch.nn.Module, optimizer: Any, kinds: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Tensors by kind and name, kinds in the order of `KINDS`, of each the order of the model.

    Raises:
        TypeError: one of them has no bytes to read: it is sparse, nested, lazy, conjugate, or on the meta device.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[Any] = set()
    named = list(every_named(model, optimizer if "optimizer" in kinds else None, gradients=True))
    for kind in (kind for kind in KINDS if kind in kinds):
        for its, name, _, x in named:
            if its != kind:
                continue
            if why := why_unreadable(x):
                raise TypeError(f"{what}: {kind}/{name} {why}")
            if not x.numel() or where(x) not in seen:
                seen.add(where(x))
                found[f"{kind}/{name}"] = x
    return found


class Digest(dict[str, str]):
    """SHA-256 of tensors by kind and name; `str()` is the SHA-256 of all of them, and of their names."""

    def __str__(self) -> str:
        return hashlib.sha256(json.dumps(list(self.items())).encode()).hexdigest()

    def of(self, kind: str) -> str:
        """The SHA-256 of one kind: "gradients", "parameters", "buffers", "fp8" or "optimizer"."""
        if kind not in KINDS:
            raise ValueError(f"digest: kind={kind!r}; one of {', '.join(map(repr, KINDS))} is accepted.")
        return str(Digest({name: its for name, its in self.items() if name.startswith(f"{kind}/")}))


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Digest:
    """SHA-256 of each tensor of a model and of its optimizer: of its dtype, shape and bytes.

        if str(te.digest(model, optimizer)) != other: ...

    Gradients, parameters, buffers, FP8 state and the optimizer's state, by the names of the model
    (`reference.inspect.trails.state`), for any model: layers of this package are not needed. Each tensor is copied to
    the host, so this is for checkpoints and for tests; `te.trail` is for each step.

    Returns:
        A dict of name → 64 hexadecimal digits; `str()` of it is one hash of all, `.of("parameters")` of one kind.
        Two runs are in the same state exactly if these are equal, random numbers of torch's aside.

    Raises:
        TypeError: an argument is not accepted, or a tensor is sparse, nested, lazy, conjugate or on the meta device.
    """
    check("digest", model, optimizer)
    found = {}
    for name, x in state_of("digest", model, optimizer, KINDS).items():
        data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        head = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}\n".encode()
        found[name] = hashlib.sha256(head + data.numpy().tobytes()).hexdigest()
    for name, value in _numbers_of(model, optimizer):
        found[name] = hashlib.sha256(repr(value).encode()).hexdigest()
    return Digest(found)


def _numbers_of(model: torch.nn.Module, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """What an optimizer keeps as plain numbers, such as its step."""
    names = {id(p): name for name, p in model.named_parameters()}
    for p, state in optimizer.state.items() if optimizer is not None else ():
        for name, value in state.items():
            if type(value) in (int, float, bool):
                yield f"optimizer/{names.get(id(p), 'parameter')}.{name}", value
    for i, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for name, value in group.items():
            if type(value) in (int, float, bool):
                yield f"optimizer/group {i}.{name}", value
