"""The tensors of a model and of its optimizer, by the names that recordings and trails give them."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from reference.float8.kept_tensor import KeptTensor
from reference.inspect.recorded_step.ops import has_numbers
from reference.nn.core.dropout import Generator
from reference.state.scaling import KEYS

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def named_tensors(
    model: torch.nn.Module, optimizer: Any, gradients: bool = False
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every tensor with a name that has numbers: the name, its module's path, the tensor.

    Those that appear twice once, gradients aside.
    """
    seen: set[tuple[int, int]] = set()
    for _, name, owner, x in every_named(model, optimizer, gradients):
        if type(x) not in _PLAIN or not has_numbers(x):
            continue
        where = (x.untyped_storage()._cdata, int(x.storage_offset()))
        if name.endswith(".grad") or (x.numel() and where not in seen):
            seen.add(where)
            yield name, owner, x


def every_named(
    model: torch.nn.Module, optimizer: Any, gradients: bool = False
) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """Every tensor with a name: its kind (`reference.inspect.trails.state`), the name, its module's path, the tensor.

    Of a tensor that is made of others (a DTensor, a weight in another library's format): those, by their names in it.
    """
    parameters = list(model.named_parameters())
    for kind, named in (("parameters", parameters), ("buffers", model.named_buffers())):
        for name, x in named:
            owner = name.rpartition(".")[0]
            for part, its in parts_of(name, x):
                yield kind, part, owner, its
            main_grad = getattr(x, "main_grad", None)
            if isinstance(main_grad, torch.Tensor):
                for part, its in parts_of(f"{name}.main_grad", main_grad):
                    yield "gradients", part, owner, its
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key in KEYS:
            meta = getattr(module, "fp8_meta", {}).get(key)
            if meta is not None:
                yield "fp8", f"{prefix}{key}.scale", path, meta.scale
                yield "fp8", f"{prefix}{key}.amax_history", path, meta.amax_history
        if isinstance(module, Generator):
            yield "fp8", f"{prefix}state", path.rpartition(".")[0], module.state
    of = {id(x): name for name, x in parameters}
    for key, name, x in values_of_state(model, optimizer):
        if isinstance(x, torch.Tensor):
            for part, its in parts_of(name, x):
                yield "optimizer", part, of.get(id(key), "").rpartition(".")[0], its
    for name, x in parameters if gradients else ():
        if x.grad is not None:
            for part, its in parts_of(f"{name}.grad", x.grad):
                yield "gradients", part, name.rpartition(".")[0], its


def values_of_state(model: torch.nn.Module, optimizer: Any) -> Iterator[tuple[Any, str, Any]]:
    """What an optimizer keeps: the key of its `state`, most often a parameter; the value's name; the value.

    A parameter that the model does not have is named by its place in the optimizer.
    """
    if optimizer is None:
        return
    of = {id(p): f"parameter {i}" for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    of |= {id(p): name for name, p in model.named_parameters()}
    for i, (key, state) in enumerate(optimizer.state.items()):
        name = of.get(id(key), f"state {i}") if isinstance(key, torch.Tensor) else f"state {key!r}"
        for its, value in values_of(name, state):
            yield key, its, value


def values_of(name: str, x: Any, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """A value and all that is in it by name, if it is a dict, list or tuple: `name.key`, `name[0]`, `name['any key']`.

    Raises:
        TypeError: it contains itself.
    """
    if id(x) in above:
        raise TypeError(f"{name} is a {type(x).__name__} that contains itself; one that ends is accepted.")
    yield name, x
    inside = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, (list, tuple, deque)) else ()
    for key, value in inside:
        word = isinstance(key, str) and key.isidentifier()
        yield from values_of(f"{name}.{key}" if word else f"{name}[{key!r}]", value, (*above, id(x)))


def parts_of(name: str, x: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, or those that it is made of; one that `why_unreadable` speaks of as it is."""
    if isinstance(x, KeptTensor):
        yield name, x.codes
        yield f"{name}_scale_inv", x._scale_inv
    elif type(x) in _PLAIN:
        yield name, x.detach()
    elif hasattr(x, "__tensor_flatten__"):
        for inner in x.__tensor_flatten__()[0]:
            part = getattr(x, inner)
            yield from parts_of(name if inner == "_local_tensor" else f"{name}.{inner}", part)
    elif isinstance(x, torch.Tensor):
        yield name, x if is_lazy(x) else _plain(x)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of another class, as a tensor; the tensor itself where it has none of its own."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        found = x.detach().as_subclass(torch.Tensor)  # type: ignore[arg-type]
        dense = found.layout is torch.strided and not found.is_meta and not found.is_nested
        return x if dense and found.numel() and not found.data_ptr() else found


def why_unreadable(x: torch.Tensor) -> str | None:
    """Why a part has no words to read, as the end of a sentence; None if it has."""
    if is_lazy(x):
        return "is uninitialized; a model whose lazy modules have been called once is accepted."
    if type(x) not in _PLAIN:
        return f"is a {type(x).__name__} without memory or __tensor_flatten__; tensors with one of them are accepted."
    if x.layout is not torch.strided or x.is_meta or x.is_nested:
        return f"is {'on the meta device' if x.is_meta else x.layout}; dense tensors with memory are accepted."
    if x.is_conj() or x.is_neg():
        return "is a view of conjugates or negatives; resolve_conj() and resolve_neg() give what is accepted."
    return None
