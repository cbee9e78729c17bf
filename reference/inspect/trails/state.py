"""The tensors of a model and of its optimizer, by name and kind; and `te.digest`, their SHA-256.

    gradients/     of parameters: `grad`, and `main_grad` where there is one
    parameters/    weights; of a weight in FP8 its codes and scale
    buffers/       such as a batch norm's statistics
    fp8/           scales, amax histories, and the states of the layers' random numbers
    optimizer/     what it keeps of each parameter: moments, master weights, steps, in dicts, lists and tuples, too

Names are those in the model, so they are the same in each run, and on each rank of a data-parallel run. A tensor of the
model that has several names (tied weights) stands under the first.
"""

import enum
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from reference.inspect.recorded_step.tensor_names import (
    every_named,
    parts_of,
    values_of,
    values_of_state,
    why_unreadable,
)

KINDS = ("gradients", "parameters", "buffers", "fp8", "optimizer")
_WORDS = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device)  # whose repr says all


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
            # Of an optimizer each name counts: which of its values are one tensor may change from step to step.
            if kind == "optimizer" or not x.numel() or where(x) not in seen:
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
        Two runs are in the same state exactly if these are equal; torch's random numbers, and what an optimizer keeps
        elsewhere than in `state` and `param_groups`, are not in it.

    Raises:
        TypeError: an argument is not accepted; a tensor is sparse, nested, lazy, conjugate or on the meta device; the
            optimizer keeps a value whose words nobody can tell, such as a function.
    """
    check("digest", model, optimizer)
    found = {}
    for name, x in state_of("digest", model, optimizer, KINDS).items():
        found[name] = _of_tensor(x)
    for name, value in _others_of(model, optimizer):
        if isinstance(value, torch.Tensor):
            for part, x in parts_of(name, value):
                if why := why_unreadable(x):
                    raise TypeError(f"digest: {part} {why}")
                found[part] = _of_tensor(x)
        else:
            found[name] = hashlib.sha256(_said(name, value).encode()).hexdigest()
    return Digest(found)


def _of_tensor(x: torch.Tensor) -> str:
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    head = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}\n".encode()
    return hashlib.sha256(head + data.numpy().tobytes()).hexdigest()


def _said(name: str, value: Any) -> str:
    """What a value that is no tensor is, in words that another value does not have; what is in it has other names."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if type(value) in _WORDS:
        return repr(value)
    if isinstance(value, Mapping):
        if all(type(key) in _WORDS for key in value):
            return f"{kind} {sorted(map(repr, value))}"
    elif isinstance(value, (list, tuple, deque)):
        return f"{kind} {len(value)}"
    elif isinstance(value, (np.generic, enum.Enum)):
        return f"{kind} {value!r}"
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{kind} {value.dtype.str} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    raise TypeError(
        f"digest: {name} is {value!r:.200}; tensors, numbers, texts, arrays of them, and dicts by numbers or texts, "
        f"lists and tuples are accepted in an optimizer's state."
    )


def _others_of(model: torch.nn.Module, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """What an optimizer keeps besides the tensors of its state: numbers such as its step, and its groups' settings."""
    for _, name, value in values_of_state(model, optimizer):
        if not isinstance(value, torch.Tensor):
            yield f"optimizer/{name}", value
    for i, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for key, value in group.items():
            if key != "params":
                yield from values_of(f"optimizer/group {i}.{key}", value)
