"""What the two runs of a checkpointed function both read, and whether it is still what it was.

The recomputation happens when a backward asks for it. A weight that an optimizer has changed by then, or a mask whose
memory is used again, would give other gradients, without a word from autograd, which compares versions of what a
backward reads and not of what a recomputation reads. So the first run notes what is read, and the second one compares:
versions, which every in-place operation raises, and storages, which change where `.data` is set.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Read(NamedTuple):
    """A tensor of the first run: in words, the module and the name that it was a parameter of, and `content` then."""

    what: str | Callable[[], str]
    x: torch.Tensor
    module: Any
    name: str
    content: tuple[int, int]

    def check(self) -> None:
        """Raise RuntimeError if it is another tensor now, or holds other numbers."""
        replaced = self.module is not None and self.module._parameters.get(self.name) is not self.x
        now = self.content if replaced else content(self.x)
        if replaced or now != self.content:
            how = "replaced" if replaced or now[0] == self.content[0] else "changed in place"
            what = self.what if isinstance(self.what, str) else self.what()
            raise RuntimeError(
                f"checkpoint: {what} {list(self.x.shape)} was {how} between the first run and its recomputation "
                f"in backward, which would compute other gradients; a change after the backward is accepted."
            )


def content(x: Any) -> tuple[int, int]:
    """What changes where a tensor is written in place or gets other memory: its version and its storage."""
    kept = getattr(x, "_kept", None)  # of a weight that is kept in FP8
    x = x if kept is None else kept.codes
    if x.is_inference() or type(x) not in (torch.Tensor, torch.nn.Parameter) or hasattr(x, "ds_id"):
        return 0, 0  # such as a DTensor; and DeepSpeed frees and gathers weights between the runs
    try:
        return x._version, x.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # it has no memory of its own: sparse, or wrapped
        return x._version, 0


def weights(module: torch.nn.Module, path: str = "") -> Iterator[Read]:
    """A module's own parameters, unless they come and go with FSDP."""
    if hasattr(module, "_is_fsdp_managed_module"):
        return
    for name, x in module._parameters.items():
        if x is not None:
            yield Read(_words(module, path, name), x, module, name, content(x))


def inside(args: Any, kwargs: Any) -> list[Read]:
    """The tensors inside of a function's arguments. Those that are arguments themselves autograd compares."""
    inner = [x for x in args if not isinstance(x, torch.Tensor)], kwargs
    return [Read("an input", x, None, "", content(x)) for x in tree_leaves(inner) if isinstance(x, torch.Tensor)]


class Weights:
    """The parameters and buffers that a function reads: all those of a module, or what a function of others saves."""

    def __init__(self, function: Any) -> None:
        while isinstance(function, functools.partial):
            function = function.func
        if inspect.ismethod(function) and function.__name__ in ("forward", "__call__", "_wrapped_call_impl"):
            function = function.__self__
        self.function = function
        self.found: list[Read] = []
        self._buffers: list[Read] = []
        modules = function.named_modules() if isinstance(function, torch.nn.Module) else ()
        for path, module in modules:
            self.found += weights(module, path)
            for name, x in module._buffers.items():
                if x is not None:
                    self._buffers.append(Read(_words(module, path, name), x, None, "", content(x)))
        self._seen = {id(one.x) for one in self.found}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Around the first run, inside of PyTorch's own hooks: note the parameters that are saved for a backward."""
        pack, unpack = _hooks(True)

        def noted(x: torch.Tensor) -> Any:
            leaf = x if x._base is None else x._base
            node: Any = leaf.grad_fn
            if node is not None and node.name() == "ToCopyBackward0":  # torch.autocast's copy of a parameter
                leaf = getattr(node.next_functions[0][0], "variable", leaf)
            is_read = leaf.is_leaf and (leaf.requires_grad or isinstance(leaf, torch.nn.Parameter))
            if is_read and id(leaf) not in self._seen:
                self._seen.add(id(leaf))
                self.found.append(Read(functools.partial(_name, self.function, leaf), leaf, None, "", content(leaf)))
            return pack(x)

        return torch.autograd.graph.saved_tensors_hooks(noted, unpack)

    def settle(self) -> None:
        """At the end of the first run: buffers that it has changed itself are its own, such as running means."""
        self.found += [one for one in self._buffers if content(one.x) == one.content]


def _words(module: torch.nn.Module, path: str, name: str) -> str:
    return f"{type(module).__name__}'s {name}" if not path else f"{path}.{name}"


def _name(function: Any, x: torch.Tensor) -> str:
    """What a function calls a tensor, or a parameter of a module that it names."""
    owner = getattr(function, "__self__", None)
    for path, module in owner.named_modules() if isinstance(owner, torch.nn.Module) else ():
        for name, one in module._parameters.items():
            if one is x:
                return _words(module, path, name)
    named = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    for key, value in ({} if named is None else {**named.globals, **named.nonlocals}).items():
        if value is x:
            return key
        for name, one in value.named_parameters() if isinstance(value, torch.nn.Module) else ():
            if one is x:
                return f"{key}.{name}"
    return "a tensor"
