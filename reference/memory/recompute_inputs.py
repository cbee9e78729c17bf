"""What the two runs of a recomputed function both read, and whether it is still what it was.

The recomputation happens when a backward asks for it. A weight that an optimizer has changed by then, or a mask whose
memory is used again, would give other gradients, without a word from autograd, which compares versions of what a
backward reads and not of what a recomputation reads. So the first run notes what is read, and the second one compares:
versions, which every in-place operation raises, and addresses, which change where `.data` is set.
"""

import contextlib
import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_CALLS = ("forward", "__call__", "_wrapped_call_impl")
_NO_TENSORS = (torch.Tensor, type(None), bool, int, float, str, torch.nn.Module)


class _Read(NamedTuple):
    """A tensor of the first run: `content` then, and the module and name that it was a parameter of, or None.

    An address of 0 says nothing.
    """

    x: torch.Tensor
    content: tuple[int, int]
    module: Any = None
    name: str = ""

    def change(self) -> str | None:
        """What has become of it since; None if it is what it was."""
        version, address = content(self.x)
        if self.module is not None and self.module._parameters.get(self.name) is not self.x:
            how = "replaced"
        elif version != self.content[0]:
            how = "changed in place"
        elif 0 != self.content[1] != address != 0:
            how = "replaced"
        else:
            return None
        # FSDP and DeepSpeed free weights between the runs and gather them again.
        managed = hasattr(self.module, "_is_fsdp_managed_module") or hasattr(self.x, "ds_id")
        return None if managed else how


def content(x: Any) -> tuple[int, int]:
    """What changes where a tensor is written in place or gets other memory: its version and its address."""
    if type(x) not in (torch.nn.Parameter, torch.Tensor):
        kept = getattr(x, "_kept", None)  # of a weight that is kept in FP8
        if kept is None:
            return 0, 0  # such as a DTensor
        x = kept.codes
    if x.is_inference():
        return 0, 0
    try:
        return x._version, x.data_ptr()
    except RuntimeError:  # it has no memory of its own: sparse, or wrapped
        return x._version, 0


class Reads:
    """What a function reads.

    Of a module these are all its parameters, and the buffers that its run leaves alone: others are its own, such as
    running means. Of another function: the parameters that it saves for a backward. And the tensors inside of the
    arguments; those that are arguments themselves autograd compares.
    """

    def __init__(self, function: Any = None, args: Any = (), kwargs: Any = None) -> None:
        while isinstance(function, functools.partial):
            function = function.func
        if inspect.ismethod(function) and function.__name__ in _CALLS:
            function = function.__self__
        self.function = function
        self.weights: dict[int, _Read] = {}
        self.buffers: list[_Read] = []
        self.inputs = _inside(args, kwargs) if kwargs is not None else []
        if isinstance(function, torch.nn.Module):
            self._walk(function)

    def _walk(self, module: torch.nn.Module) -> None:
        self.add(module)
        for x in module._buffers.values():
            if x is not None:
                self.buffers.append(_Read(x, content(x)))
        for one in module._modules.values():
            if one is not None:
                self._walk(one)

    def add(self, module: torch.nn.Module) -> None:
        """Note a module's own parameters."""
        for name, x in module._parameters.items():
            if x is not None and id(x) not in self.weights:
                self.weights[id(x)] = _Read(x, content(x), module, name)

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Around the first run, inside of PyTorch's own hooks: note the parameters that a function saves."""
        if isinstance(self.function, torch.nn.Module):
            return contextlib.nullcontext()
        pack, unpack = _hooks(True)

        def noted(x: torch.Tensor) -> Any:
            leaf: Any = x if x._base is None else x._base
            node = leaf.grad_fn
            if node is not None and node.name() == "ToCopyBackward0":  # torch.autocast's copy of a parameter
                leaf = getattr(node.next_functions[0][0], "variable", leaf)
            is_read = leaf.is_leaf and (leaf.requires_grad or isinstance(leaf, torch.nn.Parameter))
            if is_read and id(leaf) not in self.weights:
                self.weights[id(leaf)] = _Read(leaf, (content(leaf)[0], 0))  # FSDP may gather it elsewhere
            return pack(x)

        return torch.autograd.graph.saved_tensors_hooks(noted, unpack)

    def end(self, outer: "list[Reads]") -> None:
        """At the end of the first run; recomputations around this one compute it, too."""
        self.buffers = [one for one in self.buffers if content(one.x) == one.content]
        for one in outer:
            one.weights = self.weights | one.weights
            one.buffers += self.buffers

    def check(self) -> None:
        """Raise RuntimeError if something is another tensor now, or holds other numbers."""
        for one in (*self.inputs, *self.weights.values(), *self.buffers):
            how = one.change()
            if how is not None:
                what = "an input" if any(one is x for x in self.inputs) else _name(self.function, one)
                raise RuntimeError(
                    f"checkpoint: {what} {list(one.x.shape)} was {how} between the first run and its recomputation in "
                    f"backward, which would compute other gradients; a change after the backward is accepted."
                )


def _inside(args: Any, kwargs: Any) -> list[_Read]:
    found = [x for x in kwargs.values() if isinstance(x, torch.Tensor)]
    for x in (*args, *kwargs.values()):
        if not isinstance(x, _NO_TENSORS):
            found += [one for one in tree_leaves(x) if isinstance(one, torch.Tensor)]
    return [_Read(x, content(x)) for x in found]


def _name(function: Any, read: _Read) -> str:
    """What a function calls a parameter or a buffer."""
    owner = getattr(function, "__self__", function)
    named = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    values = {} if named is None else {f"{key}.": x for key, x in {**named.globals, **named.nonlocals}.items()}
    for key, value in {f"{type(owner).__name__}'s ": owner, **values}.items():
        if value is read.x:
            return key[:-1]
        for path, module in value.named_modules() if isinstance(value, torch.nn.Module) else ():
            for name, x in (*module._parameters.items(), *module._buffers.items()):
                if x is read.x or (module is read.module and name == read.name):
                    return f"{key}{path}.{name}" if path else f"{key}{name}"
    return "a tensor" if read.module is None else f"{type(read.module).__name__}'s {read.name}"
